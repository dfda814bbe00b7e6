"""Weight updates of the engine: as model directories on disk, or over process groups."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import EngineError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import shares_devices, starts_servers, uses_engine
from roll_batching.jobs.engines.client import EngineClient
from roll_batching.jobs.engines.factories import weight_broadcast
from roll_batching.jobs.engines.protocol import ServerProcess
from roll_batching.jobs.engines.weight_broadcast import WeightBroadcast
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.full_tensors import TensorStream

WEIGHTS = "engine_weights"
"""Default folder of the engine's model directories, in the run's folder."""
_VERSION = re.compile(r"\d{6,}")
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
        """Ends weight updates."""


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
        path, written = self._folder / f"{version:06d}", version != self._written
        if written:
            # An interrupted run may have left the folder.
            self._strategy.export(path, replaces=lambda path: True, with_head=self._with_head)
        self._client.load(path, version)
        self._remove_folders(keep=path)
        self._written = version
        return sum(file.stat().st_size for file in path.iterdir()) if written and dist.get_rank() == 0 else 0

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
        return weight_broadcast(self._client.engine, device)
