"""Rollouts by an engine: weight updates after training steps, and its log-probs compared with the trainer's."""

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
from roll_batching.jobs.engines.client import EngineClient, sum_metrics
from roll_batching.jobs.engines.probe import make_probe
from roll_batching.jobs.engines.weights import engine_weights
from roll_batching.jobs.observe.metrics_file import Metrics
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.offload import OffloadStats

logger = logging.getLogger(__name__)


class EngineSampler(EngineClient):
    """An engine client on the training ranks, which send it their weights and compare log-probs.

    `sleeps`: the engine shares the ranks' devices. It sleeps at first, and while the model trains.
    """

    def __init__(self, config: JobConfig, strategy: MegatronInferStrategy, *, sleeps: bool = False) -> None:
        super().__init__(config, strategy.layout, asleep=sleeps)
        self.strategy, self.gap_warning = strategy, config.actor_infer.engine_args.gap_warning
        self._weights = engine_weights(config, strategy, self)
        self._sleeps = sleeps
        self._sent_version: int | None = None
        self._transfer_seconds = self._sleep_seconds = 0.0
        self._bytes = 0

    @property
    def offload_stats(self) -> OffloadStats:
        """Nothing offloaded here: an engine frees memory itself."""
        return OffloadStats()

    def update(self, version: int) -> None:
        """Sends the strategy's weights, which are those of `version`, to the engine, and checks that it has them.

        Raises RankError, the same on all ranks, when they cannot be sent or no replica has them.
        """
        if version == self._sent_version and not self.asleep:
            return
        started = time.perf_counter()
        probe = make_probe(self.strategy)  # before an engine on the same devices takes memory
        self._bytes += self._weights.send(version)
        self.check_weights(probe)
        self._sent_version = version
        self._transfer_seconds += time.perf_counter() - started

    def release_memory(self) -> None:
        """Puts an engine that shares the ranks' devices to sleep before training."""
        if self._sleeps and not self.asleep:
            started = time.perf_counter()
            self.sleep()
            self._sleep_seconds += time.perf_counter() - started

    def metrics(self, local_batch: SampleBatch) -> Metrics:
        """Metrics of the rollouts `local_batch`, and of weight updates since the last call. Collective.

        If old log-probs are the trainer's own (`logprob_plan` train or own), `engine_gap_mean` and `engine_gap_max` are
        mean and maximum of |engine - trainer| log-prob per response token, and `engine_kl` is the mean of engine -
        trainer: the divergence of the trainer's policy from the engine's.
        """
        if self.strategy.batching.logprob_plan not in ("train", "own"):
            gap = torch.zeros(0)  # the trainer's own log-probs are not computed
        else:
            trainer, engine = local_batch["old_log_probs"].double(), local_batch["rollout_log_probs"].double()
            mask = local_batch["response_mask"].bool()
            # Row i has the log-prob of token i + 1; the row after a sample's last token is a prompt's.
            is_response = torch.cat([mask[1:], mask.new_zeros(min(1, len(mask)))])
            gap = (engine - trainer)[is_response & (trainer != 0)].cpu()  # samples that the plan dropped have 0
        sums = (len(gap), float(gap.sum()), float(gap.abs().sum()), float(gap.abs().max()) if len(gap) else 0.0)
        own_metrics = self.request_metrics()
        replies = exchange(
            self.layout.host_group,
            "metrics of the engine",
            lambda: (sums, own_metrics, self.layout.is_replica_leader, self._bytes),
        )
        sent_bytes, replicas = sum(reply[3] for reply in replies), [reply[:2] for reply in replies if reply[2]]
        metrics: Metrics = {"weights_seconds": self._transfer_seconds, "weights_bytes": sent_bytes}
        if self._sleeps:
            metrics["engine_sleep_seconds"] = self._sleep_seconds
        self._transfer_seconds = self._sleep_seconds = 0.0
        self._bytes = 0
        metrics |= sum_metrics([own for _, own in replicas])
        tokens = sum(one[0] for one, _ in replicas)
        if tokens:
            metrics["engine_kl"] = sum(one[1] for one, _ in replicas) / tokens
            metrics["engine_gap_mean"] = sum(one[2] for one, _ in replicas) / tokens
            metrics["engine_gap_max"] = max(one[3] for one, _ in replicas)
            if metrics["engine_gap_mean"] > self.gap_warning and dist.get_rank() == 0:
                logger.warning(
                    "the engine's log-probs differ from the trainer's by %.4f per token in the mean (%.4f at most), "
                    "above actor_infer.engine_args.gap_warning = %g: see docs/rollout-engines.md",
                    metrics["engine_gap_mean"],
                    metrics["engine_gap_max"],
                    self.gap_warning,
                )
        return metrics

    def close(self) -> None:
        """Ends weight updates and removes their files."""
        self._weights.close()


@contextmanager
def engine_sampler(
    config: JobConfig, strategy: MegatronInferStrategy, *, sleeps: bool
) -> Iterator[EngineSampler | None]:
    """The sampler of the engine in `config`, for the block; `sleeps` as for `EngineSampler`.

    None when the strategy's model generates, and when an asynchronous sampler process calls the engine.
    """
    if not uses_engine(config) or config.asynchronous:
        yield None
        return
    sampler = EngineSampler(config, strategy, sleeps=sleeps)
    try:
        yield sampler
    finally:
        sampler.close()
