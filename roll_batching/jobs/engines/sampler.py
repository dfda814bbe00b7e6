"""The engine that samples a job's rollouts: it gets the model's weights, and its log-probs are compared with ours."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from roll_batching.distributed import exchange
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import uses_engine
from roll_batching.jobs.engines.asking import EngineClient, joined
from roll_batching.jobs.engines.weights import engine_weights
from roll_batching.jobs.observe.metrics_file import Metrics
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.offload import OffloadStats

logger = logging.getLogger(__name__)


class EngineSampler(EngineClient):
    """The same on the ranks of a job, which give it their weights, and compare log-probs.

    `sleeps`: the engine sleeps, now and whenever it is told to rest.
    """

    def __init__(self, config: JobConfig, strategy: MegatronInferStrategy, *, sleeps: bool = False) -> None:
        super().__init__(config, strategy.layout, asleep=sleeps)
        self.strategy, self.gap_warning = strategy, config.actor_infer.engine_args.gap_warning
        self._weights = engine_weights(config, strategy, self)
        self._sleeps = sleeps
        self._version: int | None = None
        self._transfer_seconds = self._sleep_seconds = 0.0
        self._bytes = 0

    @property
    def offload_stats(self) -> OffloadStats:
        """Nothing: an engine makes room in its own ways."""
        return OffloadStats()

    def update(self, version: int) -> None:
        """The engine answers with the strategy's weights from now on, which are those of `version`.

        Raises RankError, the same on all ranks, where the model cannot be given or no replica takes it.
        """
        if version == self._version and not self.asleep:
            return
        started = time.perf_counter()
        self._bytes += self._weights.give(version)
        self._version = version
        self._transfer_seconds += time.perf_counter() - started

    def release_memory(self) -> None:
        """The model is about to train: an engine that shares its devices sleeps."""
        if self._sleeps and not self.asleep:
            started = time.perf_counter()
            self.sleep()
            self._sleep_seconds += time.perf_counter() - started

    def metrics(self, local_batch: SampleBatch) -> Metrics:
        """Metrics of the rollouts `local_batch`, and of weight updates since the last call.

        Where old log-probs are the trainer's own (`logprob_plan` train or own), `engine_gap_mean` and `engine_gap_max`
        are of |engine - trainer| log-prob per response token, `engine_kl` the mean of engine - trainer, which is the
        divergence of the trainer's policy from the engine's. Collective.
        """
        if self.strategy.batching.logprob_plan not in ("train", "own"):
            gap = torch.zeros(0)  # the trainer's own are not known
        else:
            ours, theirs = local_batch["old_log_probs"].double(), local_batch["rollout_log_probs"].double()
            mask = local_batch["response_mask"].bool()
            rows = torch.cat([mask[1:], mask.new_zeros(min(1, len(mask)))])  # a prompt follows a sample's last row
            gap = (theirs - ours)[rows & (ours != 0)].cpu()  # samples that no plan held read 0
        mine = (len(gap), float(gap.sum()), float(gap.abs().sum()), float(gap.abs().max()) if len(gap) else 0.0)
        own = self.figures()
        told = exchange(
            self.layout.host_group,
            "figures of the engine",
            lambda: (mine, own, self.layout.is_replica_leader, self._bytes),
        )
        sent, parts = sum(part[3] for part in told), [part[:2] for part in told if part[2]]
        row: Metrics = {"weights_seconds": self._transfer_seconds, "weights_bytes": sent}
        if self._sleeps:
            row["engine_sleep_seconds"] = self._sleep_seconds
        self._transfer_seconds = self._sleep_seconds = 0.0
        self._bytes = 0
        row |= joined([figures for _, figures in parts])
        tokens = sum(one[0] for one, _ in parts)
        if tokens:
            row["engine_kl"] = sum(one[1] for one, _ in parts) / tokens
            row["engine_gap_mean"] = sum(one[2] for one, _ in parts) / tokens
            row["engine_gap_max"] = max(one[3] for one, _ in parts)
            if row["engine_gap_mean"] > self.gap_warning and dist.get_rank() == 0:
                logger.warning(
                    "the engine's log-probs differ from the trainer's by %.4f per token in the mean (%.4f at most), "
                    "above actor_infer.engine_args.gap_warning = %g: see docs/rollout-engines.md",
                    row["engine_gap_mean"],
                    row["engine_gap_max"],
                    self.gap_warning,
                )
        return row

    def close(self) -> None:
        """The engine gets no more weights."""
        self._weights.close()


@contextmanager
def engine_sampler(
    config: JobConfig, strategy: MegatronInferStrategy, *, sleeps: bool
) -> Iterator[EngineSampler | None]:
    """The sampler of the engine that `config` names, for the block; `sleeps` as `EngineSampler` has it.

    None where the strategy's model samples itself, and where the process that draws ahead of training asks the engine.
    """
    if not uses_engine(config) or config.asynchronous:
        yield None
        return
    sampler = EngineSampler(config, strategy, sleeps=sleeps)
    try:
        yield sampler
    finally:
        sampler.close()
