"""The job: a supervised warm-up, then GRPO, both through one strategy, from one configuration."""

from __future__ import annotations

import contextlib

from roll_batching.config import JobConfig
from roll_batching.distributed import consensus, host_group
from roll_batching.distributed.parallel_layout import start_processes
from roll_batching.rl.export import export_at_the_end
from roll_batching.rl.from_config import advantages_of, loss_of
from roll_batching.rl.grpo import Grpo, Objective
from roll_batching.rl.inputs import load_inputs
from roll_batching.rl.run import Run
from roll_batching.rl.sft import train_supervised


def run_job(config: JobConfig) -> None:
    """Run the job that `config` describes, as one of its ranks. Every rank calls it.

    Leaves metrics, the resolved configuration and the learning curve in the run's folder. Raises ConfigError or
    DataError before the model is built when files or settings are wrong, and RankError or LossError, the same
    on all ranks, for what only shows while it runs.
    """
    config.check_runnable()
    inputs = load_inputs(config)
    objective = _objective(config) if config.max_steps else None
    with contextlib.ExitStack() as until_the_end:
        run = Run(config, inputs, until_the_end)
        try:
            if config.warmup is not None:
                train_supervised(run)
            if objective is not None:
                Grpo(run, objective).run()
            model = export_at_the_end(config, run.strategy)
        finally:
            run.recorder.close()
        batching = run.strategy.batching.train
        fixed = batching.mode == "padded" and batching.padded_length is not None
        run.recorder.conclude("full" if fixed else batching.mode, model)


def _objective(config: JobConfig) -> Objective:
    """Loss and advantages, which may be a user's own code: before the model is built, and the same on all ranks."""
    start_processes(config.actor_train.backend_timeout)
    with consensus(host_group(), "the job's objective") as facts:
        words = (config.loss_function, config.loss_args, config.adv_estimator)
        facts.equal("the loss, its settings and the advantages", words, "Start all ranks with the same settings")
        return Objective(loss=loss_of(config), advantages=advantages_of(config))
