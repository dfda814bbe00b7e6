"""Rewards, responses and log-probs that a host's functions and ours are given: plain lists, for JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

GROUPS, PROMPT, RESPONSE, BATCH = 50, 3, 7, 12
"""Reward groups, tokens of every prompt, tokens of the longest response, and samples of the batch of the loss."""
EQUAL = (0, 5)
"""Groups g with g % 6 in this have equal rewards."""


def rewards_of(group_size: int, seed: int) -> list[float]:
    """Rewards of `GROUPS` groups, group by group: all equal, one right, one wrong, 0 or 1, and floats."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(GROUPS):
        one = np.zeros(group_size)
        one[rng.integers(group_size)] = 1.0
        kinds = (
            np.full(group_size, float(number % 4 == 0)),
            one,
            1.0 - one,
            rng.integers(0, 2, group_size).astype(float),
            rng.normal(size=group_size).round(3),
            np.full(group_size, round(float(rng.normal()), 3)),
        )
        groups.append(kinds[number % len(kinds)])
    return [float(value) for value in np.concatenate(groups)]


def is_equal_group(group_size: int) -> np.ndarray:
    """bool [GROUPS x group_size]: the samples whose group has equal rewards, as a group of one has."""
    numbers = np.arange(GROUPS * group_size) // group_size
    return np.isin(numbers % 6, EQUAL) | (group_size == 1)


def responses(count: int, seed: int) -> dict[str, Any]:
    """`count` responses: `lengths`, and fields of tokens as rows of `RESPONSE` numbers, 0 behind the response.

    Old log-probs lie up to about 1 from the current ones, so that ratios are clipped on both sides; the engine's lie
    closer, but a few tokens far from the old ones, so that its weights are capped and filtered.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, RESPONSE + 1, count)
    real = np.arange(RESPONSE) < lengths[:, None]

    def around(center: np.ndarray, width: float) -> np.ndarray:
        return np.minimum(center + width * rng.standard_normal(real.shape), -1e-3)

    old = around(np.full(real.shape, -2.0), 0.6)
    fields = {
        "old_log_probs": old,
        "log_probs": around(old, 0.4),
        "ref_log_probs": around(old, 0.4),
        "rollout_log_probs": np.where(rng.random(real.shape) < 0.1, around(old, 1.2), around(old, 0.05)),
        "entropy": rng.uniform(0.1, 2.0, real.shape),
        "old_values": rng.normal(size=real.shape),
    }
    float32 = {name: np.where(real, values, 0.0).astype(np.float32) for name, values in fields.items()}
    return {"lengths": lengths.tolist(), **{name: values.tolist() for name, values in float32.items()}}


def request_of(group_size: int, seed: int) -> dict[str, Any]:
    """The samples of one file: a step of `GROUPS` groups for advantages, and a batch for the loss."""
    rng = np.random.default_rng(seed + 2)
    step = responses(GROUPS * group_size, seed)
    loss = responses(BATCH, seed + 1)
    loss["advantages"] = rng.normal(size=BATCH).astype(np.float32).tolist()
    return {
        "group_size": group_size,
        "step": {**step, "rewards": rewards_of(group_size, seed), "baselines": rng.random(GROUPS).round(3).tolist()},
        "batch": loss,
    }
