"""What the phases of a job share: its inputs, its model, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.supervised import supervised
from roll_batching.jobs.engines.weights import shares_weights_folder, weights_folder
from roll_batching.jobs.inputs import JobInputs
from roll_batching.jobs.objectives.from_config import sampling_of, schedule_of, steps_key, supervised_schedule_of
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.jobs.processes.role_workers import StartRoleWorkers, start_local_workers
from roll_batching.jobs.rollouts.rollout import start_reward
from roll_batching.jobs.run.checkpoint import JobCheckpoints
from roll_batching.jobs.run.recorder import RunRecorder
from roll_batching.jobs.run_folder import EarlierRun, folder_of, held
from roll_batching.strategy import MegatronTrainStrategy


class Run:
    """A job on its way: the strategy is built, the folder is held, the reward answers.

    Building it is collective. What it takes is given back when `until_the_end` closes.
    """

    def __init__(
        self,
        config: JobConfig,
        inputs: JobInputs,
        until_the_end: contextlib.ExitStack,
        start_workers: StartRoleWorkers = start_local_workers,
    ) -> None:
        self.config, self.inputs, self.start_workers = config, inputs, start_workers
        self.sampling = sampling_of(config, inputs.tokenizer)
        dp_size = config.dp_size(int(os.environ.get("WORLD_SIZE", "1")))
        self.texts_per_step = config.mini_batch_size(dp_size) // (2 if config.task == "dpo" else 1)
        """sft and dpo: texts or pairs of an optimizer step over all ranks."""
        if supervised(config):
            self.schedule = supervised_schedule_of(config, len(inputs.corpus or ()), self.texts_per_step)
        else:
            self.schedule = schedule_of(config, dp_size)
        """Training arguments of the job's main phase."""
        worker = config.actor_train.model_copy(update={"training_args": self.schedule})
        self.strategy = MegatronTrainStrategy(worker, seed=config.seed, temperature=config.logprob_temperature)
        self.strategy.initialize()
        layout = self.strategy.layout
        with consensus(layout.host_group, "the job's inputs") as facts:
            facts.equal("the data files", inputs.fingerprint, "Give all machines the same files")
            if dist.get_rank() == 0:
                until_the_end.enter_context(held(folder_of(config)))
                if shares_weights_folder(config):
                    until_the_end.enter_context(held(weights_folder(config), temporary=True))
        if inputs.reward is not None:
            until_the_end.callback(inputs.reward.close)
            start_reward(layout, inputs.reward)
        self.checkpoints = JobCheckpoints(config, folder_of(config), self.strategy, inputs)
        self.recorder = RunRecorder(config, enabled=dist.get_rank() == 0)
        self._open = False

    def begin(self, phase: str, steps: int, done: int) -> None:
        """A phase of `steps` steps begins after `done` of them, everything being built and loaded. Collective.

        With the first one the folder becomes this run's: what an earlier run left makes way.
        """
        if not self._open:
            with consensus(self.strategy.layout.host_group, "opening the run's folder"):
                if dist.get_rank() == 0:
                    earlier = EarlierRun(self.recorder.folder)
                    self.checkpoints.make_way(earlier)
                    self.recorder.open(earlier, self.checkpoints.kept_rows)
            self._open = True
        self.recorder.start(phase, steps, done)
        if done == steps:
            self.recorder.progress.note(
                f"{phase} is complete: all of its {steps:,} steps were done before. {self._after(phase)}"
            )
        elif done:
            self.recorder.progress.note(
                f"{phase} goes on after step {done:,} of {steps:,}, from {self.checkpoints.latest}"
            )

    def _after(self, phase: str) -> str:
        """What follows a phase that is complete, or what to set to train on."""
        if phase != "warmup":
            return f"To train on, raise {steps_key(self.config, phase)}"
        if self.config.max_steps:
            return "The phase rl follows"
        return f"To train on, raise {steps_key(self.config, phase)}, or max_steps for the phase rl"

    def record(
        self, step: int, row: Row, *, shown: Mapping[str, float | None], said: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """A step is over: as `RunRecorder.step`. Collective.

        Raises RankError, the same on all ranks, when the one that records cannot.
        """
        with consensus(self.strategy.layout.host_group, "recording the step"):
            self.recorder.step(step, row, shown=shown, said=said)
