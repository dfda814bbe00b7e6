"""One rank of a job as a Ray actor, which runs what a worker process runs under torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.environment import rank_info
from roll_batching.jobs.launch.failures import Failure, describe_failure
from roll_batching.jobs.launch.logs import write_to_log
from roll_batching.jobs.processes.role_workers import StartRoleWorkers


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """Machine, process id and GPUs of a rank."""

    address: str
    """Of its machine, as Ray knows it."""
    host: str
    """Name of its machine."""
    pid: int
    devices: tuple[str, ...]
    """The GPUs that Ray gave it, in the format of CUDA_VISIBLE_DEVICES; empty on CPU."""


class Rank:
    """Becomes an actor. Its methods run one at a time on the process's main thread, as signal handlers need it."""

    def __init__(self, number: int, secrets: Mapping[str, str]) -> None:
        """`secrets`: variables that must not be in the actor's runtime environment, which Ray shows."""
        os.environ.update(secrets)
        self.number = number
        self._store: Any = None

    def __repr__(self) -> str:
        return f"rank {self.number}"  # Ray's prefix of each line of output

    def enter_folder(self, folder: str) -> RankProcess | Failure:
        """Changes to the command's working directory, so that relative paths agree. A Failure when it cannot."""
        import ray

        try:
            os.chdir(folder)
        except OSError as error:
            where = f"machine {socket.gethostname()}, where rank {self.number} is to run, cannot enter {folder}"
            cure = "Start the command in a folder that all machines share, or with `ray job submit --working-dir`"
            return Failure(rank=self.number, message=f"{where}: {error.strerror}. {cure}", nanoseconds=0, agreed=True)
        return RankProcess(
            address=ray.util.get_node_ip_address(),
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=tuple(str(device) for device in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())),
        )

    def open_store(self) -> int:
        """Opens the rendezvous store in this process, which keeps the port taken; returns the port."""
        from torch.distributed import TCPStore

        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def can_read(self, file: str, text: str) -> bool:
        """Whether `file` begins with `text` on this machine; ranks append lines of their own."""
        path = Path(file)
        return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(text)

    def run(self, config: JobConfig, variables: Mapping[str, str], start_workers: StartRoleWorkers) -> Failure | None:
        """Runs this rank's part of the job; a Failure when it failed. `start_workers` as for `run_rank`."""
        from roll_batching.jobs.launch.worker import run_rank

        os.environ.update(variables)
        try:
            info = rank_info()
            assert info is not None, "the variables name a rank"
            run_rank(config, info, start_workers=start_workers)
        except BaseException as error:  # also SystemExit: every failure must reach the driver
            failure = describe_failure(self.number, error)
            write_to_log(failure.frames + failure.line)
            return failure
        return None
