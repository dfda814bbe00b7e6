"""State that the phases of a job share: inputs, model, checkpoints and recorder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.auto_caps import smallest_cap
from roll_batching.jobs.engines.sampler import shares_weights_folder, weights_folder
from roll_batching.jobs.inputs import JobInputs
from roll_batching.jobs.objectives.from_config import sampling_of, schedule_of, steps_key, supervised_schedule_of
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.processes.role_workers import StartRoleWorkers, start_local_workers
from roll_batching.jobs.rollouts.function_rollouts import FunctionRollouts
from roll_batching.jobs.rollouts.rollout import start_reward
from roll_batching.jobs.run.checkpoint import JobCheckpoints
from roll_batching.jobs.run.folder import PreviousRun, lock_folder
from roll_batching.jobs.run.lowered_caps import SMALLEST_SPARE, lower_caps, spare_share
from roll_batching.jobs.run.recorder import RunRecorder
from roll_batching.planning import Plan
from roll_batching.settings.training import TrainingArgs
from roll_batching.strategy import MegatronInferStrategy, MegatronTrainStrategy


class JobContext:
    """A job's inputs, initialized strategy, locked folder, started reward, checkpoints and recorder.

    Building it is collective. Closing `exit_stack` releases the folder.
    """

    def __init__(
        self,
        config: JobConfig,
        inputs: JobInputs,
        exit_stack: contextlib.ExitStack,
        start_workers: StartRoleWorkers = start_local_workers,
        rollout_function: FunctionRollouts | None = None,
    ) -> None:
        self.config, self.inputs, self.start_workers = config, inputs, start_workers
        self.rollout_function = rollout_function
        self.sampling = sampling_of(config, inputs.tokenizer)
        dp_size = config.dp_size(int(os.environ.get("WORLD_SIZE", "1")))
        self.texts_per_step = config.mini_batch_size(dp_size) // (2 if config.task == "dpo" else 1)
        """sft, dpo and kto: number of texts or pairs of an optimizer step, over all ranks."""
        if config.is_supervised:
            self.schedule = supervised_schedule_of(config, len(inputs.corpus or ()), self.texts_per_step)
        else:
            self.schedule = schedule_of(config, dp_size)
        """Training arguments of the job's main phase."""
        role = config.actor_train.model_copy(update={"training_args": self.schedule})
        self.strategy = MegatronTrainStrategy(role, seed=config.seed, temperature=config.logprob_temperature)
        self.strategy.initialize()
        layout = self.strategy.layout
        with consensus(layout.host_group, "the job's inputs") as facts:
            facts.equal("the data files", inputs.fingerprint, "Give all machines the same files")
            if dist.get_rank() == 0:
                exit_stack.enter_context(lock_folder(config.run_folder))
                if shares_weights_folder(config):
                    exit_stack.enter_context(lock_folder(weights_folder(config), temporary=True))
        if inputs.reward is not None and config.has_sampler:
            inputs.reward.close()  # a sampler in its own processes scores there
        elif inputs.reward is not None:
            start_reward(layout, inputs.reward)
        self.strategies: dict[str, MegatronInferStrategy] = {"actor_train": self.strategy}
        """Models on these ranks by role, whose caps may be lowered."""
        self.checkpoints = JobCheckpoints(config, self.strategy, inputs)
        self._checks_caps = False
        self.recorder = RunRecorder(config, enabled=dist.get_rank() == 0)
        self._folder_is_open = False

    def start_phase(self, phase: str, steps: int, completed_steps: int, training: TrainingArgs) -> None:
        """Open the run's folder for the first phase, and show the progress of `phase`. Collective.

        `training` has the phase's number of optimizer steps.

        Call it when everything is built and loaded: only then files of an earlier run are moved away, so that a job
        that fails earlier changes nothing.
        """
        if not self._folder_is_open:
            with consensus(self.strategy.layout.host_group, "opening the run's folder"):
                if dist.get_rank() == 0:
                    previous = PreviousRun(self.recorder.folder)
                    self.checkpoints.move_later_checkpoints(previous)
                    self.recorder.open(previous, self.checkpoints.resume_after)
            self._folder_is_open = True
        self.recorder.start_phase(phase, steps, completed_steps)
        # A phase that resumes keeps the caps of its checkpoint, and forms the micro-batches of one never stopped.
        self._checks_caps = bool(self.config.resolved_caps) and not completed_steps and phase != "warmup"
        is_told = any(notice.key[-1] == "warmup_steps" for notice in self.config.notices)
        if not is_told and (unfinished := training.unfinished_warmup(training.max_steps)) is not None:
            self.recorder.progress.note(f"warmup_steps {unfinished}")
        if completed_steps == steps:
            self.recorder.progress.note(
                f"{phase} is complete: all of its {steps:,} steps were done before. {self._next_action(phase)}"
            )
        elif completed_steps:
            self.recorder.progress.note(
                f"{phase} continues after step {completed_steps:,} of {steps:,}, from {self.checkpoints.latest}"
            )

    def _next_action(self, phase: str) -> str:
        """Sentence after "complete": the phase that follows, or the key to raise to train on."""
        if phase != "warmup":
            return f"To train on, raise {steps_key(self.config, phase)}"
        if self.config.max_steps:
            return "The phase rl follows"
        return f"To train on, raise {steps_key(self.config, phase)}, or max_steps for the phase rl"

    def record(
        self,
        step: int,
        metrics: Metrics,
        *,
        shown: Mapping[str, float | None],
        plan: Plan,
        sample_log: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Records a finished step, as `RunRecorder.step`; `plan`: of its last optimizer step. Collective.

        After the first step auto caps are lowered if hardly any memory was left.

        Raises RankError, the same on all ranks, when the recording rank cannot write.
        """
        with consensus(self.strategy.layout.host_group, "recording the step"):
            self.recorder.step(step, metrics, shown=shown, plan=plan, sample_log=sample_log)
        if self._checks_caps and (spare := spare_share(self.config, self.strategy.device)) is not None:
            self.lower_caps(spare)
        self._checks_caps = False

    def add_models(self, **models: Any) -> None:
        """Adds the models of other roles to `strategies`: strategies, or objects that hold one; None is left out."""
        self.strategies |= {
            name: getattr(model, "strategy", model) for name, model in models.items() if model is not None
        }

    def lower_caps(self, spare: float) -> None:
        """Lowers auto caps, those of training first, if less than 3% of a rank's memory, `spare`, was left. Collective.

        Later micro-batches, and checkpoints, have the lowered caps. Models in processes of their own keep theirs.
        """
        config = self.config
        before = {key: cap for key, cap in self.checkpoints.caps.items() if key.partition(".")[0] in self.strategies}
        caps = lower_caps(before, spare, smallest_cap(config), self.strategy.layout.host_group)
        if caps == before:
            return
        lowered = config.with_resolved_caps({**self.checkpoints.caps, **caps})
        for name, strategy in self.strategies.items():
            strategy.state = replace(strategy.state, batching=lowered.roles[name].batching())
        self.checkpoints.caps = lowered.resolved_caps
        changes = ", ".join(f"{key} from {before[key]} to {cap}" for key, cap in caps.items())
        self.recorder.progress.note(f"the first step left less than {SMALLEST_SPARE:.0%} of the memory: {changes}")
