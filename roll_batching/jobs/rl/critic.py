"""The critic of an RL job: a second model on the policy's ranks, which computes values and is trained on returns."""

from __future__ import annotations

from typing import Any

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.objectives.from_config import critic_mini_batch_size, critic_role, value_loss_of
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.rollouts.step_metrics import update_metrics
from roll_batching.jobs.steps.passes import prefix_errors
from roll_batching.jobs.steps.update import train_on_values, with_values
from roll_batching.planning import Plan
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import ROLLOUT_IDS
from roll_batching.settings.model import ModelArgs
from roll_batching.strategy import MegatronTrainStrategy
from roll_batching.strategy.roles import copy_trunk

OLD_VALUES = "old_values"
"""The field of the values before the step's first update."""
_READ = ("input_ids", "response_mask", "returns", OLD_VALUES, ROLLOUT_IDS)

_RECORDED = ("loss", "grad_norm", "lr", "tokens", "padding_share", "imbalance", "micro_batches", "train_seconds")
"""Metrics of the critic's optimizer steps that a row has, in addition to the metrics of its loss."""
_IDENTITY = ("model_name_or_path", "family", "architecture", "dtype")


def is_same_model(critic: ModelArgs, policy: ModelArgs) -> bool:
    """Whether a critic's role names the policy's model; the head, and the frozen parts, may differ."""
    return all(getattr(critic, name) == getattr(policy, name) for name in _IDENTITY)


class Critic:
    """The critic in training.

    It starts from the policy's weights at the start of RL if its role names no other model, from the model directory
    that its role names, or at random for another architecture. Its head starts as `value_head_std` says. Building it is
    collective.
    """

    def __init__(self, config: JobConfig, policy: MegatronTrainStrategy) -> None:
        dp_size = policy.layout.dp_size
        role, trained = critic_role(config, dp_size), config.actor_train
        self.strategy = MegatronTrainStrategy(role, seed=config.seed)
        copies = is_same_model(role.model_args, trained.model_args)
        with prefix_errors("critic"):
            self.strategy.initialize(weights=not copies)
            if copies:
                copy_trunk(policy, self.strategy)
        self._loss = value_loss_of(config)
        self._mini_batch_size = critic_mini_batch_size(config, dp_size)
        self._epochs = config.critic_epochs
        self.plan: Plan | None = None
        """Plan of the critic's last optimizer step."""

    def add_values(self, batch: SampleBatch) -> SampleBatch:
        """Adds `old_values` to `batch`, this rank's samples, and returns it. Collective."""
        with prefix_errors("critic"):
            return with_values(self.strategy, batch, OLD_VALUES, self._loss.masks)

    def train(self, batch: SampleBatch, seed: int) -> Metrics:
        """Trains on this rank's samples, which have `returns` and `old_values`; returns metrics. Collective."""
        local_batch = batch.only(_READ)
        size = {"mini_batch_size": self._mini_batch_size, "epochs": self._epochs}
        with prefix_errors("critic"):
            steps: list[Any] = list(train_on_values(self.strategy, local_batch, self._loss, **size, seed=seed))
        self.plan = steps[-1][0]
        of_loss = {name for _, result in steps for name in result.joined_metrics}
        metrics = update_metrics(steps)
        return {f"critic_{name}": value for name, value in metrics.items() if name in {*of_loss, *_RECORDED}}
