"""Advantages of sampled responses, relative to the group of responses to the same prompt."""

from __future__ import annotations

import numpy as np

from roll_batching.errors import DataError

ESTIMATORS = ("grpo", "grpo_mean", "rloo", "reinforce")


def group_advantages(
    rewards: np.ndarray, group_size: int, *, estimator: str = "grpo", epsilon: float = 1e-4
) -> np.ndarray:
    """Advantages, float64[n], of `rewards`, float[n], whose groups are `group_size` consecutive entries.

    - `grpo`: (reward - mean of the group) / (standard deviation of the group + epsilon), as in DeepSeekMath;
    - `grpo_mean`: without the division, as in Dr. GRPO (a group's difficulty does not change its weight);
    - `rloo`: reward minus the mean of the *other* rewards of its group;
    - `reinforce`: the reward itself.

    A group whose rewards are all equal gets exact zeros (but for `reinforce`). Raises DataError when the
    rewards do not make whole groups, are not finite, or a leave-one-out group has one member.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or group_size < 1 or len(rewards) % group_size:
        raise DataError(
            f"{rewards.shape} rewards do not make groups of {group_size}: they must come group by group"
        )
    if not np.isfinite(rewards).all():
        bad = np.flatnonzero(~np.isfinite(rewards))
        raise DataError(f"rewards at positions {bad[:5].tolist()} are not finite")
    groups = rewards.reshape(-1, group_size)
    if estimator == "reinforce":
        return rewards.copy()
    if estimator not in ESTIMATORS:
        raise DataError(
            f"advantage estimator {estimator!r} is unknown: choose one of {', '.join(ESTIMATORS)}"
        )
    if estimator == "rloo" and group_size < 2:
        raise DataError("rloo needs at least two responses per prompt: raise num_return_sequences_in_group")
    centred = groups - groups.mean(axis=1, keepdims=True)
    # The mean of equal rewards may differ from them in the last bit: such groups must stay exact zeros.
    centred[groups.max(axis=1) == groups.min(axis=1)] = 0.0
    if estimator == "grpo":
        centred /= groups.std(axis=1, keepdims=True) + epsilon
    elif estimator == "rloo":
        centred *= group_size / (group_size - 1)
    return centred.reshape(-1)


def shuffled(advantages: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The control: the same advantages, each given to a random sample. Nothing can be learned from them."""
    return rng.permutation(advantages)
