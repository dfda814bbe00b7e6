"""Worker processes of a role on separate devices: started, watched and ended together."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from roll_batching.jobs.processes.child_process import describe_exit, kill_process_groups, start_child_process
from roll_batching.jobs.processes.rank_variables import (
    RESTARTS,
    ROLE_DEVICES,
    rank_variables,
    without_rank_variables,
)

_BACKLOG = 1024
"""Pending connections of the store's socket, as in torch."""


class RoleWorkers(Protocol):
    """Processes that hold one model together. They end with the process that started them."""

    @property
    def connections(self) -> Sequence[Connection]:
        """A connection to each process, by rank."""

    def exits(self) -> Mapping[int, str]:
        """Exit descriptions of processes, by rank; empty while all run."""

    def kill(self) -> None:
        """Ends all processes. Connections stay open; reading them raises EOFError."""


class StartRoleWorkers(Protocol):
    """Starts `count` processes of `role`; each calls `serve` of `module` with a connection to this process.

    Ranks and rendezvous are in their environments, with torchrun's names; `variables` are added.
    """

    def __call__(self, role: str, module: str, count: int, variables: Mapping[str, str]) -> RoleWorkers:
        """The processes, which may still be importing. Raises DataError when they cannot be started."""


def start_local_workers(role: str, module: str, count: int, variables: Mapping[str, str]) -> RoleWorkers:
    """Starts a role's workers on this machine, on the devices that the launcher has named for the role."""
    environment = {**os.environ, **variables}
    if ROLE_DEVICES[role] in environment:
        environment |= {"CUDA_VISIBLE_DEVICES": environment[ROLE_DEVICES[role]], **variables}
    return LocalRoleWorkers(module, count, environment)


def local_store() -> Any:
    """A TCPStore on a free port of the loopback interface, for the rendezvous of processes on this machine.

    The socket is ours because torch listens on all interfaces, whatever host it gets, and every client may write.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class LocalRoleWorkers:
    """Child processes that run `serve` of `module`. This process holds their rendezvous store."""

    def __init__(self, module: str, count: int, environment: Mapping[str, str]) -> None:
        self._store = local_store()
        shared = without_rank_variables(environment)
        if RESTARTS in environment:  # older torch reads it where the store exists before rank 0
            shared[RESTARTS] = environment[RESTARTS]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        """A connection to each process, by rank."""
        for rank in range(count):
            own = rank_variables(
                rank, count, local_rank=rank, local_size=count, host="127.0.0.1", port=self._store.port
            )
            process, connection = start_child_process(module, environment=shared | own)
            self._processes.append(process)
            self.connections.append(connection)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def exits(self) -> dict[int, str]:
        """Exit descriptions of processes, by rank; empty while all run."""
        codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: describe_exit(code) for rank, code in codes.items() if code is not None}

    def kill(self) -> None:
        """Ends all processes, with their process groups."""
        kill_process_groups(self._processes)
