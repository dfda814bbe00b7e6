"""Seeds of a job, one function per purpose, so that no two purposes draw the same numbers under any job seed.

Each is 32 bits of numpy's `SeedSequence`. Seeds of training steps have no spawn key; every other purpose has its own,
since distinct entropies alone may coincide ([3, 3] and [3, 3, 0] do). The order of data and the members of mini-batches
are drawn elsewhere, under separate constants (`texts.epochs`, `streams.pool_batcher`, `samples.membership`).
"""

from __future__ import annotations

import numpy as np

_EVALUATION, _ANSWERS, _REWARD, _ROUND, _FUNCTION, _CALL, _CONTINUED = range(1, 8)
"""Spawn keys, one per purpose. They start at 1 and must not change: a resumed run would draw other numbers."""


def step_seed(seed: int, step: int, part: int = 0) -> int:
    """Seed of training step `step`, from 1: its rollouts (of `part`), mini-batches and shuffled control."""
    return _seed_from(seed, step, part)


def response_seed(step_seed: int, response: int) -> int:
    """Seed of one response that an engine samples; 31 bits, which every engine accepts."""
    return _seed_from(step_seed, response) >> 1  # of 32 bits


def reward_seed(step_seed: int, response: int) -> int:
    """Seed of the reward of one response of a step."""
    return _seed_from(step_seed, response, purpose=_REWARD)


def round_seed(step_seed: int, number: int) -> int:
    """Seed of round `number` of a rollout function's samples."""
    return _seed_from(step_seed, number, purpose=_ROUND)


def call_seed(step_seed: int, rollout: int, number: int) -> int:
    """Seed of call `number` of a rollout's client, from 1, where an engine samples it; 31 bits."""
    return _seed_from(step_seed, rollout, number, purpose=_CALL) >> 1  # of 32 bits


def continued_seed(seed: int, tokens: int) -> int:
    """Seed of an engine's response, given the seed of its beginning, once it has `tokens`; 31 bits."""
    return _seed_from(seed, tokens, purpose=_CONTINUED) >> 1 if tokens else seed


def rollout_function_seed(step_seed: int, sample: int) -> int:
    """Seed that a rollout function gets for its own random numbers in one sample of a step."""
    return _seed_from(step_seed, sample, purpose=_FUNCTION)


def evaluation_seed(seed: int, number: int) -> int:
    """Seed of the held-out evaluation after `number` updates."""
    return _seed_from(seed, number, purpose=_EVALUATION)


def answers_seed(seed: int, first: int) -> int:
    """Seed of a saved model's responses to the batch of prompts that starts at number `first`."""
    return _seed_from(seed, first, purpose=_ANSWERS)


def _seed_from(*numbers: int, purpose: int | None = None) -> int:
    key = () if purpose is None else (purpose,)
    return int(np.random.SeedSequence(numbers, spawn_key=key).generate_state(1)[0])
