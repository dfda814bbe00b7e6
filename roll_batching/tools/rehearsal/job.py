"""Rehearse a job: one rank of each kind of pipeline stage, and the memory and FLOPs of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from roll_batching.errors import LayoutError
from roll_batching.jobs.config import JobConfig, WorkerConfig
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.layout_rules import ONE_WHEN_SAMPLING, differing_keys
from roll_batching.jobs.objectives.from_config import critic_mini_batch_size
from roll_batching.planning import ParallelDims, PlanConstraints
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.model_cost import architecture_cost, architecture_pack_times
from roll_batching.tools.rehearsal.fake_data import image_sizes
from roll_batching.tools.rehearsal.lengths import lengths_of_data, pack_sizes, plan_of_step
from roll_batching.tools.rehearsal.process import run_tasks
from roll_batching.tools.rehearsal.rollout import fault_of, has_local_rollouts, has_sampling_copy
from roll_batching.tools.rehearsal.stages import (
    FEW,
    MORE,
    RankKind,
    StageKind,
    copies_in_fp8,
    extrapolate_layers,
    frozen_roles,
    letters_of,
    rank_kinds,
    rehearsed_depths,
    stages_of,
)
from roll_batching.tools.rehearsal.task import CRITIC, EXPERT_COUNT_READS, RankReport, RankTask

GIB = 1 << 30
_NOT_REHEARSED = ("flash_attn", "flash_attn_4")
"""Attention backends that a rehearsal refuses: the recorder cannot count the operators of their packages."""


@dataclass(frozen=True, kw_only=True)
class Margin:
    """Memory that a rehearsal cannot count, added to its peak."""

    bytes: float
    reason: str


def communicators_of(report: RankReport) -> frozenset[str]:
    """Names of the groups of more than one rank in which a rank communicates."""
    return frozenset(key.split(" / ")[1] for key in report.collectives if not key.split(" / ")[1].endswith("(1)"))


def margins_of(report: RankReport, peak: float, communicators: int) -> tuple[Margin, ...]:
    """Margins of one rank whose counted peak is `peak` bytes."""
    transient = peak - sum(report.kept.values())
    return (
        Margin(bytes=1.0 * GIB, reason="CUDA's context, loaded kernels, cuBLAS's workspaces"),
        Margin(bytes=0.3 * GIB * communicators, reason=f"NCCL's buffers, {communicators} communicators of 0.3 GiB"),
        Margin(bytes=0.06 * max(transient, 0), reason="fragmentation of the allocator, 6% of transient memory"),
    )


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """A pipeline stage, represented by one of its ranks, with packs of one context-parallel size."""

    name: str
    report: RankReport
    stages: int = 1
    """Number of the policy's stages that only this report represents; 0 if it differs in a frozen model's stage."""
    cp_size: int | None = None
    """Context-parallel size of the packs, where each pack has its own; None: the layout's."""
    fp8_copies: float = 0.0
    """Bytes of the copies of weights in FP8."""
    sampling_copy: float = 0.0
    """Bytes of the weights of a copy of the model that samples rollouts."""
    is_on_cpu: bool = False
    """Whether the rank runs on a CPU, where margins are 0."""
    other_communicators: frozenset[str] = frozenset()
    """Communicators that the rank needs for packs of other context-parallel sizes."""

    @property
    def communicators(self) -> int:
        """Number of communicators of the rank."""
        return len(communicators_of(self.report) | self.other_communicators)

    @property
    def margins(self) -> tuple[Margin, ...]:
        """Margins at the peak."""
        return self._margins_of(self.peak)

    def _margins_of(self, peak: float) -> tuple[Margin, ...]:
        margins = () if self.is_on_cpu else margins_of(self.report, peak, self.communicators)
        sampling = "weights of the copy that samples; its key-value cache is not counted"
        copies = {"copies in FP8 of the weights of layers": self.fp8_copies, sampling: self.sampling_copy}
        return (*margins, *(Margin(bytes=size, reason=reason) for reason, size in copies.items() if size))

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
        if not peaks:
            return 0.0
        return max(peaks) + sum(margin.bytes for margin in self._margins_of(max(peaks)))

    @property
    def reads_inside(self) -> dict[str, int]:
        """Host reads inside Megatron's schedule, each of which stalls the device; calls by place."""
        inside = tuple(f"{model}{name}: " for model in ("", CRITIC) for name in ("forward", "backward"))
        reads = self.report.host_reads.items()
        return {key: count for key, count in reads if key.startswith(inside) and EXPERT_COUNT_READS not in key}


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """Outcome of a rehearsed job."""

    config: JobConfig
    dims: ParallelDims
    stages: tuple[StageReport, ...]

    @property
    def cp_sizes(self) -> tuple[int, ...]:
        """Context-parallel sizes of the rehearsed packs, ascending; empty if all packs have the layout's size."""
        return tuple(sorted({stage.cp_size for stage in self.stages if stage.cp_size is not None}))

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

    Where each pack has its own context-parallel size, a rank is rehearsed once with packs of each size: the sizes in
    the plan of `lengths`, or without lengths all legal sizes. Packs are as full as the cap allows.

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
    image_sizes(config)
    _check_roles(config)
    world, megatron, architecture = _shape(config, world_size)
    dims = megatron.parallel_dims(world)
    if lengths == "data":
        lengths = lengths_of_data(config, dims.dp_size)
    split = megatron.chunk_layers(architecture.num_layers)
    chunks = dims.pp_size * dims.vpp_size
    ranks = rank_kinds(
        stages_of(split, letters_of(split, architecture)),
        {name: _stages_of_role(config, name, role) for name, role in frozen_roles(config).items()},
        world,
    )
    kinds = [
        (cp_size, kind, rehearsed_depths(config, kind.policy, split, megatron, architecture))
        for cp_size in context_sizes(config, dims, lengths)
        for kind in ranks
    ]
    tasks = [
        RankTask(
            config=config,
            rank=kind.rank,
            world_size=world,
            cp_size=cp_size or 1,
            layers=None if depth is None else depth * chunks,
            device=device,  # type: ignore[arg-type]
            lengths=None if lengths is None else tuple(lengths),
            expert_imbalance=expert_imbalance,
        )
        for cp_size, kind, depths in kinds
        for depth in depths
    ]
    stages = _stage_reports(config, kinds, iter(run_tasks(tasks)), megatron, architecture)
    return Rehearsal(config=config, dims=dims, stages=_with_communicators(stages, on_cpu=device == "cpu"))


def _stage_reports(
    config: JobConfig,
    kinds: Sequence[tuple[int | None, RankKind, Sequence[int | None]]],
    reports: Iterator[RankReport],
    megatron: MegatronConfig,
    architecture: ArchitectureConfig,
) -> list[StageReport]:
    """Reports of `kinds`, each from the report of one rehearsed rank, or extrapolated from two depths of it."""
    split = megatron.chunk_layers(architecture.num_layers)
    chunks, stages = sum(map(len, split)), []
    for cp_size, kind, depths in kinds:
        report = next(reports)
        if len(depths) == 2:
            pair, ends = (report, next(reports)), (FEW, MORE)
            report = extrapolate_layers(*pair, (*ends, kind.policy.chunk_layers[0]))
            # The model's FLOPs are those of all stages.
            whole = extrapolate_layers(*pair, (*ends, architecture.num_layers / chunks))
            report = replace(report, training=whole.training, critic=whole.critic)
        name = kind.name if cp_size is None else f"{kind.name}, CP {cp_size}"
        copies = copies_in_fp8(megatron, split, kind.policy.stage, report.layer_weights)
        facts: dict[str, Any] = {"stages": kind.stages, "fp8_copies": copies, "cp_size": cp_size}
        copy = report.kept.get("weights", 0.0) * has_sampling_copy(config)
        stages.append(StageReport(name=name, report=report, sampling_copy=copy, **facts))
    return stages


def _check_roles(config: JobConfig) -> None:
    """Raises ConfigError for roles in layouts that a rehearsal does not support."""
    for name, role in config.roles.items():
        text = "differs from actor_train's. A rehearsal does not support that; leave it out to rehearse the other roles"
        if name == "actor_infer" and not (has_local_rollouts(config) or has_sampling_copy(config)):
            continue
        if config.own_devices(name) is not None:
            raise config.error(Problem((name, "device_mapping"), text))
        counted = ONE_WHEN_SAMPLING if name == "actor_infer" else ()  # a copy without CP and VPP has the same weights
        different = [key for key in differing_keys(role, config.actor_train) if key not in counted]
        if name not in ("reference", "teacher") and different:
            raise config.error(Problem((name, "strategy_args", "strategy_config", different[0]), text))
        largest, trained = (
            worker.strategy_args.strategy_config.max_context_parallel_size for worker in (role, config.actor_train)
        )
        if largest != trained:
            raise config.error(Problem((name, "strategy_args", "strategy_config", "max_context_parallel_size"), text))


def _with_communicators(stages: Sequence[StageReport], *, on_cpu: bool) -> tuple[StageReport, ...]:
    """Copies of `stages`, each with the communicators that its rank needs for packs of all sizes."""
    groups: dict[int, frozenset[str]] = {}
    for stage in stages:
        groups[stage.report.rank] = groups.get(stage.report.rank, frozenset()) | communicators_of(stage.report)
    return tuple(replace(stage, other_communicators=groups[stage.report.rank], is_on_cpu=on_cpu) for stage in stages)


def _stages_of_role(config: JobConfig, name: str, role: WorkerConfig) -> list[StageKind]:
    """Kinds of pipeline stages of a frozen model."""
    megatron, architecture = role.strategy_args.strategy_config, role.model_args.architecture
    if architecture is None:
        text = f"is missing, and {role.model_args.model_name_or_path} is not a directory here: a rehearsal needs the "
        raise config.error(Problem((name, "model_args", "architecture"), f"{text}model's shape"))
    split = megatron.chunk_layers(architecture.num_layers)
    return stages_of(split, letters_of(split, architecture))


def context_sizes(config: JobConfig, dims: ParallelDims, lengths: Sequence[int] | None) -> list[int | None]:
    """Context-parallel sizes of the packs of training, ascending; [None] where all packs have the layout's size.

    With `lengths`: the sizes in the plan of the step; without: every legal size. Raises `PlanError` if the lengths
    cannot be planned.
    """
    train, megatron = config.actor_train, config.actor_train.strategy_args.strategy_config
    architecture = train.model_args.architecture
    if not megatron.has_cp_per_pack or architecture is None:
        return [None]
    constraints = PlanConstraints.of(
        dims,
        train.batching().train,
        group_size=megatron.microbatch_group_size_per_vp_stage if dims.vpp_size > 1 else None,
        max_cp_size=megatron.max_cp_size(dims.dp_size),
        pack_multiple=megatron.pack_multiple,
    )
    if lengths is None or not constraints.has_cp_per_pack:
        return list(constraints.legal_cp_sizes)
    architecture = train.model_args.architecture_to_build(megatron.mtp_num_layers)
    cluster, divide = megatron.cluster and megatron.cluster.rates, megatron.recurrent_context_parallel
    times = architecture_pack_times(architecture, dims, divide=divide, cluster=cluster)
    cost = architecture_cost(architecture, tp_size=dims.tp_size)
    unit = 2 if config.task == "dpo" else 1
    return list(pack_sizes(plan_of_step(lengths, constraints, cost, times, unit)))


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Work of one replica in an optimizer step, if all its micro-batches are as full as the rehearsed one.

    If each pack has its own context-parallel size, one `StepTotals` describes the packs of one size.
    """

    micro_batches: int | None
    """Per step; None if a stream or the planner decides."""
    computed: float
    """FLOPs of a micro-batch, forward and backward, on all ranks that compute it."""
    model: float
    """Model FLOPs of a micro-batch: 6 per parameter and real token, and attention (`modeling.cost`)."""
    padding: float
    """Share of padding among the tokens."""

    @property
    def useful(self) -> float:
        """Model FLOPs / computed FLOPs. The rest is padding, recomputation and the head's second pass."""
        return self.model / self.computed


def totals_of(rehearsal: Rehearsal, cp_size: int | None = None, *, critic: bool = False) -> StepTotals:
    """Totals of the policy's training passes; with `critic`, of the critic's, which the job must have.

    `cp_size`: the size of the packs to count, where each pack has its own context-parallel size.
    """
    dims, config, name = rehearsal.dims, rehearsal.config, CRITIC if critic else ""
    stages = [stage for stage in rehearsal.stages if stage.cp_size == cp_size]
    computed = 0.0
    for stage in stages:
        passes = sum(stage.report.flops.get(f"{name}{phase}", 0.0) for phase in ("forward", "backward"))
        computed += stage.stages * passes / stage.report.micro_batches
    training = stages[0].report.critic if critic else stages[0].report.training
    assert training is not None
    count = training.in_step
    if count is None and cp_size is None and config.stream is None:
        size = critic_mini_batch_size(config, dims.dp_size) if critic else config.mini_batch_size(dims.dp_size)
        count = -(-size // dims.dp_size // training.samples)
    return StepTotals(
        micro_batches=count,
        computed=computed * dims.tp_size * (cp_size or dims.cp_size),
        model=training.model_flops,
        padding=training.padding,
    )


def rehearse_timeline(rehearsal: Rehearsal) -> RankReport:
    """Rehearse the fullest rank again, with all layers and a timeline. Raises `RehearsalError`."""
    worst = rehearsal.worst
    facts: dict[str, Any] = {"config": rehearsal.config, "world_size": rehearsal.dims.world_size}
    return run_tasks([RankTask(**facts, rank=worst.report.rank, cp_size=worst.cp_size or 1, timeline=True)])[0]


def _shape(config: JobConfig, world_size: int | None) -> tuple[int, MegatronConfig, ArchitectureConfig]:
    """(World size, layout and shape of the policy). Raises ConfigError for what a rehearsal cannot run."""
    train = config.actor_train
    megatron, architecture = train.strategy_args.strategy_config, train.model_args.architecture
    if architecture is None:
        name = train.model_args.model_name_or_path
        missing = "is missing: a rehearsal needs the model's shape"
        text = missing if name is None else f"is missing, and {name} is not a directory here"
        raise config.error(Problem(("actor_train", "model_args", "architecture"), text))
    if megatron.attention_backend in _NOT_REHEARSED:
        similar = "dense" if architecture.attention_sinks else "varlen"
        text = f"{megatron.attention_backend} has kernels that a rehearsal cannot count: rehearse with {similar}"
        place = ("actor_train", "strategy_args", "strategy_config", "attention_backend")
        raise config.error(Problem(place, text))
    world = world_size or config.world_size or megatron.model_size
    if train.model_args.freeze_module_prefix is not None and megatron.pipeline_model_parallel_size > 1:
        path: tuple[Any, ...] = ("actor_train", "model_args", "freeze_module_prefix")
        text = "is rehearsed in one pipeline stage only, as a rank alone does not know the parameters of other stages"
        raise config.error(Problem(path, f"{text}: set pipeline_model_parallel_size to 1, or leave it out"))
    if megatron.has_cp_per_pack and world_size is None and config.world_size is None:
        path = ("actor_train", "strategy_args", "strategy_config", "context_parallel_size")
        text = "auto gives packs sizes up to the number of ranks, which is unknown: give --world-size or device_mapping"
        raise config.error(Problem(path, text))
    config.dp_size(world)
    try:
        megatron.chunk_layers(architecture.num_layers)
    except LayoutError as error:
        path = ("actor_train", "model_args", "architecture", "num_layers")
        raise config.error(Problem(path, str(error))) from None
    return world, megatron, architecture
