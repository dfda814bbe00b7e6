"""Accepts authenticated connections from workers on other machines, within a time limit per handshake."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_POLL_SECONDS = 0.2
_HANDSHAKE_SECONDS = 20.0
"""Limit for a client to prove the key and send its rank."""
_BACKLOG = 128


class WorkerListener:
    """Listens for `multiprocessing.connection.Client`s that have `key` and then send their rank.

    Each handshake has a thread, so that a silent client does not delay the others.
    """

    def __init__(self, handshake_seconds: float = _HANDSHAKE_SECONDS) -> None:
        self.key = secrets.token_bytes(32)
        self._seconds = handshake_seconds
        self._socket = socket.create_server(("", 0), backlog=_BACKLOG)
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
        """Rank and connection of the next authenticated worker; None when there is none within `seconds`."""
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
