"""Starts, watches and ends the worker processes of a role on separate devices, and connects to them."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

from roll_batching.jobs.processes.child_process import (
    RESTARTS,
    ROLE_DEVICES,
    describe_exit,
    kill_process_groups,
    rank_variables,
    start_child_process,
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
        """Starts and returns the processes, which may still be importing. Raises DataError if they cannot start."""


def start_local_workers(role: str, module: str, count: int, variables: Mapping[str, str]) -> RoleWorkers:
    """Starts a role's workers on this machine, on the devices that the launcher has named for the role."""
    environment = {**os.environ, **variables}
    if ROLE_DEVICES[role] in environment:
        environment |= {"CUDA_VISIBLE_DEVICES": environment[ROLE_DEVICES[role]], **variables}
    return LocalRoleWorkers(module, count, environment)


def local_store() -> Any:
    """Opens a TCPStore on a free port of the loopback interface, for processes on this machine.

    We make the socket, because torch would listen on all interfaces, whatever host it gets, and every client may write.
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
            variables = rank_variables(
                rank, count, local_rank=rank, local_size=count, host="127.0.0.1", port=self._store.port
            )
            process, connection = start_child_process(module, environment=shared | variables)
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


# ---- listener


_POLL_SECONDS = 0.2
_HANDSHAKE_SECONDS = 20.0
"""Limit for a client to prove the key and send its rank."""


class WorkerListener:
    """Listens for `multiprocessing.connection.Client`s that have `key` and then send their rank.

    Each handshake has a thread, so that a silent client does not delay the others.
    """

    def __init__(self, handshake_seconds: float = _HANDSHAKE_SECONDS) -> None:
        self.key = secrets.token_bytes(32)
        self._seconds = handshake_seconds
        self._socket = socket.create_server(("", 0), backlog=128)
        self._socket.settimeout(_POLL_SECONDS)
        self.port: int = self._socket.getsockname()[1]
        self._accepted: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)

    def __enter__(self) -> WorkerListener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close()

    def accept(self, seconds: float) -> tuple[int, Connection] | None:
        """Waits for the next authenticated worker; returns its rank and connection, or None after `seconds`."""
        try:
            return self._accepted.get(timeout=seconds)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(OSError):  # the poll's timeout, or a client that hung up
                client, _ = self._socket.accept()
                threading.Thread(target=self._shake_hands, args=(client,), name="handshake", daemon=True).start()

    def _shake_hands(self, client: socket.socket) -> None:
        """Authenticates a client and reads its rank, for at most the time limit."""
        connection = Connection(os.dup(client.fileno()))
        # A read of `connection` has no timeout: shutting the socket down ends it.
        limit = threading.Timer(self._seconds, _shut_down, (client,))
        limit.daemon = True
        limit.start()
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            rank = connection.recv()  # unpickled only after authentication
        except (AuthenticationError, OSError, EOFError):
            connection.close()
        else:
            self._accepted.put((rank, connection))
        finally:
            limit.cancel()
            client.close()


def _shut_down(client: socket.socket) -> None:
    with contextlib.suppress(OSError):  # its handshake ended meanwhile
        client.shutdown(socket.SHUT_RDWR)
