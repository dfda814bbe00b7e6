"""Interfaces of what samples in a job: the model in training, a copy of it, or an engine."""

from __future__ import annotations

from typing import Protocol

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.jobs.observe.metrics_file import Metrics
from roll_batching.samples import SampleBatch
from roll_batching.strategy import GenerationSettings
from roll_batching.strategy.offload import OffloadStats


class Sampler(Protocol):
    """Samples responses to prompts: the model in training, a copy of it, or an engine."""

    @property
    def layout(self) -> ParallelLayout:
        """Parallel layout of the ranks that call `generate`."""

    def generate(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """Responses to this data-parallel rank's prompts, as of `MegatronInferStrategy.generate`. Collective."""


class SeparateSampler(Sampler, Protocol):
    """A sampler with a copy of the weights in training. Every method is collective."""

    @property
    def offload_stats(self) -> OffloadStats:
        """Bytes and seconds of moving its weights between devices and host so far."""

    def update(self, version: int) -> None:
        """Copy the weights in training, which are those after `version` RL steps."""

    def release_memory(self) -> None:
        """Free the memory of devices that the sampler shares with training, until the next `update`."""

    def metrics(self, local_batch: SampleBatch) -> Metrics:
        """Metrics of the rollouts `local_batch`, and of weight updates since the last call."""
