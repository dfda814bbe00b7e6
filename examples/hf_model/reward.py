"""Reward for digits."""

from __future__ import annotations

from roll_batching.jobs.rewards import Completion


def share_of_digits(text: str) -> float:
    """Share of digits among the characters of `text`; 0 for an empty text."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def reward(completion: Completion) -> float:
    """Share of digits in the response."""
    return share_of_digits(completion.response)
