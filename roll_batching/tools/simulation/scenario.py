"""A step to simulate: lengths, layout, model and cluster, also of a job; variations of it, best first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from roll_batching.errors import ConfigError, LayoutError, PlanError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.task_rules import uses_teacher
from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.planning.arrays import Ints
from roll_batching.planning.lengths_io import MOST_TOKENS
from roll_batching.planning.pack_times import Cluster, PackTimes, weigh_cost
from roll_batching.planning.simulated_step import SimulatedStep, simulate_plan
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.model_cost import architecture_cost
from roll_batching.tools.simulation.models import architecture_times, check_layout, job_architecture

DYNAMIC = "dynamic"
"""Value of `cp` that gives each pack its own context-parallel size."""
AUTO = "auto"
"""Value of `slices` that lets the planner choose."""
SIZES = ("max_tokens", "cp", "tp", "pp", "vpp", "slices")
"""What `Scenario.vary` changes."""
CHUNKS = (2, 4)
"""Model chunks of a stage with which `compare_pipelines` tries the interleaved schedule."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One optimizer step on a cluster."""

    lengths: Ints
    constraints: PlanConstraints
    architecture: ArchitectureConfig
    cluster: Cluster = field(default_factory=Cluster)
    group_ids: Ints | None = None
    """Group of each sample: the samples of a group share a micro-batch."""
    recompute: int | None = None
    """Layers of a model chunk that are recomputed in the backward pass; None: none, 0: all."""
    overlapped_exchange: bool = False
    """Whether keys and values travel while attention computes; see `PackTimes`."""
    largest_cp_size: int | None = None
    """Largest context-parallel size where each pack has its own; None: as many ranks as share the data."""

    @property
    def times(self) -> PackTimes:
        """Predicted times of packs."""
        return architecture_times(
            self.architecture, self.constraints, self.cluster, overlapped_exchange=self.overlapped_exchange
        )

    @property
    def recomputed_share(self) -> float:
        """Share of the layers that are recomputed."""
        if self.recompute is None:
            return 0.0
        layers = self.architecture.num_layers // (self.constraints.pp_size * self.constraints.vpp_size)
        return min(1.0, self.recompute / layers) if self.recompute else 1.0

    def plan(self) -> Plan:
        """The plan that a job makes of these lengths."""
        constraints = self.constraints
        cost = architecture_cost(self.architecture, tp_size=constraints.tp_size, cp_size=constraints.cp_size)
        return plan_step(
            self.lengths,
            constraints,
            cost=replace(weigh_cost(cost, self.cluster), exchange=self.times.exchange_cost(constraints.cp_size)),
            group_ids=self.group_ids,
            times=self.times if constraints.has_cp_per_pack else None,
        )

    def simulate(self) -> SimulatedStep:
        """Simulates the step of `plan`. Raises `PlanError` where layout, model or lengths do not allow one."""
        check_layout(self.architecture, self.constraints)
        # FLOPs per token of the output head: 6 per parameter, forward and backward.
        head = 6.0 * self.architecture.hidden_size * self.architecture.vocab_size
        return simulate_plan(self.plan(), self.times, recomputed=self.recomputed_share, head=head)

    def vary(self, changes: Mapping[str, Any]) -> Scenario:
        """This step with other sizes (keys of `SIZES`) on the same number of devices.

        Data-parallel ranks follow from the other sizes. Raises `PlanError` for impossible ones.
        """
        base = self.constraints
        base_cp: Any = DYNAMIC if base.has_cp_per_pack else base.cp_size
        cp = changes.get("cp", base_cp)
        sizes = {name: int(changes.get(name, getattr(base, f"{name}_size"))) for name in ("tp", "pp", "vpp")}
        cp_size = 1 if cp == DYNAMIC else int(cp)
        replica = sizes["tp"] * sizes["pp"] * cp_size
        if base.world_size % replica:
            raise PlanError(
                f"{base.world_size} devices do not divide into replicas of tp {sizes['tp']} x pp {sizes['pp']} x cp "
                f"{cp_size} = {replica}: change one of these sizes"
            )
        ranks = base.world_size // replica
        same_tensor_parts = base.etp_size == base.tp_size
        try:
            constraints = replace(
                base,
                dp_size=ranks,
                tp_size=sizes["tp"],
                pp_size=sizes["pp"],
                vpp_size=sizes["vpp"],
                cp_size=cp_size,
                etp_size=sizes["tp"] if same_tensor_parts else base.etp_size,
                max_tokens=changes.get("max_tokens", base.max_tokens),
                max_cp_size=self._max_cp_size(ranks) if cp == DYNAMIC else 1,
                group_size=base.group_size if sizes["vpp"] > 1 else None,
                pipeline_slices=changes.get("slices", 1 if sizes["vpp"] > 1 else base.pipeline_slices),
            )
        except LayoutError as error:
            raise PlanError(str(error)) from None
        return replace(self, constraints=constraints)

    def _max_cp_size(self, ranks: int) -> int:
        largest = ranks & -ranks  # the largest power of two that divides `ranks`
        return largest if self.largest_cp_size is None else min(self.largest_cp_size, largest)

    def single_sizes(self) -> dict[int, Scenario]:
        """The same step with one context-parallel size for all packs, by each legal size.

        A rank's cap stays: packs of size n hold n times as many tokens.
        """
        base = self.constraints
        return {
            size: self.vary({"cp": size, "max_tokens": (base.max_tokens or 0) * size}) for size in base.legal_cp_sizes
        }


def simulate_single_sizes(scenario: Scenario) -> tuple[dict[int, SimulatedStep], dict[int, str]]:
    """(Steps by single context-parallel size, reasons why other sizes have none)."""
    steps: dict[int, SimulatedStep] = {}
    reasons: dict[int, str] = {}
    for size, single in scenario.single_sizes().items():
        try:
            steps[size] = single.simulate()
        except PlanError as error:
            reasons[size] = str(error)
    return steps, reasons


def compare_pipelines(scenario: Scenario) -> dict[str, SimulatedStep]:
    """The step by schedule of its pipeline: whole packs, model chunks, slices; those that its layout allows."""
    changes: dict[str, dict[str, Any]] = {"whole packs": {"vpp": 1, "slices": 1}}
    changes |= {f"vpp {chunks}": {"vpp": chunks, "slices": 1} for chunks in CHUNKS}
    changes["slices"] = {"vpp": 1, "slices": AUTO}
    steps = {}
    for name, change in changes.items():
        try:
            steps[name] = scenario.vary(change).simulate()
        except PlanError:
            continue  # the layers do not divide into so many chunks
    return steps


# ---- sweeps


MOST_COMBINATIONS = 200
"""Most combinations of a sweep."""


@dataclass(frozen=True)
class SweepResult:
    """One combination of swept settings: its simulated step, or the reason it cannot run."""

    changes: Mapping[str, Any]
    step: SimulatedStep | None
    reason: str = ""

    @property
    def name(self) -> str:
        """Name for reports, such as `cp 2, pp 4`."""
        return ", ".join(f"{key} {value}" for key, value in self.changes.items())


def parse_sweep(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Values by size from texts such as `cp=1,2,dynamic`. Raises `ConfigError`."""
    values: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, written = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or key not in SIZES:
            raise ConfigError(
                f"--sweep {text!r} is not known: write a size and its values, such as max_tokens=8192,16384; sizes are "
                f"{', '.join(SIZES)}"
            )
        if key in values:
            raise ConfigError(f"--sweep names {key} twice: write all its values once, with commas")
        values[key] = list(dict.fromkeys(_value(key, part.strip()) for part in written.split(",")))
    count = 1
    for several in values.values():
        count *= len(several)
    if count > MOST_COMBINATIONS:
        raise ConfigError(f"--sweep asks for {count:,} combinations, at most {MOST_COMBINATIONS}: name fewer values")
    return values


def _value(key: str, text: str) -> Any:
    word = {"cp": DYNAMIC, "slices": AUTO}.get(key)
    if text == word:
        return word
    most = MOST_TOKENS if key == "max_tokens" else 1024
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text[:12]) <= most:
        also = "" if word is None else f", or {word}"
        raise ConfigError(f"--sweep {key}={text!r}: write whole numbers from 1 to {most:,}{also}")
    return int(text)


def run_sweep(scenario: Scenario, values: Mapping[str, Sequence[Any]]) -> list[SweepResult]:
    """All combinations of `values`: those with a step by falling tokens per second, then the impossible ones."""
    swept = []
    for combination in itertools.product(*values.values()):
        changes = dict(zip(values, combination, strict=True))
        try:
            swept.append(SweepResult(changes, scenario.vary(changes).simulate()))
        except PlanError as error:
            swept.append(SweepResult(changes, None, str(error)))
    return sorted(swept, key=lambda result: float("inf") if result.step is None else -result.step.tokens_per_second)


# ---- steps of jobs


def scenario_of_job(
    config: JobConfig, lengths: Ints, world_size: int | None = None, cluster: Cluster | None = None
) -> Scenario:
    """A training step of `actor_train` over samples of `lengths`; pairs are chosen, rejected, chosen, ...

    Raises `ConfigError` where the model's shape is not known or a stream forms the steps.
    """
    train = config.actor_train
    megatron, architecture = train.strategy_args.strategy_config, job_architecture(config)
    if cluster is None:
        cluster = Cluster() if megatron.cluster is None else megatron.cluster.rates
    if config.stream is not None:
        raise ConfigError("a stream forms the steps of this job while it runs: simulate it without the stream's keys")
    if config.task == "dpo" and len(lengths) % 2:
        raise ConfigError(f"{len(lengths)} lengths are no pairs: give task dpo chosen, rejected, chosen, rejected, ...")
    world = world_size or config.world_size or megatron.model_size
    config.dp_size(world)
    dims = megatron.parallel_dims(world)
    constraints = PlanConstraints.of(
        dims,
        train.batching().train,
        group_size=megatron.microbatch_group_size_per_vp_stage if dims.interleaved else None,
        max_cp_size=megatron.max_cp_size(dims.dp_size),
        pipeline_slices=megatron.pipeline_slices,
        smallest_slice=cluster.slice_tokens,
        pack_multiple=megatron.pack_multiple,
    )
    return Scenario(
        lengths=lengths,
        constraints=constraints,
        architecture=architecture,
        cluster=cluster,
        group_ids=np.arange(len(lengths)) // 2 if config.task == "dpo" else None,
        recompute=_recomputed_layers(megatron),
        overlapped_exchange=megatron.transformer_impl == "transformer_engine",
        largest_cp_size=megatron.max_context_parallel_size,
    )


def notes_of_job(config: JobConfig, scenario: Scenario) -> list[str]:
    """One sentence for each simplification of the simulation of this job."""
    megatron, constraints = config.actor_train.strategy_args.strategy_config, scenario.constraints
    ranks = constraints.dp_size
    step = config.mini_batch_size(ranks)
    notes = []
    if uses_critic(config):
        notes.append("the critic's passes are not simulated: this is the policy's part of a step")
    if config.task == "kto":
        notes.append("the passes of KTO over other answers are not simulated")
    if uses_teacher(config):
        notes.append("the teacher's passes are not simulated: this is the student's part of a step")
    if len(scenario.lengths) != step:
        notes.append(f"{len(scenario.lengths):,} lengths are one step here; a step of the job has {step:,} sequences")
    if megatron.fp8 is not None:
        notes.append("FP8 is not simulated: matrix products run at the cluster's matmul_rate")
    if megatron.recompute_granularity == "selective":
        notes.append("selective recomputation is not counted")
    return notes


def _recomputed_layers(megatron: MegatronConfig) -> int | None:
    if megatron.recompute_granularity != "full":
        return None
    return (megatron.recompute_num_layers or 0) if megatron.recompute_method == "block" else 0
