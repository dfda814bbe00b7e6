"""One worker process of a role: it loads weights and answers requests of a `RoleClient`.

The first worker receives the messages and passes them to the others. Together the workers always answer the pending
request with the lowest number, with the newest weights.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch.distributed as dist

from roll_batching.errors import RollBatchingError, is_lost_peer
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.roles.client import Answer, Failed, Loaded, Ready, Request, Weights, receive, send
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.registry import describe_error

_IDLE_TIMEOUT = datetime.timedelta(days=365)
"""Workers may wait for as long as training goes on."""


class Worker(Protocol):
    """The model of a role. Methods are collective over its workers."""

    def load(self, weights: Weights) -> None:
        """Loads `weights`."""

    def answer(self, request: Any) -> Answer | None:
        """Answers `request`; returns the answer on the first worker, None on the others, and where it comes later."""


Reply = Callable[[Any], None]
"""Sends a message, from any thread."""


def serve_requests(connection: Connection, make_worker: Callable[[JobConfig, Reply], Worker]) -> None:
    """Makes the worker of the job in the first message, then answers requests until the other end closes.

    `make_worker` joins the process group that the environment names. What it makes may reply to requests later.
    """
    hide_known_warnings()
    lock = threading.Lock()

    def reply(message: Any) -> None:
        with lock:
            send(connection, message)

    try:
        worker = make_worker(JobConfig.model_validate(receive(connection)), reply)
        is_first = dist.get_rank() == 0
        tasks = _Tasks(connection if is_first else None)
        if is_first:
            reply(Ready())
        while True:
            weights, request = tasks.next()
            if weights is not None:
                worker.load(weights)
                if is_first:
                    reply(Loaded(version=weights.version))
            if request is not None and (answer := worker.answer(request)) is not None:
                reply(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # training has ended
    except RollBatchingError as error:
        reply(failure_of(error))
    except Exception as error:
        reply(failure_of(error))
        raise


def failure_of(error: Exception) -> Failed:
    """The last message of a worker that ends with `error`."""
    is_ours = isinstance(error, RollBatchingError)
    message = f"{type(error).__name__}: {error}" if is_ours else describe_error(error)
    return Failed(message=message, aftermath=is_lost_peer(error))


class _Tasks:
    """Gives all workers the same next task. The first worker, which has the `connection`, broadcasts it."""

    def __init__(self, connection: Connection | None) -> None:
        self._inbox = None if connection is None else _Inbox(connection)
        self._group: Any = None
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)

    def next(self) -> tuple[Weights | None, Request | None]:
        """Waits for new weights, a request, or both. Raises EOFError once the connection is closed."""
        task: list[Any] = [None if self._inbox is None else self._inbox.next()]
        if self._group is not None:
            dist.broadcast_object_list(task, src=0, group=self._group)
        if task[0] is None:
            raise EOFError
        return task[0]  # type: ignore[no-any-return]


class _Inbox:
    """Reads messages in a thread, so that the sender never waits for a worker that computes."""

    def __init__(self, connection: Connection) -> None:
        self._requests: dict[int, Request] = {}
        self._weights: Weights | None = None
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(connection,), name="inbox", daemon=True).start()

    def next(self) -> tuple[Weights | None, Request | None] | None:
        """Waits for new weights, a request, or both; None once the connection is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._weights is not None or self._requests or self._closed)
            if self._closed:
                return None
            weights, self._weights = self._weights, None
            number = min(self._requests, default=None)
            return weights, None if number is None else self._requests.pop(number)

    def _read(self, connection: Connection) -> None:
        try:
            while True:
                message = receive(connection)
                with self._changed:
                    if isinstance(message, Weights):
                        self._weights = message
                    else:
                        self._requests[message.number] = message
                    self._changed.notify()
        except (EOFError, OSError):
            with self._changed:
                self._closed = True
                self._changed.notify()
