"""The job: GRPO after a supervised warm-up, or supervised training alone, through one strategy."""

from __future__ import annotations

import contextlib
from typing import Any

from roll_batching.distributed import consensus, host_group
from roll_batching.distributed.parallel_layout import start_processes
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import engine_sleeps
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.engines.sampler import engine_sampler
from roll_batching.jobs.engines.started_servers import engine_servers
from roll_batching.jobs.inputs import load_inputs
from roll_batching.jobs.objectives.from_config import Advantages, advantages_of, loss_of
from roll_batching.jobs.observe.trackers import tracker_of
from roll_batching.jobs.processes.role_workers import StartRoleWorkers, start_local_workers
from roll_batching.jobs.rl.grpo import Grpo, Objective
from roll_batching.jobs.roles.layout_sampler import layout_sampler
from roll_batching.jobs.rollouts.prompts import prompts_by_domain
from roll_batching.jobs.run.export import export_at_the_end
from roll_batching.jobs.run.run import Run
from roll_batching.jobs.supervised.supervised import train_on_texts, warm_up


def run_job(config: JobConfig, start_workers: StartRoleWorkers = start_local_workers) -> None:
    """Run the job that `config` describes, as one of its ranks. Every rank calls it.

    `start_workers` starts the processes of roles that have devices of their own.

    Leaves metrics, the resolved configuration and the learning curve in the run's folder. Raises ConfigError or
    DataError before the model is built when files or settings are wrong, and RankError or LossError, the same
    on all ranks, for what only shows while it runs.
    """
    config.check_runnable()
    tracker_of(config.track_with)
    inputs = load_inputs(config)
    if inputs.prompts is not None and inputs.reward is not None:
        prompts_by_domain(config, inputs.prompts, inputs.reward)  # said before anything is built
    start_processes(config.actor_train.backend_timeout)
    loss = _loss(config) if config.max_steps else None
    objective = (
        Objective(loss=loss, advantages=_advantages(config)) if config.max_steps and not supervised(config) else None
    )
    with contextlib.ExitStack() as until_the_end:
        served = config if objective is None else until_the_end.enter_context(engine_servers(config))
        run = Run(config, inputs, until_the_end, start_workers)
        try:
            if config.warmup is not None:
                warm_up(run)
            if supervised(config):
                train_on_texts(run, loss)
            if objective is not None:
                with engine_sampler(served, run.strategy, sleeps=engine_sleeps(config)) as engine:
                    Grpo(run, objective, served, engine or layout_sampler(config, run.strategy)).run()
            model = export_at_the_end(config, run.strategy)
        finally:
            run.recorder.close()
        batching = run.strategy.batching.train
        fixed = batching.mode == "padded" and batching.padded_length is not None
        run.recorder.conclude("full" if fixed else batching.mode, model)


def _loss(config: JobConfig) -> Any:
    """The loss, which may be a user's own code: before the model is built, and the same on all ranks."""
    with consensus(host_group(), "the job's objective") as facts:
        words = (config.loss_function, config.loss_args)
        facts.equal("the loss and its settings", words, "Start all ranks with the same settings")
        return loss_of(config)


def _advantages(config: JobConfig) -> Advantages:
    """What makes advantages, as `_loss`."""
    with consensus(host_group(), "the job's objective") as facts:
        facts.equal("the advantages", config.adv_estimator, "Start all ranks with the same settings")
        return advantages_of(config)
