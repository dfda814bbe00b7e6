"""The processes of a role that has a world of its own: started together, watched, ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from roll_batching.jobs.processes.child_process import how_it_ended, start_child

DEVICES = {"actor_infer": "ROLL_BATCHING_SAMPLER_DEVICES", "reference": "ROLL_BATCHING_REFERENCE_DEVICES"}
"""By role: the variable by which rank 0 hears which devices are the role's, as CUDA_VISIBLE_DEVICES has them."""
_BACKLOG = 1024
"""Processes that may connect at once, as torch has it."""
_LAUNCHED = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLL_BATCHING_FAILURES", "ROLL_BATCHING_LAUNCHER")
"""Variables that say which rank of the job a process is: these are none."""


class World(Protocol):
    """Processes that hold one model between them. None outlives the process that started them."""

    @property
    def connections(self) -> Sequence[Connection]:
        """To each process, by rank."""

    def ended(self) -> Mapping[int, str]:
        """How those ended that have, by rank."""

    def end(self) -> None:
        """Ends all of them. Connections stay open, and say nothing more."""


class StartWorld(Protocol):
    """Starts the `count` processes of a `role`, each of which calls `join` of `module` with a connection to this one.

    They know their ranks as torchrun would tell them; `variables` change their environment.
    """

    def __call__(self, role: str, module: str, count: int, variables: Mapping[str, str]) -> World:
        """The world, on its way. Raises DataError where it cannot be."""


def start_here(role: str, module: str, count: int, variables: Mapping[str, str]) -> World:
    """On this machine, on the devices that the launcher has named."""
    environment = {**os.environ, **variables}
    if DEVICES[role] in environment:
        environment |= {"CUDA_VISIBLE_DEVICES": environment[DEVICES[role]], **variables}
    return ChildWorld(module, count, environment)


def local_store() -> Any:
    """A store on a free port of the loopback interface, for processes of this machine.

    Left to itself torch listens on all interfaces, whatever address it is given, and whoever connects may write.
    """
    from torch.distributed import TCPStore

    listening = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    port = listening.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


class ChildWorld:
    """New interpreters that run `serve` of `module`. They meet at a store that lives here."""

    def __init__(self, module: str, count: int, environment: Mapping[str, str]) -> None:
        self._store = local_store()
        shared = {name: value for name, value in environment.items() if name not in _LAUNCHED}
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        """To each process, by rank."""
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process, connection = start_child(module, environment=shared | place)
            self._processes.append(process)
            self.connections.append(connection)

    @property
    def pids(self) -> list[int]:
        """Of the processes, by rank."""
        return [process.pid for process in self._processes]

    def ended(self) -> dict[int, str]:
        """How those ended that have, by rank."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: how_it_ended(code) for rank, code in codes.items() if code is not None}

    def end(self) -> None:
        """Ends all processes, with their groups."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
