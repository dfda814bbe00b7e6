"""A process of a role's world: `client` starts it and speaks with it.

Its first process hears what is asked, and tells the others. They do the lowest-numbered of what they were asked for,
each with the newest weights there are when it begins.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch.distributed as dist

from roll_batching.errors import RollBatchingError, lost_a_peer
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.roles.messages import Answer, Failed, Loaded, Ready, Request, Weights, receive, send
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.registry import describe_error

_AS_LONG_AS_TRAINING = datetime.timedelta(days=365)


class Worker(Protocol):
    """What a role does, in its world. Methods are collective."""

    def load(self, weights: Weights) -> None:
        """Works with `weights` from now on."""

    def answer(self, request: Any) -> Answer | None:
        """The answer, on the world's first process; None on the others."""


def work(connection: Connection, make: Callable[[JobConfig], Worker]) -> None:
    """Makes the worker of the job that the first message describes, then works until the other end closes.

    `make` joins the processes of the world that the environment names.
    """
    hide_known_warnings()
    try:
        worker = make(JobConfig.model_validate(receive(connection)))
        first = dist.get_rank() == 0
        orders = _Orders(connection if first else None)
        if first:
            send(connection, Ready())
        while True:
            weights, request = orders.next()
            if weights is not None:
                worker.load(weights)
                if first:
                    send(connection, Loaded(version=weights.version))
            if request is not None and (answer := worker.answer(request)) is not None:
                send(connection, answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # training is over
    except RollBatchingError as error:
        send(connection, Failed(words=f"{type(error).__name__}: {error}", aftermath=lost_a_peer(error)))
    except Exception as error:
        send(connection, Failed(words=describe_error(error), aftermath=lost_a_peer(error)))
        raise


class _Orders:
    """What is to be done next, the same on all processes: the first one, which has the `connection`, says it."""

    def __init__(self, connection: Connection | None) -> None:
        self._inbox = None if connection is None else _Inbox(connection)
        self._group: Any = None
        if dist.get_world_size() > 1:  # a group that waits for as long as there is nothing to do
            self._group = dist.new_group(backend="gloo", timeout=_AS_LONG_AS_TRAINING)

    def next(self) -> tuple[Weights | None, Request | None]:
        """Waits for work: weights to take over, the request to answer then. Raises EOFError when no more comes."""
        order: list[Any] = [None if self._inbox is None else self._inbox.next()]
        if self._group is not None:
            dist.broadcast_object_list(order, src=0, group=self._group)
        if order[0] is None:
            raise EOFError
        return order[0]  # type: ignore[no-any-return]


class _Inbox:
    """Reads all the time, so that whoever asks never waits for it to be read."""

    def __init__(self, connection: Connection) -> None:
        self._requests: dict[int, Request] = {}
        self._weights: Weights | None = None
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(connection,), name="inbox", daemon=True).start()

    def next(self) -> tuple[Weights | None, Request | None] | None:
        """Waits for work: weights to take over, the request to answer then. None when no more comes."""
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
