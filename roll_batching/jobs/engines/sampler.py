"""Samples rollouts by an engine: sends it weights, by files or over process groups, and compares its log-probs."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import EngineError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import shares_devices, starts_servers, uses_engine
from roll_batching.jobs.engines.client import EngineClient, sum_metrics
from roll_batching.jobs.engines.probe import make_probe
from roll_batching.jobs.engines.protocol import ServerProcess
from roll_batching.jobs.engines.replicas import Replicas
from roll_batching.jobs.engines.sglang import SGLang
from roll_batching.jobs.engines.weight_broadcast import WeightBroadcast
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.samples import SampleBatch
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.full_tensors import TensorStream
from roll_batching.strategy.offload import OffloadStats

WEIGHTS = "engine_weights"
"""Default folder of the engine's model directories, in the run's folder."""
_VERSION = re.compile(r"\d{6,}")
"""Names of the model directories: the version of the weights, in at least six digits."""
_SENDING = "sending weights to the engine"


def weights_folder(config: JobConfig) -> Path:
    """Folder of the model directories that the job's engine loads."""
    folder = config.actor_infer.engine_args.weights_folder
    if folder is None:
        return config.run_folder / WEIGHTS
    run = os.path.abspath(config.run_folder)  # jobs of other folders may have the same name
    return Path(folder) / f"{config.exp_name}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def shares_weights_folder(config: JobConfig) -> bool:
    """Whether model directories are outside of the run's folder, where other jobs may write too."""
    args = config.actor_infer.engine_args
    return uses_engine(config) and args.weights_folder is not None and args.update_weights_from == "disk"


def sends_tied_head(config: JobConfig, device: torch.device) -> bool:
    """Whether the engine needs tied embeddings as the output head, too.

    vLLM's CPU backend computes with a packed copy of the head, and packs it anew only when it loads `lm_head.weight`
    (0.32: `dispatch_cpu_unquantized_gemm`, `finalize_layerwise_processing`).
    """
    return config.actor_infer.strategy_args.strategy_name == "vllm" and device.type == "cpu"


class EngineWeights(Protocol):
    """Sends weights to an engine. Methods are collective."""

    def send(self, version: int) -> int:
        """Sends the current weights as `version`, and wakes the engine up; returns the bytes sent.

        Raises RankError, the same on all ranks, when they cannot be sent or no replica loads them.
        """

    def close(self) -> None:
        """Ends weight updates, and frees what they use."""


def engine_weights(config: JobConfig, strategy: MegatronInferStrategy, client: EngineClient) -> EngineWeights:
    """Weight updates from `strategy` to the engine of `client`, by `update_weights_from` of `config`."""
    if config.actor_infer.engine_args.update_weights_from == "distributed":
        return WeightsByBroadcast(config, strategy, client)
    return WeightsByDisk(config, strategy, client)


class WeightsByDisk:
    """Writes model directories to a folder that ranks and engine share, one at a time."""

    def __init__(self, config: JobConfig, strategy: MegatronInferStrategy, client: EngineClient) -> None:
        self._strategy, self._client, self._folder = strategy, client, weights_folder(config)
        self._with_head = sends_tied_head(config, strategy.layout.device)
        self._written: int | None = None

    def send(self, version: int) -> int:
        """See `EngineWeights`; returns the bytes of the files."""
        path, is_new = self._folder / f"{version:06d}", version != self._written
        if is_new:
            # `replaces`: an interrupted run may have left the folder.
            self._strategy.export(path, replaces=lambda path: True, with_head=self._with_head)
        self._client.load(path, version)
        self._remove_folders(keep=path)
        self._written = version
        return sum(file.stat().st_size for file in path.iterdir()) if is_new and dist.get_rank() == 0 else 0

    def close(self) -> None:
        """Removes the model directories."""
        self._remove_folders()
        if dist.get_rank() == 0:
            with suppress(OSError):  # not empty: it has files of others
                self._folder.rmdir()

    def _remove_folders(self, keep: Path | None = None) -> None:
        """Removes all model directories but `keep`."""
        if dist.get_rank() == 0 and self._folder.is_dir():
            for path in self._folder.iterdir():
                if path != keep and _VERSION.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)


class WeightsByBroadcast:
    """Sends tensors to rank 0 in buckets, and from there over process groups to the engine's servers."""

    def __init__(self, config: JobConfig, strategy: MegatronInferStrategy, client: EngineClient) -> None:
        self._config, self._strategy, self._client = config, strategy, client
        self._stream: TensorStream | None = None
        self._sender: WeightBroadcast | None = None
        """On rank 0 only."""

    def send(self, version: int) -> int:
        """See `EngineWeights`. Ranks agree after every bucket, so that none waits for a failed one."""
        client, sent_bytes = self._client, 0
        group = client.layout.host_group
        if self._stream is None:
            self._stream = self._strategy.tensor_stream()
        with consensus(group, _SENDING, patience=client.patience):
            if dist.get_rank() == 0:
                if self._sender is None:
                    self._sender = self._new_sender(self._stream.device)
                self._sender.begin(asleep=client.asleep)
        for bucket in self._stream.buckets():
            with consensus(group, _SENDING, patience=client.patience):
                if bucket.error is not None:
                    raise bucket.error
                if self._sender is not None:
                    sent_bytes += self._sender.send(bucket.tensors, version if bucket.last else None)

        def end() -> Mapping[str, ServerProcess | None]:
            if self._sender is not None:
                self._sender.end(version, asleep=client.asleep)
            return client.engine.live

        client.set_loaded(exchange(group, _SENDING, end, patience=client.patience)[0], version)
        return sent_bytes

    def close(self) -> None:
        """Leaves the process groups."""
        if self._sender is not None:
            self._sender.close()

    def _new_sender(self, device: torch.device) -> WeightBroadcast:
        if device.type == "cuda" and starts_servers(self._config) and shares_devices(self._config):
            raise EngineError(
                "actor_infer.engine_args.update_weights_from=distributed needs servers on separate devices: NCCL "
                "allows one rank per device. Give actor_infer a separate device_mapping, or use disk"
            )
        engine = self._client.engine
        if not isinstance(engine, Replicas) or not isinstance(engine.api, SGLang):
            raise EngineError("update_weights_from=distributed is for servers of sglang: use disk")
        return WeightBroadcast(engine, engine.api, device)


# ---- sampler


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
        """Zeros: an engine frees memory itself, so nothing is offloaded here."""
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
        request_metrics = self.request_metrics()
        replies = exchange(
            self.layout.host_group,
            "metrics of the engine",
            lambda: (sums, request_metrics, self.layout.is_replica_leader, self._bytes),
        )
        sent_bytes = sum(rank_bytes for *_, rank_bytes in replies)
        replicas = [(gaps, of_requests) for gaps, of_requests, is_leader, _ in replies if is_leader]
        metrics: Metrics = {"weights_seconds": self._transfer_seconds, "weights_bytes": sent_bytes}
        if self._sleeps:
            metrics["engine_sleep_seconds"] = self._sleep_seconds
        self._transfer_seconds = self._sleep_seconds = 0.0
        self._bytes = 0
        metrics |= sum_metrics([of_requests for _, of_requests in replicas])
        tokens = sum(count for (count, *_), _ in replicas)
        if tokens:
            metrics["engine_kl"] = sum(signed for (_, signed, _, _), _ in replicas) / tokens
            metrics["engine_gap_mean"] = sum(absolute for (_, _, absolute, _), _ in replicas) / tokens
            metrics["engine_gap_max"] = max(largest for (*_, largest), _ in replicas)
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
    """Makes the sampler of the engine in `config`, for the block; `sleeps` as for `EngineSampler`.

    Yields None when the strategy's model generates, and when an asynchronous sampler process calls the engine.
    """
    if not uses_engine(config) or config.asynchronous:
        yield None
        return
    sampler = EngineSampler(config, strategy, sleeps=sleeps)
    try:
        yield sampler
    finally:
        sampler.close()
