"""How a role's passes are put into micro-batches: plain values, no torch, no YAML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll_batching.errors import ConfigError
from roll_batching.planning import BatchingSpec

LogprobPlan = Literal["train", "own", "none"]


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How training and forward-only passes are cut into micro-batches. Raises ConfigError when inconsistent."""

    train: BatchingSpec
    """Passes with a backward."""
    infer: BatchingSpec
    """Passes without one: log-probs with their own plan, evaluation, the reference."""
    logprob_plan: LogprobPlan = "train"
    """Plan of the old log-probs: training's ("train"), their own ("own"), or no such pass ("none")."""

    def __post_init__(self) -> None:
        for name in ("train", "infer"):
            if not isinstance(getattr(self, name), BatchingSpec):
                raise ConfigError(f"{name} is a {type(getattr(self, name)).__name__}: give a BatchingSpec")
        if self.logprob_plan not in ("train", "own", "none"):
            raise ConfigError(f"logprob_plan {self.logprob_plan!r} is unknown; choose train, own or none")
