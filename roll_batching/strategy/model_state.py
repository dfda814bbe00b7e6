"""The state of a strategy: its model in a parallel layout, its optimizer, and how steps run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from roll_batching.checked_fields import CheckedFields, Count
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LayoutError
from roll_batching.packing.attention_backend import AttentionBackend
from roll_batching.planning import BatchingSpec, CostModel, PlanConstraints
from roll_batching.planning.arrays import kind_of
from roll_batching.planning.pack_times import Cluster
from roll_batching.settings import ArchitectureConfig, BatchingConfig, RoleSettings

SchedulerUnit = Literal["steps", "samples"]
"""Unit in which an OptimizerParamScheduler counts."""


@dataclass(frozen=True, kw_only=True)
class StepSettings(CheckedFields, error=LayoutError):
    """Settings of the forward-backward schedule, from `from_parts` or from a role's settings.

    Raises `LayoutError` for a value of the wrong type or outside its choices.
    """

    group_size: Count | Literal["auto"] | None = None
    """Micro-batches per group of the interleaved schedule; None: Megatron's default, the pipeline size."""
    apply_loss_scale: bool = True
    """False: keep Megatron's own scaling, which divides by micro-batches x data-parallel ranks."""
    rows_form: bool = False
    """Pass rectangles to the model as [rows, length], for models that cannot take packs."""
    max_cp_size: Count = 1
    """Above 1, each pack has its own context-parallel size up to this one; see `PlanConstraints.max_cp_size`."""
    pipeline_slices: Count | Literal["auto"] = 1
    """Slices of a pack of mean cost, each a unit of the pipeline's schedule; see `PlanConstraints.pipeline_slices`."""
    pack_multiple: Count = 1
    """Multiple of the tokens that one rank holds; above 1 in FP8."""
    recurrent_context_parallel: Literal["auto", "heads", "sequence"] = "auto"
    """What context-parallel ranks divide in recurrent layers; see `MegatronConfig`."""
    cluster: Cluster = field(default_factory=Cluster)
    """Rates by which plans weigh costs and choose context-parallel sizes and slices."""
    cluster_file: str | None = None
    """File of these rates, with which measured steps are compared; None: steps are not compared."""
    cluster_device: str | None = None
    """Device of that file; None: not known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.cluster, Cluster):
            raise LayoutError(f"cluster is {kind_of(self.cluster)}: pass a Cluster")

    @classmethod
    def of(cls, config: RoleSettings, dp_size: int) -> StepSettings:
        """The step settings of a role with `dp_size` data-parallel ranks."""
        megatron = config.strategy_args.strategy_config
        cluster = Cluster() if megatron.cluster is None else megatron.cluster.rates
        return cls(
            group_size=megatron.microbatch_group_size_per_vp_stage,
            apply_loss_scale=config.apply_loss_scale,
            max_cp_size=megatron.max_cp_size(dp_size) if config.use_sequence_packing else 1,
            pipeline_slices=megatron.pipeline_slices if config.use_sequence_packing else 1,
            pack_multiple=megatron.pack_multiple,
            recurrent_context_parallel=megatron.recurrent_context_parallel,
            cluster=cluster,
            cluster_file=None if megatron.cluster is None else megatron.cluster.file,
            cluster_device=None if megatron.cluster is None else megatron.cluster.device,
        )

    def constraints(self, layout: ParallelLayout, batching: BatchingSpec) -> PlanConstraints:
        """Constraints of plans for a model in `layout`."""
        group_size = self.group_size if layout.interleaved else None
        return PlanConstraints.of(
            layout,
            batching,
            group_size=group_size,
            max_cp_size=self.max_cp_size,
            pipeline_slices=self.pipeline_slices if batching.mode == "packed" else 1,
            smallest_slice=self.cluster.slice_tokens,
            pack_multiple=self.pack_multiple,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingState:
    """Optimizer, learning-rate schedule and step counters."""

    optimizer: Any = None
    """A Megatron optimizer; None for loops that step it themselves."""
    scheduler: Any = None
    """An OptimizerParamScheduler, stepped after every optimizer step that was not skipped."""
    scheduler_unit: SchedulerUnit = "steps"
    skipped_steps: int = 0
    """Steps skipped so far: the gradient norm was not finite, or no token counted."""
    stuck_steps: int = 0
    """Last steps in a row whose gradients overflowed at a loss scale that cannot fall; checkpoints leave it out."""


@dataclass(frozen=True, kw_only=True)
class AdapterState:
    """LoRA adapters of a model whose other parameters are frozen."""

    targets: tuple[str, ...]
    """Hugging Face's names of the adapted projections."""
    rank: int
    alpha: float
    base: str | None
    """Model directory of the frozen parameters, which checkpoints leave out; None: they are saved."""
    base_is_loaded: bool = True
    """False: the frozen parameters are uninitialised, or came from another strategy."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelState:
    """One model in its parallel layout, with its batching and step settings."""

    layout: ParallelLayout
    chunks: Sequence[Any]
    """This pipeline stage's model chunks, one per virtual stage, with their DDP wrappers if any."""
    dtype: torch.dtype
    """Dtype of the parameters."""
    cost: CostModel
    """The planner's cost model for this architecture."""
    batching: BatchingConfig
    settings: StepSettings
    attention: AttentionBackend | None
    """Attention backend of all layers; None for a caller's own core, which gets plain PackedSeqParams."""
    rotates_rows: bool = False
    """Whether the model's own rotation takes packs as one run of rows (`modeling.adoption`)."""
    adoption_fault: str | None = None
    """Why packs of an adopted model may not share prefixes or have their own sizes; None: they may."""
    vocab_size: int | None = None
    """Real vocabulary, when the head has padded columns; None counts all."""
    pg_collection: Any = None
    """Megatron's process groups; None: those of its parallel state."""
    architecture: ArchitectureConfig | None = None
    """The settings that the model was built from; None for a model that the caller built."""
    own_family: str | None = None
    """`ModelArgs.family`, for models of a family that is not among the supported ones."""
    value_head: bool = False
    """Whether the model is a critic, with one output per token in place of the vocabulary."""
    adapters: AdapterState | None = None
    """LoRA adapters; None: the model has no adapters."""
    training: TrainingState | None = None
    """Optimizer, schedule and counters; None in a strategy that only infers."""

    @property
    def heads(self) -> int:
        """Number of heads of multi-token prediction."""
        return 0 if self.architecture is None else self.architecture.mtp_num_layers or 0

    @property
    def vision(self) -> Any:
        """The `VisionConfig` of a model with a vision encoder; None for other models."""
        return None if self.architecture is None else self.architecture.vision

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.layout.device

    @property
    def result_dtype(self) -> torch.dtype:
        """Dtype of per-token results: fp32, or fp64 for an fp64 model."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def optimizer(self) -> Any:
        """The optimizer, or None without one."""
        return None if self.training is None else self.training.optimizer
