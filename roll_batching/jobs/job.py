"""Runs a job's phases: GRPO after a supervised warm-up, or supervised training alone, with one strategy."""

from __future__ import annotations

import contextlib

from roll_batching.distributed import consensus, host_group
from roll_batching.distributed.parallel_layout import start_processes
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import engine_sleeps
from roll_batching.jobs.engines.sampler import engine_sampler
from roll_batching.jobs.engines.servers import engine_servers
from roll_batching.jobs.inputs import load_inputs
from roll_batching.jobs.objectives.from_config import advantages_of, loss_of
from roll_batching.jobs.observe.trackers import tracker_of
from roll_batching.jobs.processes.role_workers import StartRoleWorkers, start_local_workers
from roll_batching.jobs.rl.grpo import Grpo
from roll_batching.jobs.roles.layout_sampler import layout_sampler
from roll_batching.jobs.rollouts.function_rollouts import function_rollouts_of
from roll_batching.jobs.rollouts.prompts import check_lines, prompts_by_domain
from roll_batching.jobs.run.capabilities import check_capabilities
from roll_batching.jobs.run.context import JobContext
from roll_batching.jobs.run.job_digests import shared_settings
from roll_batching.jobs.run.saved_model import export_final_model
from roll_batching.jobs.supervised.supervised import train_on_texts, warm_up


def run_job(config: JobConfig, start_workers: StartRoleWorkers = start_local_workers) -> None:
    """Runs the job that `config` describes, as one of its ranks. Every rank calls it.

    `start_workers` starts the processes of roles with their own devices.

    Writes metrics, the resolved configuration and the learning curve into the run's folder. Raises ConfigError or
    DataError before the model is built when files or settings are wrong, and RankError or LossError, the same
    on all ranks, for failures while it runs.
    """
    config.check_runnable()
    tracker_of(config.track_with)
    inputs = load_inputs(config)
    if inputs.prompts is not None and inputs.reward is not None:
        prompts_by_domain(config, inputs.prompts, inputs.reward)  # fails before the model is built
    device = start_processes(config.actor_train.backend_timeout)
    with consensus(host_group(), "the job's settings, which all ranks must share") as facts:
        for path, text in shared_settings(config).items():  # ranks with others would wait in different collectives
            facts.equal(path, text)
    # A user's own loss, estimator or function may fail on one rank: made before the model, and an error on all ranks.
    with consensus(host_group(), "the job's objective"):
        loss = loss_of(config) if config.max_steps else None
        advantages = advantages_of(config) if config.max_steps and not config.is_supervised else None
    with consensus(host_group(), "the job's rollout function"):
        function = function_rollouts_of(config)
    with contextlib.ExitStack() as exit_stack:
        if inputs.reward is not None:
            exit_stack.callback(inputs.reward.close)
        check_lines(config, inputs, host_group())
        with consensus(host_group(), "the job's models"):
            check_capabilities(config, device)
        sampler_config = config if advantages is None else exit_stack.enter_context(engine_servers(config))
        context = JobContext(config, inputs, exit_stack, start_workers, function)
        try:
            if config.warmup is not None:
                warm_up(context)
            if config.is_supervised:
                train_on_texts(context, loss)
            if advantages is not None:
                with engine_sampler(sampler_config, context.strategy, sleeps=engine_sleeps(config)) as engine:
                    sampler = engine or layout_sampler(config, context.strategy)
                    Grpo(context, loss, advantages, sampler_config, sampler).run()
            model_path = export_final_model(config, context.strategy)
        finally:
            context.recorder.close()
        batching = context.strategy.batching.train
        is_full = batching.mode == "padded" and batching.padded_length is not None
        context.recorder.conclude("full" if is_full else batching.mode, model_path)
