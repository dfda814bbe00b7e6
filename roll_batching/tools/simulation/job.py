"""The step of a job to simulate, from its configuration."""

from __future__ import annotations

import numpy as np

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.config.teacher_rules import uses_teacher
from roll_batching.planning import PlanConstraints
from roll_batching.planning.arrays import Ints
from roll_batching.planning.pack_times import Cluster
from roll_batching.settings import MegatronConfig
from roll_batching.tools.simulation.scenario import Scenario


def scenario_of_job(
    config: JobConfig, lengths: Ints, *, world_size: int | None = None, cluster: Cluster | None = None
) -> Scenario:
    """A step of `actor_train` over samples of `lengths` (of pairs chosen, rejected, chosen, ...).

    Raises `ConfigError` where the model's shape is not known or a stream forms the steps.
    """
    train = config.actor_train
    megatron, architecture = train.strategy_args.strategy_config, train.model_args.architecture
    if architecture is None:
        text = "is missing: a simulation needs the model's shape"
        raise config.error(Problem(("actor_train", "model_args", "architecture"), text))
    if config.stream is not None:
        raise ConfigError("a stream forms the steps of this job while it runs: simulate it without the stream's keys")
    if config.task == "dpo" and len(lengths) % 2:
        raise ConfigError(f"{len(lengths)} lengths are no pairs: task dpo takes chosen, rejected, chosen, ...")
    world = world_size or config.world_size or megatron.model_size
    config.dp_size(world)
    dims = megatron.parallel_dims(world)
    constraints = PlanConstraints.of(
        dims,
        train.batching().train,
        group_size=megatron.microbatch_group_size_per_vp_stage if dims.interleaved else None,
        max_cp_size=megatron.max_cp_size(dims.dp_size),
        pack_multiple=megatron.pack_multiple,
    )
    return Scenario(
        lengths=lengths,
        constraints=constraints,
        architecture=train.model_args.architecture_to_build(megatron.mtp_num_layers),
        cluster=Cluster() if cluster is None else cluster,
        group_ids=np.arange(len(lengths)) // 2 if config.task == "dpo" else None,
        recompute=_recomputed_layers(megatron),
        overlapped_exchange=megatron.transformer_impl == "transformer_engine",
        largest_cp_size=megatron.max_context_parallel_size,
    )


def notes_of_job(config: JobConfig, scenario: Scenario) -> list[str]:
    """What the simulation of this job leaves out or assumes, one sentence each."""
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
