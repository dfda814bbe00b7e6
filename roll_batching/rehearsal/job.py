"""A job, rehearsed: one rank of every kind that it has, and what that means for the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.layout_rules import differing_keys
from roll_batching.planning import ParallelDims
from roll_batching.rehearsal.experts import READS
from roll_batching.rehearsal.job_data import lengths_of_data
from roll_batching.rehearsal.margins import Margin, margins_of
from roll_batching.rehearsal.process import run_tasks
from roll_batching.rehearsal.rollout import fault_of, rolls_out
from roll_batching.rehearsal.scaling import at_layers
from roll_batching.rehearsal.task import RankReport, RankTask
from roll_batching.settings import ArchitectureConfig, MegatronConfig

FEW, MORE = 2, 3
"""Layers per chunk of the models that stand for a deep one."""
WHOLE = 4
"""Models of up to so many layers per chunk are rehearsed as they are."""


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """A pipeline stage: the rank that stands for it, and what it came to."""

    name: str
    report: RankReport

    @property
    def margins(self) -> tuple[Margin, ...]:
        """What is needed beside the peak."""
        return margins_of(self.report, self.peak)

    @property
    def peak(self) -> float:
        """Bytes at the highest moment, without margins."""
        return max(peak.bytes for peak in self.report.peaks.values())

    @property
    def peak_phase(self) -> str:
        """When that is."""
        return max(self.report.peaks.values(), key=lambda peak: peak.bytes).phase

    @property
    def need(self) -> float:
        """Bytes with margins."""
        return self.need_in(self.report.peaks)

    def need_in(self, phases: Collection[str]) -> float:
        """Bytes that these phases need, with margins; 0 where there are none of them."""
        peaks = [peak.bytes for name, peak in self.report.peaks.items() if name in phases]
        return max(peaks) + sum(margin.bytes for margin in margins_of(self.report, max(peaks))) if peaks else 0.0

    @property
    def reads_inside(self) -> dict[str, int]:
        """Host reads inside the schedule, where there must be none."""
        inside = ("forward: ", "backward: ")
        reads = self.report.host_reads.items()
        return {words: count for words, count in reads if words.startswith(inside) and READS not in words}


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsed job came to."""

    job: JobConfig
    dims: ParallelDims
    stages: tuple[StageReport, ...]

    @property
    def worst(self) -> StageReport:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.need)

    def need_in(self, phases: Collection[str]) -> float:
        """Bytes that these phases need, with margins, on the stage that needs most in them."""
        return max(stage.need_in(phases) for stage in self.stages)

    def fits(self, gpu_memory: float) -> bool:
        """Whether every stage fits a device of so many bytes, margins included."""
        return self.worst.need <= gpu_memory

    @property
    def fault(self) -> str | None:
        """What ends the job that no rank's passes show; None where nothing does."""
        return fault_of(self.job, self.dims)

    @property
    def reads_inside(self) -> dict[str, int]:
        """Host reads inside the schedule, on any stage."""
        return {words: count for stage in self.stages for words, count in stage.reads_inside.items()}


def rehearse_job(
    job: JobConfig,
    *,
    world_size: int | None = None,
    lengths: Sequence[int] | Literal["data"] | None = None,
    expert_imbalance: float = 1.0,
    device: str = "cuda",
) -> Rehearsal:
    """Rehearses `job` as one of `world_size` ranks of each kind would run it.

    Args:
        job: as it would be trained.
        world_size: ranks; None: what `device_mapping` names, else one replica.
        lengths: of the samples of an optimizer step; "data": of the first of a job of task sft or dpo; None: as long
            as the job allows.
        expert_imbalance: how many times its share of the tokens the experts of a rank get.
        device: "cuda", or "cpu" for what a CPU would do.

    Raises:
        ConfigError: where the model's shape is not known, the layout does not fit, or data have no lengths.
        RehearsalError: what a rank raised.
    """
    for name, role in job.roles.items():
        text = "differs from actor_train's, which a rehearsal cannot follow for now; leave it out to rehearse the rest"
        if name == "actor_infer" and not rolls_out(job):
            continue
        if job.own_devices(name) is not None:
            raise job.error(Problem((name, "device_mapping"), text))
        if different := differing_keys(role, job.actor_train):
            raise job.error(Problem((name, "strategy_args", "strategy_config", different[0]), text))
    world, megatron, architecture = _shape(job, world_size)
    dims = megatron.parallel_dims(world)
    if lengths == "data":
        lengths = lengths_of_data(job, dims.dp_size)
    tasks, kinds = [], stages_of(dims)
    depth = architecture.num_layers // (dims.pp_size * dims.vpp_size)
    layers = layers_of(depth, megatron, architecture)
    for _, stage in kinds:
        for count in layers:
            tasks.append(
                RankTask(
                    job=job,
                    rank=stage * (world // dims.pp_size),
                    world_size=world,
                    layers=count * dims.pp_size * dims.vpp_size,
                    device=device,  # type: ignore[arg-type]
                    lengths=None if lengths is None else tuple(lengths),
                    expert_imbalance=expert_imbalance,
                )
            )
    reports = run_tasks(tasks)
    stages = []
    for number, (name, _) in enumerate(kinds):
        found = reports[number * len(layers) : (number + 1) * len(layers)]
        whole = found[0] if len(layers) == 1 else at_layers(found[0], found[1], (layers[0], layers[1], depth))
        stages.append(StageReport(name=name, report=whole))
    return Rehearsal(job=job, dims=dims, stages=tuple(stages))


def timeline_of_worst(found: Rehearsal) -> RankReport:
    """The rank that needs most again, all of its layers, with a timeline. Raises `RehearsalError`."""
    task = RankTask(job=found.job, rank=found.worst.report.rank, world_size=found.dims.world_size, timeline=True)
    return run_tasks([task])[0]


def stages_of(dims: ParallelDims) -> list[tuple[str, int]]:
    """The kinds of pipeline stages, each with the one that stands for it.

    Of those in the middle the first holds most micro-batches at a time.
    """
    size = dims.pp_size
    if size == 1:
        return [("the only stage", 0)]
    middle = [] if size == 2 else [("stage 1" if size == 3 else f"stages 1 to {size - 2} (1)", 1)]
    return [("stage 0", 0), *middle, (f"stage {size - 1}", size - 1)]


def layers_of(depth: int, megatron: MegatronConfig, architecture: ArchitectureConfig) -> tuple[int, ...]:
    """How many layers per chunk are rehearsed: two small numbers where all layers are alike, else all."""
    alike = megatron.recompute_method != "block" and (megatron.recompute_num_layers or 1) == 1
    if architecture.moe is not None and architecture.moe.layer_freq != 1:
        alike = False
    return (FEW, MORE) if alike and depth > WHOLE else (depth,)


def _shape(job: JobConfig, world_size: int | None) -> tuple[int, MegatronConfig, ArchitectureConfig]:
    train = job.actor_train
    megatron, architecture = train.strategy_args.strategy_config, train.model_args.architecture
    if architecture is None:
        name = train.model_args.model_name_or_path
        words = "is missing: it gives the shape of the model" if name is None else f"is missing, and {name} is not here"
        raise job.error(Problem(("actor_train", "model_args", "architecture"), words))
    world = world_size or job.world_size or megatron.model_size
    job.dp_size(world)
    chunks = megatron.pipeline_model_parallel_size * megatron.vpp_size
    if architecture.num_layers % chunks:
        where: tuple[Any, ...] = ("actor_train", "model_args", "architecture", "num_layers")
        raise job.error(Problem(where, f"{architecture.num_layers} layers do not divide into {chunks} pipeline chunks"))
    return world, megatron, architecture
