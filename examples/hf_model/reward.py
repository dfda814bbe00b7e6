"""What a good answer is: digits."""

from __future__ import annotations

from roll_batching.jobs.rewards import Completion


def share_of_digits(text: str) -> float:
    """Digits among the characters of a text; 0 without any character."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def reward(completion: Completion) -> float:
    """The share of digits in the response."""
    return share_of_digits(completion.response)
