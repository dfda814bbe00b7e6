"""The advantage estimators that a job can name, and the keys that are their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roll_batching.registry import Entry, Registry


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(Entry):
    """A registered advantage estimator."""

    keys: Mapping[str, str]
    """Its settings: by the job's key, the keyword of its function."""
    compares: bool = False
    """It compares the responses to a prompt with each other, and needs at least two."""


_LIMITS = {"reward_clip": "reward_clip", "advantage_clip": "advantage_clip", "whiten_advantages": "whiten"}

ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    AdvantageEstimator(
        name="grpo",
        target="roll_batching.rl.advantages:grpo",
        summary="rewards minus their group's mean, over its deviation (the sample's, plus 1e-6)",
        keys={"norm_std_type": "std", **_LIMITS},
        compares=True,
    ),
    AdvantageEstimator(
        name="reinforce",
        target="roll_batching.rl.advantages:reinforce",
        summary="rewards as norm_* says",
        keys={"norm_mean_type": "mean", "norm_std_type": "std", **_LIMITS},
    ),
)
ADVANTAGE_KEYS = tuple(dict.fromkeys(key for entry in ADVANTAGE_ESTIMATORS for key in entry.keys))
"""Keys that registered estimators read; an estimator of anybody's own reads none of them."""
