"""Rehearse a job: one rank of each kind of pipeline stage, and the memory and FLOPs of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from roll_batching.errors import LayoutError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.layout_rules import differing_keys
from roll_batching.planning import ParallelDims
from roll_batching.rehearsal.experts import EXPERT_COUNT_READS
from roll_batching.rehearsal.extrapolation import extrapolate_layers
from roll_batching.rehearsal.lengths import lengths_of_data
from roll_batching.rehearsal.process import run_tasks
from roll_batching.rehearsal.rollout import fault_of, has_local_rollouts
from roll_batching.rehearsal.task import RankReport, RankTask
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.pipeline_split import ChunkLayers

GIB = 1 << 30
FEW, MORE = 2, 3
"""Layers per chunk of the two shallow models from which a deep one is extrapolated."""
WHOLE = 4
"""Largest number of layers per chunk that is rehearsed without extrapolation."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Memory that a rehearsal cannot count, added to its peak."""

    bytes: float
    reason: str


def margins_of(report: RankReport, peak: float) -> tuple[Margin, ...]:
    """Margins of one rank whose counted peak is `peak` bytes."""
    groups = {key.split(" / ")[1] for key in report.collectives if not key.split(" / ")[1].endswith("(1)")}
    transient = peak - sum(report.kept.values())
    return (
        Margin(bytes=1.0 * GIB, reason="CUDA's context, loaded kernels, cuBLAS's workspaces"),
        Margin(bytes=0.3 * GIB * len(groups), reason=f"NCCL's buffers, {len(groups)} communicators of 0.3 GiB"),
        Margin(bytes=0.06 * max(transient, 0), reason="fragmentation of the allocator, 6% of transient memory"),
    )


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """A pipeline stage, represented by one of its ranks."""

    name: str
    report: RankReport
    stages: int = 1
    """Number of stages that it represents."""

    @property
    def margins(self) -> tuple[Margin, ...]:
        """Margins at the peak."""
        return margins_of(self.report, self.peak)

    @property
    def peak(self) -> float:
        """Largest number of bytes held at a time, without margins."""
        return max(peak.bytes for peak in self.report.peaks.values())

    @property
    def peak_phase(self) -> str:
        """Phase of the peak."""
        return max(self.report.peaks.values(), key=lambda peak: peak.bytes).phase

    @property
    def need(self) -> float:
        """Bytes at the peak, with margins."""
        return self.need_in(self.report.peaks)

    def need_in(self, phases: Collection[str]) -> float:
        """Bytes that `phases` need, with margins; 0 if the rank has none of them."""
        peaks = [peak.bytes for name, peak in self.report.peaks.items() if name in phases]
        return max(peaks) + sum(margin.bytes for margin in margins_of(self.report, max(peaks))) if peaks else 0.0

    @property
    def reads_inside(self) -> dict[str, int]:
        """Host reads inside Megatron's schedule, each of which stalls the device; calls by place."""
        inside = ("forward: ", "backward: ")
        reads = self.report.host_reads.items()
        return {key: count for key, count in reads if key.startswith(inside) and EXPERT_COUNT_READS not in key}


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Outcome of a rehearsed job."""

    config: JobConfig
    dims: ParallelDims
    stages: tuple[StageReport, ...]

    @property
    def worst(self) -> StageReport:
        """Stage that needs the most memory."""
        return max(self.stages, key=lambda stage: stage.need)

    def need_in(self, phases: Collection[str]) -> float:
        """Bytes that `phases` need, with margins, on the stage that needs the most."""
        return max(stage.need_in(phases) for stage in self.stages)

    def fits(self, gpu_memory: float) -> bool:
        """Whether every stage fits a device of `gpu_memory` bytes, with margins."""
        return self.worst.need <= gpu_memory

    @property
    def fault(self) -> str | None:
        """Error that the first rollout would raise; None if it would not fail."""
        return fault_of(self.config, self.dims)

    @property
    def reads_inside(self) -> dict[str, int]:
        """Host reads inside the schedule, of all stages."""
        return {key: count for stage in self.stages for key, count in stage.reads_inside.items()}


def rehearse_job(
    config: JobConfig,
    *,
    world_size: int | None = None,
    lengths: Sequence[int] | Literal["data"] | None = None,
    expert_imbalance: float = 1.0,
    device: str = "cuda",
) -> Rehearsal:
    """Rehearse one rank of each kind of pipeline stage of `config`.

    Args:
        config: settings of the job.
        world_size: number of ranks; None: the devices of `device_mapping`, or one replica.
        lengths: tokens of the samples of an optimizer step; "data": of the first step of a job of task sft or dpo;
            None: samples as long as the job allows.
        expert_imbalance: tokens of a rank's experts, as a multiple of an equal share.
        device: "cuda", or "cpu" for a run on the CPU.

    Raises:
        ConfigError: the model's shape is unknown, the layout does not divide it, or the data have no lengths yet.
        RehearsalError: a rank failed.
    """
    for name, role in config.roles.items():
        if name != "actor_infer" and role.strategy_args.strategy_config.has_cp_per_pack:
            text = "auto is not rehearsed for now: rehearse the job with the largest size that its packs may have"
            raise config.error(Problem((name, "strategy_args", "strategy_config", "context_parallel_size"), text))
        text = "differs from actor_train's. A rehearsal does not support that; leave it out to rehearse the other roles"
        if name == "actor_infer" and not has_local_rollouts(config):
            continue
        if config.own_devices(name) is not None:
            raise config.error(Problem((name, "device_mapping"), text))
        if different := differing_keys(role, config.actor_train):
            raise config.error(Problem((name, "strategy_args", "strategy_config", different[0]), text))
    world, megatron, architecture = _shape(config, world_size)
    dims = megatron.parallel_dims(world)
    if lengths == "data":
        lengths = lengths_of_data(config, dims.dp_size)
    split = megatron.chunk_layers(architecture.num_layers)
    chunks = dims.pp_size * dims.vpp_size
    kinds = [(kind, depths_of(kind.chunk_layers, split, megatron, architecture)) for kind in stages_of(split)]
    tasks = [
        RankTask(
            config=config,
            rank=kind.stage * (world // dims.pp_size),
            world_size=world,
            layers=None if depth is None else depth * chunks,
            device=device,  # type: ignore[arg-type]
            lengths=None if lengths is None else tuple(lengths),
            expert_imbalance=expert_imbalance,
        )
        for kind, depths in kinds
        for depth in depths
    ]
    reports, stages = iter(run_tasks(tasks)), []
    for kind, depths in kinds:
        report = next(reports)
        if len(depths) == 2:
            pair, ends = (report, next(reports)), (FEW, MORE)
            report = extrapolate_layers(*pair, (*ends, kind.chunk_layers[0]))
            # The model's FLOPs are those of all stages.
            whole = extrapolate_layers(*pair, (*ends, architecture.num_layers / chunks))
            report = replace(report, training=whole.training)
        stages.append(StageReport(name=kind.name, report=report, stages=kind.stages))
    return Rehearsal(config=config, dims=dims, stages=tuple(stages))


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Work of one replica in an optimizer step, if all its micro-batches are as full as the rehearsed one."""

    micro_batches: int | None
    """Per step; None if a stream decides."""
    computed: float
    """FLOPs of a micro-batch, forward and backward, on all ranks of the replica."""
    model: float
    """Model FLOPs of it: 6 per parameter and real token, and attention (`modeling.cost`)."""
    padding: float
    """Share of padding among the tokens."""

    @property
    def useful(self) -> float:
        """Model FLOPs over computed FLOPs; the rest is padding, recomputation and the head's second pass."""
        return self.model / self.computed


def totals_of(rehearsal: Rehearsal) -> StepTotals:
    """Totals of the training passes of a rehearsed job."""
    dims, config = rehearsal.dims, rehearsal.config
    computed = 0.0
    for stage in rehearsal.stages:
        passes = stage.report.flops.get("forward", 0.0) + stage.report.flops.get("backward", 0.0)
        computed += stage.stages * passes / stage.report.micro_batches
    training = rehearsal.stages[0].report.training
    count = None
    if config.stream is None:
        count = training.in_step or -(-config.mini_batch_size(dims.dp_size) // dims.dp_size // training.samples)
    return StepTotals(
        micro_batches=count,
        computed=computed * dims.tp_size * dims.cp_size,
        model=training.model_flops,
        padding=training.padding,
    )


def rehearse_timeline(rehearsal: Rehearsal) -> RankReport:
    """Rehearse the fullest rank again, with all layers and a timeline. Raises `RehearsalError`."""
    rank = rehearsal.worst.report.rank
    task = RankTask(config=rehearsal.config, rank=rank, world_size=rehearsal.dims.world_size, timeline=True)
    return run_tasks([task])[0]


@dataclass(frozen=True, kw_only=True)
class StageKind:
    """Pipeline stages that need the same memory, or less than one of them, which is rehearsed."""

    name: str
    stage: int
    """Number of the rehearsed one."""
    stages: int
    chunk_layers: tuple[int, ...]
    """Layers of each of its model chunks."""


def stages_of(split: ChunkLayers) -> list[StageKind]:
    """Kinds of pipeline stages: the first, the last, and the middle ones by their layers.

    The first middle stage of a kind represents it: under 1F1B it holds the activations of the most micro-batches.
    """
    last = len(split) - 1
    if last == 0:
        return [StageKind(name="the only stage", stage=0, stages=1, chunk_layers=split[0])]
    middle: dict[tuple[int, ...], list[int]] = {}
    for stage in range(1, last):
        middle.setdefault(split[stage], []).append(stage)
    numbers = [[0], *middle.values(), [last]]
    return [StageKind(name=_name_of(one), stage=one[0], stages=len(one), chunk_layers=split[one[0]]) for one in numbers]


def _name_of(stages: list[int]) -> str:
    """Name of some stages, of which the first is rehearsed."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    follow = stages[-1] - stages[0] == len(stages) - 1
    listed = f"{stages[0]} to {stages[-1]}" if follow else ", ".join(map(str, stages))
    return f"stages {listed} ({stages[0]})"


def depths_of(
    chunk_layers: tuple[int, ...], split: ChunkLayers, megatron: MegatronConfig, architecture: ArchitectureConfig
) -> tuple[int | None, ...]:
    """Layers per chunk to rehearse for a stage with `chunk_layers`; None: the job's own model.

    Two small numbers where all layers and all chunks of a deep stage are equal. All stages of those shallow models have
    the same number of layers, also where the job's have not.
    """
    are_equal = megatron.recompute_method != "block" and (megatron.recompute_num_layers or 1) == 1
    if architecture.moe is not None and architecture.moe.layer_freq != 1:
        are_equal = False
    if are_equal and len(set(chunk_layers)) == 1 and chunk_layers[0] > WHOLE:
        return FEW, MORE
    is_even = len({count for stage in split for count in stage}) == 1
    return (chunk_layers[0] if is_even else None,)


def _shape(config: JobConfig, world_size: int | None) -> tuple[int, MegatronConfig, ArchitectureConfig]:
    train = config.actor_train
    megatron, architecture = train.strategy_args.strategy_config, train.model_args.architecture
    if architecture is None:
        name = train.model_args.model_name_or_path
        text = (
            "is missing: a rehearsal needs the model's shape"
            if name is None
            else f"is missing, and {name} is not a directory here"
        )
        raise config.error(Problem(("actor_train", "model_args", "architecture"), text))
    world = world_size or config.world_size or megatron.model_size
    config.dp_size(world)
    try:
        megatron.chunk_layers(architecture.num_layers)
    except LayoutError as error:
        path: tuple[Any, ...] = ("actor_train", "model_args", "architecture", "num_layers")
        raise config.error(Problem(path, str(error))) from None
    return world, megatron, architecture
