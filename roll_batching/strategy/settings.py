"""How a strategy runs a step, whichever way it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll_batching.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What `from_parts` takes as arguments and a configured strategy reads from its role's settings."""

    pipeline_shapes: Literal["planned", "exchanged", "shared"] = "planned"
    """How pipeline stages learn the shapes that they receive: see `run_schedule`."""
    group_size: int | Literal["auto"] | None = None
    """Micro-batches per group of the interleaved schedule; None: Megatron's default, the pipeline size."""
    apply_loss_scale: bool = True
    """False: the loss enters as Megatron scales it, divided by micro-batches x data-parallel ranks."""
    rows_form: bool = False
    """Rectangles go to the model as [rows, length], for models that cannot take packs."""

    @classmethod
    def of(cls, config: WorkerConfig) -> StepSettings:
        """The settings of a configured role."""
        megatron = config.strategy_args.strategy_config
        return cls(
            pipeline_shapes=megatron.pipeline_shapes,
            group_size=megatron.microbatch_group_size_per_vp_stage,
            apply_loss_scale=config.apply_loss_scale,
        )
