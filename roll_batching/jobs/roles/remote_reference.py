"""The reference on devices of its own, as the ranks that train see it: asked for a step's log-probs, once per step."""

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
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.jobs.processes.world import StartWorld, start_here
from roll_batching.jobs.roles.client import Kind, RoleClient
from roll_batching.jobs.roles.messages import Weights, patience_outside
from roll_batching.jobs.roles.reference import Request
from roll_batching.jobs.run_folder import folder_of
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.strategy import MegatronInferStrategy

WEIGHTS = "reference_weights"
"""Folder, in the run's, of the reference's weights, for as long as the run lasts."""
REFERENCE = Kind(
    role="reference",
    name="the reference",
    module="roll_batching.jobs.roles.reference",
    asked="samples",
    given="log-probs",
)


class RemoteReference:
    """A frozen copy of the model of `strategy`, in processes and a layout of its own.

    Building it, and every method but `close`, is collective; rank 0 speaks with those processes. Raises RankError, the
    same on all ranks, when they fail or may not be started again.
    """

    def __init__(
        self, config: JobConfig, strategy: MegatronInferStrategy, start_world: StartWorld = start_here
    ) -> None:
        self.config, self.strategy = config, strategy
        self.folder = folder_of(config) / WEIGHTS
        self._group, self._is_replica_leader = strategy.layout.host_group, strategy.layout.is_replica_leader
        self._client = RoleClient(config, REFERENCE, start_world) if dist.get_rank() == 0 else None
        self._source: Path | None = None
        self._number = 0
        self._homes: list[torch.Tensor] = []
        """On rank 0: ids of the samples that lie on each rank."""
        self._asked: SampleBatch | None = None
        """On rank 0: the samples of all ranks."""
        self._waited = 0.0
        with consensus(self._group, "starting the reference"):
            if self._client is not None:
                self._client.start()

    def load(self, path: Path) -> None:
        """It is what an earlier run's `write` left at `path`, from `begin` on; else the policy as that finds it."""
        with consensus(self._group, "the reference of a checkpoint"):
            if not path.is_dir():
                raise CheckpointError(f"{path} is not there: the run that wrote the checkpoint had no reference")
        self._source = path

    def begin(self) -> None:
        """RL begins: the reference gets its weights."""
        if self._source is None:
            self.strategy.save(self.folder, optimizer=False)
        with consensus(self._group, "the reference's weights"):
            if self._client is not None:
                if self._source is not None:
                    shutil.rmtree(self.folder, ignore_errors=True)
                    _copy(self._source, self.folder)
                self._client.publish(Weights(version=0, path=self.folder.resolve()))

    def write(self, folder: Path) -> None:
        """Leaves its weights in `folder`, as a strategy's checkpoint."""
        with consensus(self._group, "saving the reference"):
            if self._client is not None:
                _copy(self.folder, folder)

    def ask(self, home: SampleBatch, masks: Sequence[str]) -> None:
        """Wants log-probs of the samples of all ranks, `home` being this rank's, where `masks` say so."""
        mine = home.only(["input_ids", *masks]).to("cpu") if self._is_replica_leader else None
        parts: list[Any] | None = None if self._client is None else [None] * dist.get_world_size()
        dist.gather_object((home.ids, mine), parts, dst=0, group=self._group)
        self._number += 1
        with consensus(self._group, "asking the reference"):
            if self._client is not None and parts is not None:
                self._homes = [ids for ids, _ in parts]
                self._asked = SampleBatch.concat([part for _, part in parts if part is not None])
                self._client.ask(Request(number=self._number, samples=self._asked, masks=tuple(masks)))

    def log_probs(self, home: SampleBatch) -> torch.Tensor:
        """next_token `[tokens]` of `home`: what was asked for, waited for."""
        began = time.perf_counter()
        shares: list[torch.Tensor] | None = None
        with consensus(self._group, "reference log-probs", patience=patience_outside(self.config)):
            if self._client is not None:
                shares = self._shares(self._client)
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, shares, src=0, group=self._group)
        self._waited += time.perf_counter() - began
        return mine[0]  # type: ignore[no-any-return]

    def columns(self) -> Row:
        """A row's figures, on rank 0: seconds of waiting since the last row, restarts so far."""
        row: Row = {"reference_wait_seconds": self._waited}
        self._waited = 0.0
        return row | ({} if self._client is None else {"reference_restarts": self._client.restarts})

    def close(self) -> None:
        """Ends the processes."""
        if self._client is not None:
            self._client.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _shares(self, client: RoleClient) -> list[torch.Tensor]:
        """What each rank asked for."""
        (answer,) = client.take([self._number])
        asked, self._asked = self._asked, None
        assert asked is not None
        fields = {"log_probs": torch.from_numpy(answer.log_probs)}
        found = SampleBatch(asked.ids, asked.lengths, fields, {"log_probs": FieldSpec("next_token")})
        return [found.select_ids(ids)["log_probs"] for ids in self._homes]


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copytree(source, target, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        words = cause(error) if isinstance(error, OSError) and error.errno else str(error)
        raise CheckpointError(f"{source} cannot be copied to {target}: {words}") from None
