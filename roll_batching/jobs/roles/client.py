"""A role of its own as training sees it: asked ahead of time, told of new weights, started again when it dies.

Nothing is lost and nothing comes twice: what was asked for is asked for again until its answer is here whole, and an
answer that nobody waits for any more is not taken.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.engine_rules import SERVED, uses_engine
from roll_batching.jobs.processes.world import StartWorld, World, start_here
from roll_batching.jobs.roles.messages import Failed, Loaded, Ready, Request, Weights, receive, send

_SECONDS_BEFORE_NOTICE = 30.0
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_LAST_WORDS = 1.0
"""How long after the first of its processes failed the others may say why: it may be the cause."""
_SECONDS_FOR_THE_CAUSE = 20.0
"""How long when all that is known are connections lost to others."""
_SECONDS_TO_START = 300.0
"""What building the model may take at least, however short `rollout_timeout` is."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What tells one such role from another."""

    role: str
    """Its name in the configuration."""
    name: str
    """And in messages."""
    module: str
    """Whose `join` its processes call."""
    asked: str
    """What requests hold."""
    given: str
    """What answers hold."""


SAMPLER = Kind(
    role="actor_infer",
    name="the sampler",
    module="roll_batching.jobs.roles.sampler",
    asked="prompts",
    given="rollouts",
)


class RoleClient:
    """The processes of a role that answer requests. Every method is for one thread of one rank.

    Args:
        config: the job.
        kind: which role.
        start_world: what starts its processes, where it has devices of its own.
        notice_after: seconds of waiting after which, and again after twice as long, a notice says what for.
    """

    def __init__(
        self,
        config: JobConfig,
        kind: Kind,
        start_world: StartWorld = start_here,
        *,
        notice_after: float = _SECONDS_BEFORE_NOTICE,
    ) -> None:
        self.config, self.kind, self.notice_after = config, kind, notice_after
        own = config.own_devices(kind.role)
        self.count = 1 if own is None else len(own)
        """Processes."""
        self._start_world = start_here if own is None else start_world
        self.restarts = 0
        """How often they were started again so far."""
        self.world: World | None = None
        self._asked: dict[int, Request] = {}
        self._weights: list[Weights] = []
        self._answers: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._heard = time.monotonic()
        self._started = False
        self._failed: dict[int, Failed] = {}
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def limit(self) -> float:
        """Seconds that it may be silent while it is waited for."""
        limit = self.config.rollout_timeout
        return limit if self._started else max(limit, _SECONDS_TO_START)

    def start(self) -> None:
        """Starts the processes. They build their model while this one goes on."""
        needs_none = self.kind is SAMPLER and self._asks_servers
        variables = {"CUDA_VISIBLE_DEVICES": ""} if needs_none else {}
        world = self.world = self._start_world(self.kind.role, self.kind.module, self.count, variables)
        self._heard, self._started, self._outbox = time.monotonic(), False, queue.SimpleQueue()
        with self._changed:
            self._failed = {}
        name = self.kind.name.removeprefix("the ")
        first, self._threads = world.connections[0], []
        for rank in range(self.count):
            reader = threading.Thread(target=self._read, args=(world, rank), name=f"{name} {rank}", daemon=True)
            self._threads.append(reader)
        self._threads.append(
            threading.Thread(target=_write, args=(first, self._outbox), name=f"to {name}", daemon=True)
        )
        for thread in self._threads:
            thread.start()
        self._outbox.put(self.config.to_dict())

    @property
    def ready(self) -> int:
        """Samples of answers that wait to be taken."""
        with self._changed:
            return sum(answer.size for answer in self._answers.values())

    def publish(self, weights: Weights) -> None:
        """From its next request on it works with `weights`. Folders that are read no more are removed."""
        with self._changed:
            self._weights.append(weights)
        self._outbox.put(weights)

    def ask(self, request: Request) -> None:
        """Wants an answer to `request`."""
        with self._changed:
            self._asked[request.number] = request
        self._outbox.put(request)

    def take(self, numbers: Sequence[int]) -> list[Any]:
        """The answers to these requests, waited for.

        When one of its processes has died, or it was not heard of for `rollout_timeout` seconds, all are started again
        as often as `sampler_restarts` says. Raises DataError when they may not be, and with what they say themselves
        when they fail.
        """
        began, patience = time.monotonic(), self.notice_after
        self._heard = max(self._heard, began)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has(numbers), timeout=_SECONDS_BETWEEN_LOOKS)
                if self._has(numbers) and not self._failed:
                    return [self._answers.pop(number) for number in numbers]
                silent = time.monotonic() - self._heard
            if (cause := self._death()) is not None:
                self._again(cause)
            elif silent > self.limit:
                what = f"for rollout_timeout={self.limit:g}" if self._started else f"since its start, {self.limit:g}"
                self._again(f"{self.kind.name} was not heard of {what} seconds")
            elif time.monotonic() - began > patience:
                self._say(f"rank 0 waits for {self.kind.given} since {time.monotonic() - began:.0f} s")
                patience *= 2

    def close(self) -> None:
        """Ends the processes and what they have started. Safe to call twice."""
        if self.world is None:
            return
        self.world.end()
        self._outbox.put(None)
        for thread in self._threads:  # the other ends of the connections are closed: nothing keeps them
            thread.join(_SECONDS_FOR_LAST_WORDS)
        for connection in self.world.connections:
            connection.close()
        self.world = None

    @property
    def _asks_servers(self) -> bool:
        return uses_engine(self.config) and self.config.actor_infer.strategy_args.strategy_name in SERVED

    def _has(self, numbers: Sequence[int]) -> bool:
        return bool(self._failed) or all(number in self._answers for number in numbers)

    def _death(self) -> str | None:
        """Why the processes must be started again, if they must. Raises DataError for a failure that would come again.

        The first that ends, or says why it will, may take others with it before it is looked at: all may speak.
        """
        assert self.world is not None
        if not self._failed and not self.world.ended():
            return None
        began = time.monotonic()
        while True:
            ended, waited = self.world.ended(), time.monotonic() - began
            with self._changed:
                failed = dict(self._failed)
            causes = [message.words for message in failed.values() if not message.aftermath]
            silent = [rank for rank in sorted(ended) if rank not in failed]
            limit = _SECONDS_FOR_LAST_WORDS if causes or silent else _SECONDS_FOR_THE_CAUSE
            if waited > limit or len(ended) == self.count:
                break
            time.sleep(_SECONDS_BETWEEN_LOOKS / 10)
        if causes or not silent:
            words = causes or [message.words for message in failed.values()]
            raise DataError(f"{self.kind.name} ended: {words[0]}")
        which = f": rank {silent[0]} of its {self.count}" if self.count > 1 else ""
        return f"{self.kind.name} ended{which} {ended[silent[0]]}; its output is above"

    def _again(self, cause: str) -> None:
        """Starts it anew after `cause`, with the latest weights and what is still wanted, or raises DataError."""
        if self.restarts == self.config.sampler_restarts:
            often = "" if not self.restarts else f", after {self.restarts} restarts"
            raise DataError(
                f"{cause}{often}: no {self.kind.given} come any more. sampler_restarts says how often it is started "
                "again, rollout_timeout how long it may be silent; go on from a checkpoint with resume_from_checkpoint"
            )
        self.close()
        self.restarts += 1
        with self._changed:
            wanted, latest = [self._asked[number] for number in sorted(self._asked)], self._weights[-1:]
        self._say(
            f"{cause}. It is started again ({self.restarts} of {self.config.sampler_restarts}), and asked again for "
            f"{sum(request.size for request in wanted)} {self.kind.asked}"
        )
        self.start()
        for message in (*latest, *wanted):
            self._outbox.put(message)

    def _read(self, world: World, rank: int) -> None:
        """In a thread of its own: what a process says, until it says no more."""
        with contextlib.suppress(EOFError, OSError):
            if rank:  # the first one hears more, from `_write`
                send(world.connections[rank], self.config.to_dict())
            while True:
                message = receive(world.connections[rank])
                with self._changed:
                    if world is not self.world:
                        return
                    self._heard, self._started = time.monotonic(), True
                    self._take_in(rank, message)
                    self._changed.notify()

    def _take_in(self, rank: int, message: Any) -> None:
        if isinstance(message, Failed):
            self._failed.setdefault(rank, message)
        elif isinstance(message, Loaded):
            while self._weights and self._weights[0].version < message.version:
                shutil.rmtree(self._weights.pop(0).path, ignore_errors=True)
        elif not isinstance(message, Ready) and self._asked.pop(message.number, None) is not None:
            self._answers[message.number] = message

    def _say(self, words: str) -> None:
        print(f"notice: {words}", file=sys.stderr, flush=True)


def _write(connection: Connection, outbox: queue.SimpleQueue[object]) -> None:
    """In a thread of its own: says what is put into `outbox`, until None. Whoever asks never waits for it to be read.

    A process that has died is found when its answers are waited for.
    """
    with contextlib.suppress(OSError):
        while (message := outbox.get()) is not None:
            send(connection, message)
