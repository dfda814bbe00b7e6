"""The seeds of a job, one function per purpose: no two purposes draw the same numbers, whatever the job's seed is.

All are 32 bits of numpy's `SeedSequence`. What a training step draws comes of its entropy alone; any other purpose has
a spawn key of its own, which numpy keeps apart from any entropy. (Of entropies alone, [3, 3] and [3, 3, 0] are one.)
The order of data and the members of mini-batches are drawn in `data`, below constants of their own.
"""

from __future__ import annotations

import numpy as np

_EVALUATION, _ANSWERS, _REWARD = range(1, 4)
"""Spawn keys."""


def step_seed(seed: int, step: int, part: int = 0) -> int:
    """Of training step `step`, from 1: its rollouts, in parts where they are drawn so, its members and its control."""
    return _drawn(seed, step, part)


def response_seed(step_seed: int, response: int) -> int:
    """Of one response of a step, where an engine draws it; 31 bits, which every engine takes."""
    return _drawn(step_seed, response) >> 1


def reward_seed(step_seed: int, response: int) -> int:
    """Of the reward of one response of a step."""
    return _drawn(step_seed, response, purpose=_REWARD)


def evaluation_seed(seed: int, number: int) -> int:
    """Of the held-out evaluation after `number` updates."""
    return _drawn(seed, number, purpose=_EVALUATION)


def answers_seed(seed: int, first: int) -> int:
    """Of the answers that a saved model gives to prompts from number `first` on."""
    return _drawn(seed, first, purpose=_ANSWERS)


def _drawn(*numbers: int, purpose: int | None = None) -> int:
    key = () if purpose is None else (purpose,)
    return int(np.random.SeedSequence(numbers, spawn_key=key).generate_state(1)[0])
