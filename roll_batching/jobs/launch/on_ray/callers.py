"""Processes on any machine that call this one: each says the key and its number, within a limit of time."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_TO_GREET = 20.0
"""How long a caller may take to say the key and its number."""
_BACKLOG = 128


class Callers:
    """Listens for callers, each of which is `multiprocessing.connection.Client` with `key`, and sends its number.

    A thread per caller hears it out, so that one who says nothing keeps no other from being heard.
    """

    def __init__(self, seconds_to_greet: float = _SECONDS_TO_GREET) -> None:
        self.key = secrets.token_bytes(32)
        self._seconds = seconds_to_greet
        self._listening = socket.create_server(("", 0), backlog=_BACKLOG)
        self._listening.settimeout(_SECONDS_BETWEEN_LOOKS)
        self.port: int = self._listening.getsockname()[1]
        self._found: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="callers", daemon=True)

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._listening.close()

    def next(self, seconds: float) -> tuple[int, Connection] | None:
        """The number of the next caller, and the connection to it; None where nobody called within `seconds`."""
        try:
            return self._found.get(timeout=seconds)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(OSError):  # nobody, or one that hung up
                caller, _ = self._listening.accept()
                threading.Thread(target=self._greet, args=(caller,), name="caller", daemon=True).start()

    def _greet(self, caller: socket.socket) -> None:
        connection = Connection(os.dup(caller.fileno()))
        # Wakes whoever reads: whatever has come by then, it was not all of it.
        limit = threading.Timer(self._seconds, _hang_up, (caller,))
        limit.daemon = True
        limit.start()
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            number = connection.recv()
        except (AuthenticationError, OSError, EOFError):  # a stranger
            connection.close()
        else:
            self._found.put((number, connection))
        finally:
            limit.cancel()
            caller.close()


def _hang_up(caller: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was served meanwhile
        caller.shutdown(socket.SHUT_RDWR)
