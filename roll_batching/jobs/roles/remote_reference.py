"""Requests log-probs from a reference on separate devices, once per step, on behalf of the training ranks."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus
from roll_batching.errors import CheckpointError
from roll_batching.files import cause
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.processes.role_workers import StartRoleWorkers, start_local_workers
from roll_batching.jobs.roles.client import RoleClient, RoleKind, Weights, answer_timeout
from roll_batching.jobs.roles.reference import Request
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.strategy import MegatronInferStrategy

WEIGHTS = "reference_weights"
"""Folder of the reference's weights in the run's folder; removed at the end of the run."""
REFERENCE = RoleKind(
    role="reference",
    name="the reference",
    module="roll_batching.jobs.roles.reference",
    request_noun="samples",
    answer_noun="log-probs",
)


class RemoteReference:
    """A frozen copy of the model of `strategy`, in separate processes and a separate parallel layout.

    `__init__` and all methods but `close` are collective; rank 0 has the connections. They raise RankError, the same on
    all ranks, when the processes fail or may not be restarted.
    """

    def __init__(
        self,
        config: JobConfig,
        strategy: MegatronInferStrategy,
        start_workers: StartRoleWorkers = start_local_workers,
    ) -> None:
        self.config, self.strategy = config, strategy
        self.folder = config.run_folder / WEIGHTS
        self._group, self._is_replica_leader = strategy.layout.host_group, strategy.layout.is_replica_leader
        self._client = RoleClient(config, REFERENCE, start_workers) if dist.get_rank() == 0 else None
        self._source: Path | None = None
        self._number = 0
        self._rank_ids: list[torch.Tensor] = []
        """On rank 0: the ids of each training rank's samples, in the last request."""
        self._requested: SampleBatch | None = None
        """On rank 0: the samples of all ranks, in the last request."""
        self._wait_seconds = 0.0
        with consensus(self._group, "starting the reference"):
            if self._client is not None:
                self._client.start()

    def load(self, path: Path) -> None:
        """Sets the weights that `begin` sends: those that `write` of an earlier run saved at `path`."""
        with consensus(self._group, "the reference of a checkpoint"):
            if not path.is_dir():
                raise CheckpointError(f"{path} is not there: the run that wrote the checkpoint had no reference")
        self._source = path

    def begin(self) -> None:
        """Sends weights to the reference at the start of RL: the weights set by `load`, or else the policy's."""
        if self._source is None:
            self.strategy.save(self.folder, optimizer=False)
        with consensus(self._group, "the reference's weights"):
            if self._client is not None:
                if self._source is not None:
                    shutil.rmtree(self.folder, ignore_errors=True)
                    _copy(self._source, self.folder)
                self._client.publish(Weights(version=0, path=self.folder.resolve()))

    def write(self, folder: Path) -> None:
        """Saves the weights to `folder`, as a strategy's checkpoint."""
        with consensus(self._group, "saving the reference"):
            if self._client is not None:
                _copy(self.folder, folder)

    def ask(self, local_batch: SampleBatch, masks: Sequence[str]) -> None:
        """Requests log-probs of all ranks' samples, for the tokens that the fields `masks` select."""
        fields = local_batch.only(["input_ids", *masks]).to("cpu") if self._is_replica_leader else None
        parts: list[Any] | None = None if self._client is None else [None] * dist.get_world_size()
        dist.gather_object((local_batch.ids, fields), parts, dst=0, group=self._group)
        self._number += 1
        with consensus(self._group, "asking the reference"):
            if self._client is not None and parts is not None:
                self._rank_ids = [ids for ids, _ in parts]
                self._requested = SampleBatch.concat([part for _, part in parts if part is not None])
                self._client.ask(Request(number=self._number, samples=self._requested, masks=tuple(masks)))

    def log_probs(self, local_batch: SampleBatch) -> torch.Tensor:
        """Waits for the requested log-probs; returns those of `local_batch`, next_token `[tokens]`."""
        started = time.perf_counter()
        shares: list[torch.Tensor] | None = None
        with consensus(self._group, "reference log-probs", patience=answer_timeout(self.config)):
            if self._client is not None:
                shares = self._shares(self._client)
        local: list[Any] = [None]
        dist.scatter_object_list(local, shares, src=0, group=self._group)
        self._wait_seconds += time.perf_counter() - started
        return local[0]  # type: ignore[no-any-return]

    def metrics(self) -> Metrics:
        """Returns the seconds waited since the last call and, on rank 0, restarts so far."""
        metrics: Metrics = {"reference_wait_seconds": self._wait_seconds}
        self._wait_seconds = 0.0
        return metrics | ({} if self._client is None else {"reference_restarts": self._client.restarts})

    def close(self) -> None:
        """Ends the processes."""
        if self._client is not None:
            self._client.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _shares(self, client: RoleClient) -> list[torch.Tensor]:
        """Waits for the answer, and splits it into the log-probs of each training rank's samples."""
        (answer,) = client.take([self._number])
        samples, self._requested = self._requested, None
        assert samples is not None
        fields = {"log_probs": torch.from_numpy(answer.log_probs)}
        scored = SampleBatch(samples.ids, samples.lengths, fields, {"log_probs": FieldSpec("next_token")})
        return [scored.select_ids(ids)["log_probs"] for ids in self._rank_ids]


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        reason = cause(error) if isinstance(error, OSError) and error.errno else str(error)
        raise CheckpointError(f"{source} cannot be copied to {target}: {reason}") from None
