"""Reward for the letters of the prompt in alphabetical order."""

from __future__ import annotations

from roll_batching.jobs.rewards import Completion


def reward(completion: Completion) -> float:
    """Share of letters at the right position; 0 for a response of another length."""
    answer, response = completion.answer, completion.response
    if len(response) != len(answer):
        return 0.0
    return sum(a == b for a, b in zip(answer, response, strict=True)) / len(answer)
