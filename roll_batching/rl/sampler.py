"""The sampler as training sees it: asked for rollouts ahead of time, told of new weights, started again when it dies.

Nothing is lost and nothing comes twice: what was asked for is asked for again until its answer is here whole, and an
answer that nobody waits for any more is not taken.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from roll_batching.config import JobConfig
from roll_batching.config.engine_rules import SERVED, uses_engine
from roll_batching.errors import DataError
from roll_batching.rl.child_process import how_it_ended, start_child
from roll_batching.rl.sampler_child import Answer, Failed, Loaded, Request, Weights, receive, send

DEVICE = "ROLL_BATCHING_SAMPLER_DEVICE"
"""Variable by which rank 0 hears which devices are actor_infer's, as CUDA_VISIBLE_DEVICES has them."""
_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ROLL_BATCHING_FAILURES")
"""Variables that say which rank a process is: the sampler is none."""
_SECONDS_BEFORE_NOTICE = 30.0
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_LAST_WORDS = 5.0
_SECONDS_TO_START = 300.0
"""What building the model may take at least, however short `rollout_timeout` is."""


class Sampler:
    """The process that answers requests. Every method is for one thread of one rank.

    Args:
        config: the job.
        notice_after: seconds of waiting after which, and again after twice as long, a notice says what for.
    """

    def __init__(self, config: JobConfig, *, notice_after: float = _SECONDS_BEFORE_NOTICE) -> None:
        self.config, self.notice_after = config, notice_after
        self.restarts = 0
        """How often it was started again so far."""
        self._asked: dict[int, Request] = {}
        self._weights: list[Weights] = []
        self._answers: dict[int, Answer] = {}
        self._changed = threading.Condition()
        self._heard = time.monotonic()
        self._started = False
        self._failed: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._outbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def limit(self) -> float:
        """Seconds that it may be silent while it is waited for."""
        limit = self.config.rollout_timeout
        return limit if self._started else max(limit, _SECONDS_TO_START)

    def start(self) -> None:
        """Starts the process. It builds its model while this one goes on."""
        environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
        if self.config.actor_infer.strategy_args.strategy_name in SERVED and uses_engine(self.config):
            environment |= {"CUDA_VISIBLE_DEVICES": ""}  # it asks servers, and needs no device
        elif DEVICE in environment:
            environment |= {"CUDA_VISIBLE_DEVICES": environment[DEVICE], "LOCAL_RANK": "0"}
        self._process, self._connection = start_child("roll_batching.rl.sampler_child", environment=environment)
        self._heard, self._started, self._outbox = time.monotonic(), False, queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._read, args=(self._connection,), name="sampler", daemon=True),
            threading.Thread(target=_write, args=(self._connection, self._outbox), name="to sampler", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._outbox.put(self.config.to_dict())

    @property
    def ready(self) -> int:
        """Samples of answers that wait to be taken."""
        with self._changed:
            return sum(len(answer.lengths) for answer in self._answers.values())

    def publish(self, weights: Weights) -> None:
        """From its next request on the sampler draws with `weights`. Folders that are read no more are removed."""
        with self._changed:
            self._weights.append(weights)
        self._outbox.put(weights)

    def ask(self, request: Request) -> None:
        """Wants an answer to `request`."""
        with self._changed:
            self._asked[request.number] = request
        self._outbox.put(request)

    def take(self, numbers: Sequence[int]) -> list[Answer]:
        """The answers to these requests, waited for.

        A sampler that has died, or was not heard of for `rollout_timeout` seconds, is started again as often as
        `sampler_restarts` says. Raises DataError when it may not be, and with what it says itself when it fails.
        """
        began, patience = time.monotonic(), self.notice_after
        self._heard = max(self._heard, began)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has(numbers), timeout=_SECONDS_BETWEEN_LOOKS)
                if self._failed is not None:
                    raise DataError(f"the sampler ended: {self._failed}")
                if self._has(numbers):
                    return [self._answers.pop(number) for number in numbers]
                silent = time.monotonic() - self._heard
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                self._again(f"the sampler ended {how_it_ended(code)}; its output is above")
            elif silent > self.limit:
                what = f"for rollout_timeout={self.limit:g}" if self._started else f"since its start, {self.limit:g}"
                self._again(f"the sampler was not heard of {what} seconds")
            elif time.monotonic() - began > patience:
                self._say(f"rank 0 waits for rollouts since {time.monotonic() - began:.0f} s")
                patience *= 2

    def close(self) -> None:
        """Ends the process and what it has started. Safe to call twice."""
        if self._process is None or self._connection is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._outbox.put(None)
        for thread in self._threads:  # its end of the connection is closed: nothing keeps them
            thread.join(_SECONDS_FOR_LAST_WORDS)
        self._connection.close()
        self._process = self._connection = None

    def _has(self, numbers: Sequence[int]) -> bool:
        return self._failed is not None or all(number in self._answers for number in numbers)

    def _again(self, cause: str) -> None:
        """Starts it anew after `cause`, with the latest weights and what is still wanted, or raises DataError."""
        if self.restarts == self.config.sampler_restarts:
            often = "" if not self.restarts else f", after {self.restarts} restarts"
            raise DataError(
                f"{cause}{often}: no rollouts come any more. sampler_restarts says how often it is started again, "
                "rollout_timeout how long it may be silent; go on from a checkpoint with resume_from_checkpoint"
            )
        self.close()
        self.restarts += 1
        with self._changed:
            wanted, latest = [self._asked[number] for number in sorted(self._asked)], self._weights[-1:]
        self._say(
            f"{cause}. It is started again ({self.restarts} of {self.config.sampler_restarts}), and asked again for "
            f"{sum(len(request.prompts) for request in wanted)} prompts"
        )
        self.start()
        for message in (*latest, *wanted):
            self._outbox.put(message)

    def _read(self, connection: Connection) -> None:
        """In a thread of its own: what the process says, until it says no more."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = receive(connection)
                with self._changed:
                    self._heard, self._started = time.monotonic(), True
                    self._take_in(message)
                    self._changed.notify()

    def _take_in(self, message: object) -> None:
        if isinstance(message, Failed):
            self._failed = message.words
        elif isinstance(message, Loaded):
            while self._weights and self._weights[0].version < message.version:
                shutil.rmtree(self._weights.pop(0).path, ignore_errors=True)
        elif isinstance(message, Answer) and self._asked.pop(message.number, None) is not None:
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
