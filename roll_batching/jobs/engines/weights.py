"""How the weights of the model in training come to the engine: as model directories, or over process groups."""

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
from roll_batching.jobs.engines.asking import EngineClient
from roll_batching.jobs.engines.make import weight_broadcast
from roll_batching.jobs.engines.protocol import ServerProcess
from roll_batching.jobs.engines.weight_broadcast import WeightBroadcast
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.tensor_stream import TensorStream

WEIGHTS = "engine_weights"
"""Folder of the model directories that engines read, in the run's folder where the job names none."""
_VERSION = re.compile(r"\d{6,}")
_SENDING = "sending weights to the engine"


def weights_folder(config: JobConfig) -> Path:
    """Where the model directories of the job's engine lie."""
    folder = config.actor_infer.engine_args.weights_folder
    if folder is None:
        return config.run_folder / WEIGHTS
    run = os.path.abspath(config.run_folder)  # jobs of other folders may have the same name
    return Path(folder) / f"{config.exp_name}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def shares_weights_folder(config: JobConfig) -> bool:
    """Whether model directories lie where other jobs may write too, not in the run's folder."""
    args = config.actor_infer.engine_args
    return uses_engine(config) and args.weights_folder is not None and args.update_weights_from == "disk"


class EngineWeights(Protocol):
    """Gives weights to an engine. Methods are collective."""

    def give(self, version: int) -> int:
        """The engine answers with the weights as they are now, `version`, and is awake. Bytes that left the ranks.

        Raises RankError, the same on all ranks, where the model cannot be given or no replica takes it.
        """

    def close(self) -> None:
        """The engine gets no more."""


def engine_weights(config: JobConfig, strategy: MegatronInferStrategy, client: EngineClient) -> EngineWeights:
    """The way that `config` names, from `strategy` to the engine of `client`."""
    if config.actor_infer.engine_args.update_weights_from == "distributed":
        return WeightsByBroadcast(config, strategy, client)
    return WeightsByDisk(config, strategy, client)


class WeightsByDisk:
    """Model directories, in a folder that ranks and engine see; one at a time."""

    def __init__(self, config: JobConfig, strategy: MegatronInferStrategy, client: EngineClient) -> None:
        self._strategy, self._client, self._folder = strategy, client, weights_folder(config)
        self._written: int | None = None

    def give(self, version: int) -> int:
        """As `EngineWeights` says; bytes are of the files."""
        path, written = self._folder / f"{version:06d}", version != self._written
        if written:
            self._strategy.export(path, replaces=lambda path: True)  # of a run that was interrupted
        self._client.load(path, version)
        self._forget(all_but=path)
        self._written = version
        return sum(file.stat().st_size for file in path.iterdir()) if written and dist.get_rank() == 0 else 0

    def close(self) -> None:
        """The model directories are no longer needed."""
        self._forget()
        if dist.get_rank() == 0:
            with suppress(OSError):  # something else lies there
                self._folder.rmdir()

    def _forget(self, all_but: Path | None = None) -> None:
        """Removes model directories of earlier versions."""
        if dist.get_rank() == 0 and self._folder.is_dir():
            for older in self._folder.iterdir():
                if older != all_but and _VERSION.fullmatch(older.name):
                    shutil.rmtree(older, ignore_errors=True)


class WeightsByBroadcast:
    """Tensors go to rank 0 in buckets, and from there over process groups to the engine's servers."""

    def __init__(self, config: JobConfig, strategy: MegatronInferStrategy, client: EngineClient) -> None:
        self._config, self._strategy, self._client = config, strategy, client
        self._stream: TensorStream | None = None
        self._sender: WeightBroadcast | None = None
        """Of rank 0."""

    def give(self, version: int) -> int:
        """As `EngineWeights` says. Ranks agree after every bucket: nobody waits for one that failed."""
        client, sent = self._client, 0
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
                    sent += self._sender.send(bucket.tensors, version if bucket.last else None)

        def end() -> Mapping[str, ServerProcess | None]:
            if self._sender is not None:
                self._sender.end(version, asleep=client.asleep)
            return client.engine.live

        client.loaded(exchange(group, _SENDING, end, patience=client.patience)[0], version)
        return sent

    def close(self) -> None:
        """Leaves the groups."""
        if self._sender is not None:
            self._sender.close()

    def _new_sender(self, device: torch.device) -> WeightBroadcast:
        if device.type == "cuda" and starts_servers(self._config) and shares_devices(self._config):
            raise EngineError(
                "actor_infer.engine_args.update_weights_from=distributed needs servers on devices of their own: NCCL "
                "has no two ranks on one device. Give actor_infer a device_mapping of its own, or use disk"
            )
        return weight_broadcast(self._client.engine, device)
