"""Starts the processes of a job on this machine, one per rank, and ends them all as soon as one fails.

torchrun does as much for jobs on many machines. It takes a rank that leaves with exit code 0 for one that is done,
reports every rank that fails after the first, and lets all of them live on when it is killed: hence this one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from roll_batching.jobs.launch.environment import AGENT_STORE, LAUNCHER
from roll_batching.jobs.launch.failures import FOLDER_VARIABLE, Failure, cause, completed, recorded_failures, told
from roll_batching.jobs.launch.logs import RESTARTS
from roll_batching.jobs.processes.world import local_store
from roll_batching.lifetime import end_session

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_BETWEEN_LOOKS = 0.02
_SECONDS_FOR_LAST_WORDS = 1.0
"""How long after the first failure the other ranks may record theirs: it may be the cause."""


def launch(
    module: str, arguments: Sequence[str], count: int, variables: Mapping[str, str], folder: Path | None = None
) -> str | None:
    """Runs `python -m module arguments...` as `count` ranks and waits for them.

    `variables` are added to the workers' environment, before their interpreters start; `folder` is the run's, where
    ranks may keep logs. Returns None when every
    rank said that it has completed the job, else one message with the cause; the others are ended within seconds,
    with everything that they started.
    """
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="roll-batching-") as words, caught_signals() as caught:
        store = local_store()  # it lives here, on a port that nobody else can take meanwhile
        try:
            for rank in range(count):
                places = _places(rank, count, store.port)
                environment = {**os.environ, **_threads(count), **variables, **places, FOLDER_VARIABLE: words}
                ranks.append(_Rank(rank, words, _start(module, arguments, environment)))
            _wait(ranks, caught)
        finally:
            for one in ranks:
                one.end()
        if caught:
            return f"stopped by {caught[0].name}; all ranks were ended"
        if all(one.done for one in ranks):
            return None
        silent = {one.number: one.silent_failure for one in ranks if one.failed}
        why = cause({**silent, **recorded_failures(words)}.values())
    return told(why, folder)


def _places(rank: int, count: int, port: int) -> dict[str, str]:
    """What tells a process which rank it is, in torchrun's words."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        AGENT_STORE: "True",
        RESTARTS: "0",
        LAUNCHER: str(os.getpid()),
    }


def _threads(count: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // count)
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}


def _start(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", module, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a key pressed here is ours to handle, and its children are found by it
    )


@dataclass
class _Rank:
    """A process of the job, and how it ended."""

    number: int
    folder: str
    process: subprocess.Popen[bytes]
    code: int | None = None
    """How it ended by itself; None while it runs, and when it was ended from here."""
    nanoseconds: int = field(default=0)
    """When that was seen."""

    def look(self) -> None:
        """Notes that the process has ended, if it has."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.code, self.nanoseconds = code, time.time_ns()

    @property
    def done(self) -> bool:
        """It did its part of the job."""
        return self.code == 0 and completed(self.folder, self.number)

    @property
    def failed(self) -> bool:
        """It ended by itself without having done its part."""
        return self.code is not None and not self.done

    def end(self) -> None:
        """Ends the process with everything that it started."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        end_session(self.process.pid)

    @property
    def silent_failure(self) -> Failure:
        """What is known of a rank that ended without a word."""
        assert self.code is not None
        if self.code < 0:
            how = f"was ended by signal {-self.code} ({signal.Signals(-self.code).name})"
        else:
            how = f"ended with exit code {self.code} before the job was complete,"
        message = f"rank {self.number} {how} without a message; its output is above"
        return Failure(rank=self.number, message=message, nanoseconds=self.nanoseconds, agreed=True, silent=True)


def _wait(ranks: Sequence[_Rank], caught: Sequence[signal.Signals]) -> None:
    """Returns when all ranks have ended, soon after one has failed, or when a signal came."""
    until: float | None = None
    while not caught:
        for rank in ranks:
            rank.look()
        if all(rank.code is not None for rank in ranks):
            return
        if until is None and any(rank.failed for rank in ranks):
            until = time.monotonic() + _SECONDS_FOR_LAST_WORDS
        if until is not None and time.monotonic() > until:
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """The list of signals that came and were to stop the job. Those that are ignored stay so, as under nohup."""
    caught: list[signal.Signals] = []
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: caught.append(signal.Signals(received)))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
