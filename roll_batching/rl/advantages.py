"""Advantages of sampled responses, from the rewards of a whole step.

Everything here is plain numpy on the rewards of all ranks, in the order of the sample ids: every rank
computes the same advantages from the same numbers and keeps those of its own samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from roll_batching.errors import DataError

Scope = Literal["group", "batch"]
EPSILON = 1e-4  # keeps a group with one odd reward among many from being scaled up without bound


@dataclass(frozen=True, kw_only=True)
class AdvantageRule:
    """How rewards become advantages: clip, subtract a mean, divide by a deviation, whiten, clip.

    The default is GRPO's. `mean="group", std=None` is Dr. GRPO's, `mean="batch", std="batch"` REINFORCE with
    global normalisation, both None plain REINFORCE.
    """

    mean: Scope | None = "group"
    """Whose mean reward is subtracted: that of the same prompt's responses, of the whole step, or none."""
    std: Scope | None = "group"
    """Whose standard deviation (of rewards, plus 1e-4) divides."""
    reward_clip: float | None = None
    """Rewards are clipped to [-x, x] first."""
    advantage_clip: float | None = None
    """Advantages are clipped to [-x, x] last."""
    whiten: bool = False
    """Give the step's advantages mean 0 and deviation 1 over response tokens (long responses count more)."""


def compute_advantages(
    rewards: np.ndarray, group_size: int, rule: AdvantageRule, *, response_tokens: np.ndarray | None = None
) -> np.ndarray:
    """Advantages, float64[n], of `rewards`, float[n], whose groups are `group_size` consecutive entries.

    `response_tokens`, int[n], is needed to whiten. A group with equal rewards gets exact zeros under
    `mean="group"`, unless they are whitened. Raises DataError when the rewards do not make whole groups or
    are not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or group_size < 1 or len(rewards) % group_size:
        raise DataError(
            f"rewards of shape {rewards.shape} do not make groups of {group_size}: they must come group by group"
        )
    if (bad := np.flatnonzero(~np.isfinite(rewards))).size:
        raise DataError(f"rewards at positions {bad[:5].tolist()} are not finite")
    if not len(rewards):
        return rewards.copy()
    if rule.reward_clip is not None:
        rewards = rewards.clip(-rule.reward_clip, rule.reward_clip)
    views = {"group": rewards.reshape(-1, group_size), "batch": rewards.reshape(1, -1)}
    result = rewards.copy()
    if rule.mean is not None:
        view = views[rule.mean]
        centred = view - view.mean(axis=1, keepdims=True)
        # The mean of equal numbers can differ from them in the last bit: those must stay exact zeros.
        centred[view.max(axis=1) == view.min(axis=1)] = 0.0
        result = centred.reshape(-1)
    if rule.std is not None:
        deviation = views[rule.std].std(axis=1, keepdims=True) + EPSILON
        result = (result.reshape(views[rule.std].shape) / deviation).reshape(-1)
    if rule.whiten:
        result = _whitened(result, response_tokens)
    if rule.advantage_clip is not None:
        result = result.clip(-rule.advantage_clip, rule.advantage_clip)
    return result


def _whitened(advantages: np.ndarray, response_tokens: np.ndarray | None) -> np.ndarray:
    if response_tokens is None or len(response_tokens) != len(advantages):
        raise DataError("whitening counts each response's tokens: pass response_tokens, one per reward")
    weights = np.asarray(response_tokens, dtype=np.float64)
    weights = weights / max(weights.sum(), 1.0)
    mean = (weights * advantages).sum()
    deviation = np.sqrt((weights * (advantages - mean) ** 2).sum())
    return (advantages - mean) / (deviation + EPSILON)


def shuffled(advantages: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The control: the same advantages, each given to a random sample. Nothing can be learned from them."""
    return rng.permutation(advantages)


def zero_groups(advantages: np.ndarray, group_size: int) -> np.ndarray:
    """bool[n]: the samples whose whole group has advantage exactly 0, and so no policy gradient."""
    idle = (np.asarray(advantages).reshape(-1, group_size) == 0.0).all(axis=1)
    return np.repeat(idle, group_size)
