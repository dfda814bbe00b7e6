"""What a strategy has once it has a model. It exists whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.packing.attention_backend import AttentionBackend
from roll_batching.planning import CostModel
from roll_batching.settings import ArchitectureConfig, BatchingConfig
from roll_batching.strategy.settings import StepSettings

SchedulerUnit = Literal["steps", "samples"]
"""What an OptimizerParamScheduler counts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingState:
    """What steps the weights."""

    optimizer: Any = None
    """A Megatron optimizer; None for loops that step it themselves."""
    scheduler: Any = None
    """An OptimizerParamScheduler, stepped after every optimizer step that was not skipped."""
    scheduler_unit: SchedulerUnit = "steps"
    skipped_steps: int = 0
    """Steps so far that were skipped: the gradient's norm was not finite, or no token counted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelState:
    """One model in its layout, and how passes over it are cut and run."""

    layout: ParallelLayout
    chunks: Sequence[Any]
    """This pipeline stage's model chunks, one per virtual stage, wrapped as they are trained."""
    dtype: torch.dtype
    """Of the parameters."""
    cost: CostModel
    """What a sequence costs this model, for the planner."""
    batching: BatchingConfig
    settings: StepSettings
    attention: AttentionBackend | None
    """What its layers attend with; None for cores that somebody else chose, which get PackedSeqParams alone."""
    vocab_size: int | None = None
    """Real vocabulary, when the head has padded columns; None counts all."""
    pg_collection: Any = None
    """Megatron's process groups, where they are not those of its parallel state."""
    architecture: ArchitectureConfig | None = None
    """The settings that the model was built from; None for a model that the caller built."""
    own_family: str | None = None
    """`ModelArgs.family`, for models of a family that is not among the supported ones."""
    training: TrainingState | None = None
    """None in a strategy that only infers."""

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.layout.device

    @property
    def result_dtype(self) -> torch.dtype:
        """What per-token results are returned in: fp32, or fp64 for an fp64 model."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def optimizer(self) -> Any:
        """The optimizer, or None without one."""
        return None if self.training is None else self.training.optimizer
