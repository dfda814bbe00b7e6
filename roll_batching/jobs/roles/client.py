"""Client of a role's workers: sends requests and new weights, and restarts workers that died.

No request is lost or answered twice: after a restart unanswered requests are sent again, and answers to requests that
do not wait for one are dropped.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import SERVED, uses_engine
from roll_batching.jobs.processes.child_process import notify
from roll_batching.jobs.processes.role_workers import RoleWorkers, StartRoleWorkers, start_local_workers


@dataclass(frozen=True, kw_only=True)
class Weights:
    """New weights: a checkpoint's folder, or a model directory."""

    version: int
    """Number of RL steps after which the model had these weights."""
    path: Path
    probe: Any = None
    """The `Probe` that shows whether an engine has them; None for other samplers."""


class Request(Protocol):
    """A request to a role's workers; pickled as plain data."""

    @property
    def number(self) -> int:
        """Unique among the requests to the role."""

    @property
    def size(self) -> int:
        """Number of prompts or samples in the request."""


class Answer(Protocol):
    """The answer to a request."""

    @property
    def number(self) -> int:
        """Number of the request."""

    @property
    def size(self) -> int:
        """Number of samples in the answer."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The worker has built its model and reached everything else that it needs."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Weights of `version` are loaded: folders of earlier ones are no longer read."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The worker ends after an error that would recur after a restart, unless it is an `aftermath`."""

    message: str
    aftermath: bool = False
    """The worker only lost its connection to another worker of the role."""


def send(connection: Connection, message: Any) -> None:
    """Sends one message, as plain pickle: torch's pickling shares memory, which ends with its process."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """Waits for the next message and returns it. Raises EOFError or OSError once the other end is closed."""
    return pickle.loads(connection.recv_bytes())


_MARGIN = 300.0
"""Seconds added to a role's limits for the time between ranks."""


def worker_timeout_minutes(config: JobConfig) -> float:
    """Minutes that a role's workers wait for each other.

    Longer than training waits for them: rank 0 finds a stalled worker first, and restarts the role.
    """
    return max(config.actor_train.backend_timeout, 2 * config.rollout_timeout / 60)


def answer_timeout(config: JobConfig, answers: int = 1) -> float:
    """Seconds that training ranks wait for rank 0, which waits for `answers` answers of a role and its restarts."""
    return (config.sampler_restarts + 1) * (answers * config.rollout_timeout + _MARGIN) + _MARGIN


# ---- client


_SECONDS_BEFORE_NOTICE = 30.0
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 1.0
"""After the first worker failed, others may still report an error: one of them may be the cause."""
_CAUSE_SECONDS = 20.0
"""Grace while only lost connections to other workers are known."""
_START_SECONDS = 300.0
"""Least limit for building the model, however short `rollout_timeout` is."""


@dataclass(frozen=True, kw_only=True)
class RoleKind:
    """Names of a role and of its worker module."""

    role: str
    """Its name in the configuration."""
    name: str
    """Its name in messages."""
    module: str
    """The module whose `serve` its workers run."""
    request_noun: str
    """Content of requests, in messages."""
    answer_noun: str
    """Content of answers, in messages."""


SAMPLER = RoleKind(
    role="actor_infer",
    name="the sampler",
    module="roll_batching.jobs.roles.sampler",
    request_noun="prompts",
    answer_noun="rollouts",
)


FREE_SAMPLER = replace(SAMPLER, module="roll_batching.jobs.roles.free_sampler")
"""The sampler of a job with `in_flight_updates`."""


class RoleClient:
    """Sends requests to a role's workers, which it starts and restarts. To be used by one thread of rank 0.

    Args:
        config: the job.
        kind: the role.
        start_workers: starts the workers of a role on separate devices; others start on this machine.
        notice_after: seconds of waiting before a notice; the next follow after twice as long each.
    """

    def __init__(
        self,
        config: JobConfig,
        kind: RoleKind,
        start_workers: StartRoleWorkers = start_local_workers,
        *,
        notice_after: float = _SECONDS_BEFORE_NOTICE,
    ) -> None:
        self.config, self.kind, self.notice_after = config, kind, notice_after
        devices = config.own_devices(kind.role)
        self.count = 1 if devices is None else len(devices)
        """Number of workers."""
        self._start_workers = start_local_workers if devices is None else start_workers
        self.restarts = 0
        """Restarts so far."""
        self.workers: RoleWorkers | None = None
        self._pending: dict[int, Request] = {}
        self._weights: list[Weights] = []
        self._answers: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._last_message = time.monotonic()
        self._has_started = False
        self._failed: dict[int, Failed] = {}
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def limit(self) -> float:
        """Seconds without a message after which waiting ends in a restart."""
        limit = self.config.rollout_timeout
        return limit if self._has_started else max(limit, _START_SECONDS)

    def start(self) -> None:
        """Starts the workers; returns while they build their model."""
        has_servers = uses_engine(self.config) and self.config.actor_infer.strategy_args.strategy_name in SERVED
        needs_no_device = self.kind.role == SAMPLER.role and has_servers
        variables = {"CUDA_VISIBLE_DEVICES": ""} if needs_no_device else {}
        workers = self.workers = self._start_workers(self.kind.role, self.kind.module, self.count, variables)
        self._last_message, self._has_started, self._outbox = time.monotonic(), False, queue.SimpleQueue()
        with self._changed:
            self._failed = {}
        name = self.kind.name.removeprefix("the ")
        first, self._threads = workers.connections[0], []
        for rank in range(self.count):
            reader = threading.Thread(target=self._read, args=(workers, rank), name=f"{name} {rank}", daemon=True)
            self._threads.append(reader)
        self._threads.append(
            threading.Thread(target=_write, args=(first, self._outbox), name=f"to {name}", daemon=True)
        )
        for thread in self._threads:
            thread.start()
        self._outbox.put(self.config.to_dict())

    @property
    def ready(self) -> int:
        """Samples in answers that `take` has not returned yet."""
        with self._changed:
            return sum(answer.size for answer in self._answers.values())

    def publish(self, weights: Weights) -> None:
        """Sends `weights` for requests that have not started; once loaded, the folders of older ones are removed."""
        with self._changed:
            self._weights.append(weights)
        self._outbox.put(weights)

    def ask(self, request: Request) -> None:
        """Sends `request`, without waiting."""
        with self._changed:
            self._pending[request.number] = request
        self._outbox.put(request)

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """Waits for the answers to these requests, and returns them in this order.

        When a worker has died, or none sent a message for `rollout_timeout` seconds, all are restarted, up to
        `sampler_restarts` times in all. Raises DataError after that, and with a worker's own error.
        """
        self._wait(lambda: all(number in self._answers for number in numbers))
        with self._changed:
            return [self._answers.pop(number) for number in numbers]

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Waits until `is_ready`, which is called while nothing else changes, and restarts workers."""
        began, next_notice = time.monotonic(), self.notice_after
        self._last_message = max(self._last_message, began)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._failed) or is_ready(), timeout=_POLL_SECONDS)
                if is_ready() and not self._failed:
                    return
                silent = time.monotonic() - self._last_message
            if (cause := self._restart_cause()) is not None:
                self._restart(cause)
            elif silent > self.limit:
                seconds = f"{self.limit:g} seconds"
                silence = f"for rollout_timeout={seconds}" if self._has_started else f"for {seconds} since its start"
                self._restart(f"{self.kind.name} sent no message {silence}")
            elif time.monotonic() - began > next_notice:
                notify(f"rank 0 waits for {self.kind.answer_noun} since {time.monotonic() - began:.0f} s")
                next_notice *= 2

    def first(self, count: int) -> list[int]:
        """Waits for the answers to any `count` requests; returns the numbers of those that came first, ascending.

        Restarts workers and raises DataError as `take`, which then returns the answers at once.
        """
        self._wait(lambda: len(self._answers) >= count)
        with self._changed:
            return sorted([*self._answers][:count])

    def close(self) -> None:
        """Ends the workers and their child processes. Safe to call twice."""
        if self.workers is None:
            return
        self.workers.kill()
        self._outbox.put(None)
        for thread in self._threads:  # the other ends are closed, which ends their reads and writes
            thread.join(_GRACE_SECONDS)
        for connection in self.workers.connections:
            connection.close()
        self.workers = None

    def _restart_cause(self) -> str | None:
        """Why the workers must be restarted; None while they run. Raises DataError for an error that would recur.

        The first failure may have ended other workers by now, so all get time to report before the cause is chosen.
        """
        assert self.workers is not None
        if not self._failed and not self.workers.exits():
            return None
        began = time.monotonic()
        while True:
            ended, waited = self.workers.exits(), time.monotonic() - began
            with self._changed:
                failed = dict(self._failed)
            causes = [message.message for message in failed.values() if not message.aftermath]
            silent = [rank for rank in sorted(ended) if rank not in failed]
            limit = _GRACE_SECONDS if causes or silent else _CAUSE_SECONDS
            if waited > limit or len(ended) == self.count:
                break
            time.sleep(_POLL_SECONDS / 10)
        if causes or not silent:
            messages = causes or [message.message for message in failed.values()]
            raise DataError(f"{self.kind.name} ended: {messages[0]}")
        which = f": rank {silent[0]} of its {self.count}" if self.count > 1 else ""
        return f"{self.kind.name} ended{which} {ended[silent[0]]}; its output is above"

    def _restart(self, cause: str) -> None:
        """Restarts the workers with the latest weights and pending requests. Raises DataError after too many."""
        if self.restarts == self.config.sampler_restarts:
            often = "" if not self.restarts else f", after {self.restarts} restarts"
            raise DataError(
                f"{cause}{often}: there will be no more {self.kind.answer_noun}. Raise sampler_restarts "
                "(restarts in all) or rollout_timeout (seconds without a message), and resume from a checkpoint with "
                "resume_from_checkpoint"
            )
        self.close()
        self.restarts += 1
        with self._changed:
            requests, latest = [self._pending[number] for number in sorted(self._pending)], self._weights[-1:]
        notify(
            f"{cause}. It is started again ({self.restarts} of {self.config.sampler_restarts}), and asked again for "
            f"{sum(request.size for request in requests)} {self.kind.request_noun}"
        )
        self.start()
        for message in (*latest, *requests):
            self._outbox.put(message)

    def _read(self, workers: RoleWorkers, rank: int) -> None:
        """Thread: handles the messages of one worker until its connection ends."""
        with contextlib.suppress(EOFError, OSError):
            if rank:  # `_write` sends to the first worker
                send(workers.connections[rank], self.config.to_dict())
            while True:
                message = receive(workers.connections[rank])
                with self._changed:
                    if workers is not self.workers:
                        return
                    self._last_message, self._has_started = time.monotonic(), True
                    if isinstance(message, Failed):
                        self._failed.setdefault(rank, message)
                    elif isinstance(message, Loaded):
                        while self._weights and self._weights[0].version < message.version:
                            shutil.rmtree(self._weights.pop(0).path, ignore_errors=True)
                    elif not isinstance(message, Ready) and self._pending.pop(message.number, None) is not None:
                        self._answers[message.number] = message
                    self._changed.notify()


def _write(connection: Connection, outbox: queue.SimpleQueue[object]) -> None:
    """Thread: sends the messages of `outbox`, until None, so that the sender never waits for a busy worker."""
    with contextlib.suppress(OSError):  # `take` finds out that the worker has died
        while (message := outbox.get()) is not None:
            send(connection, message)
