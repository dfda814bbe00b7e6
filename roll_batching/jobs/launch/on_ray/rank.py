"""One rank of a job as an actor of Ray: the same work as a process of torchrun's does, in a process of Ray's."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.environment import rank_place
from roll_batching.jobs.launch.failures import Failure, describe
from roll_batching.jobs.launch.logs import note
from roll_batching.jobs.processes.world import StartWorld


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """The process of a rank."""

    address: str
    """Of its machine, as Ray knows it."""
    host: str
    """Name of its machine."""
    pid: int
    devices: tuple[str, ...]
    """The GPUs that Ray gave it, as CUDA_VISIBLE_DEVICES names them; empty on CPU."""


class Rank:
    """To be made an actor. Its methods run one at a time on the process's main thread, as those of a script do."""

    def __init__(self, number: int, secrets: Mapping[str, str]) -> None:
        """`secrets`: variables that must not stand in the actor's runtime environment, which Ray shows."""
        os.environ.update(secrets)
        self.number = number
        self._store: Any = None

    def __repr__(self) -> str:
        return f"rank {self.number}"  # what Ray puts before each line that the process says

    def settle(self, folder: str) -> Whereabouts | Failure:
        """Moves into `folder`, that of the command, so that relative paths mean the same here."""
        import ray

        try:
            os.chdir(folder)
        except OSError as error:
            where = f"machine {socket.gethostname()}, where rank {self.number} is to run, cannot enter {folder}"
            cure = "Start the command in a folder that all machines share, or with `ray job submit --working-dir`"
            return Failure(rank=self.number, message=f"{where}: {error.strerror}. {cure}", nanoseconds=0, agreed=True)
        return Whereabouts(
            address=ray.util.get_node_ip_address(),
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=tuple(str(device) for device in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())),
        )

    def open_store(self) -> int:
        """The ranks are to meet in this process: returns the port, which nobody can take meanwhile."""
        from torch.distributed import TCPStore

        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def sees(self, file: str, text: str) -> bool:
        """Whether `file` begins here with `text`, as it does for the command; ranks add lines of their own."""
        path = Path(file)
        return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(text)

    def run(self, config: JobConfig, variables: Mapping[str, str], start_world: StartWorld) -> Failure | None:
        """Does this rank's part of the job; None when it is done, else why it failed. `start_world` as for `do_job`."""
        from roll_batching.jobs.launch.worker import do_job

        os.environ.update(variables)
        try:
            place = rank_place()
            assert place is not None, "a rank has a place"
            do_job(config, place, start_world=start_world)
        except BaseException as error:  # whatever it was, it must reach the driver
            failure = describe(self.number, error)
            note(failure.frames + failure.line)
            return failure
        return None
