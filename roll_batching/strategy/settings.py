"""How a strategy runs a step, whichever way it was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from roll_batching.errors import LayoutError
from roll_batching.planning.plain_values import integer_of, switch_of
from roll_batching.settings import RoleSettings

PipelineShapes = Literal["planned", "exchanged", "shared"]


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What `from_parts` takes as arguments and a configured strategy reads from its role's settings."""

    pipeline_shapes: PipelineShapes = "planned"
    """How pipeline stages learn the shapes that they receive: see `run_schedule`."""
    group_size: int | Literal["auto"] | None = None
    """Micro-batches per group of the interleaved schedule; None: Megatron's default, the pipeline size."""
    apply_loss_scale: bool = True
    """False: the loss enters as Megatron scales it, divided by micro-batches x data-parallel ranks."""
    rows_form: bool = False
    """Rectangles go to the model as [rows, length], for models that cannot take packs."""

    def __post_init__(self) -> None:
        if self.pipeline_shapes not in (known := get_args(PipelineShapes)):
            raise LayoutError(f"pipeline_shapes={self.pipeline_shapes!r} is unknown: choose one of {', '.join(known)}")
        if self.group_size not in (None, "auto"):
            object.__setattr__(self, "group_size", integer_of("group_size", self.group_size, error=LayoutError))
        for name in ("apply_loss_scale", "rows_form"):
            object.__setattr__(self, name, switch_of(name, getattr(self, name), error=LayoutError))

    @classmethod
    def of(cls, config: RoleSettings) -> StepSettings:
        """The settings of a configured role."""
        megatron = config.strategy_args.strategy_config
        return cls(
            pipeline_shapes=megatron.pipeline_shapes,
            group_size=megatron.microbatch_group_size_per_vp_stage,
            apply_loss_scale=config.apply_loss_scale,
        )
