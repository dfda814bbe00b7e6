"""Starts the ranks of a job on this machine, and ends all of them when one fails.

It replaces torchrun, which counts a rank that exits early with 0 as complete, reports every failed rank, and leaves
ranks running when it is killed.
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

from roll_batching.jobs.launch.failures import Failure, has_completed, read_failures, report_failure, root_cause
from roll_batching.jobs.processes.child_process import (
    FAILURES,
    LAUNCHER,
    RESTARTS,
    describe_exit,
    kill_sessions,
    rank_variables,
)
from roll_batching.jobs.processes.role_workers import local_store
from roll_batching.jobs.run.checkpoint_names import advise_resuming

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 1.0
"""After the first failure, other ranks may still record theirs: one of them may be the cause."""


def launch(
    module: str, arguments: Sequence[str], count: int, variables: Mapping[str, str], folder: Path | None = None
) -> str | None:
    """Runs `python -m module arguments...` as `count` ranks and waits for them.

    Returns None when every rank has completed the job, else one error message. A failure of one rank ends the others
    within seconds, with all processes that they started.

    Args:
        module: run with `arguments` in every process.
        arguments: of the command line.
        count: ranks.
        variables: added to the ranks' environment.
        folder: of the run, with the ranks' logs.
    """
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="roll-batching-") as failures, caught_signals() as caught:
        store = local_store()  # held by this process, so that no other can take the port
        try:
            for rank in range(count):
                identity = rank_variables(
                    rank, count, local_rank=rank, local_size=count, host="127.0.0.1", port=store.port
                )
                identity |= {RESTARTS: "0", LAUNCHER: str(os.getpid()), FAILURES: failures}
                environment = {**os.environ, **_threads(count), **variables, **identity}
                ranks.append(_Rank(rank, failures, _start(module, arguments, environment)))
            _wait(ranks, caught)
        finally:
            kill_sessions([rank_process.process for rank_process in ranks])
        if caught:
            advice = "" if folder is None else f". {advise_resuming(folder)}"
            return f"stopped by {caught[0].name}; all ranks were ended{advice}"
        if all(rank_process.completed for rank_process in ranks):
            return None
        silent = {rank_process.number: rank_process.silent_failure for rank_process in ranks if rank_process.failed}
        failure = root_cause({**silent, **read_failures(failures)}.values())  # a recorded error precedes a silent end
    return report_failure(failure, folder)


def _threads(count: int) -> dict[str, str]:
    """OMP_NUM_THREADS that divides the CPUs among `count` ranks, unless the variable is set."""
    threads = max(1, (os.cpu_count() or 1) // count)
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}


def _start(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", module, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches the launcher alone, and the rank's children are found by session
    )


@dataclass
class _Rank:
    """A rank's process, and how it ended."""

    number: int
    folder: str
    process: subprocess.Popen[bytes]
    code: int | None = None
    """Exit code; None while it runs, and when the launcher killed it."""
    nanoseconds: int = field(default=0)
    """Time at which the exit was noticed."""

    def poll(self) -> None:
        """Notes the exit code once the process has ended."""
        if self.code is None and (code := self.process.poll()) is not None:
            self.code, self.nanoseconds = code, time.time_ns()

    @property
    def completed(self) -> bool:
        """Whether the rank completed the job."""
        return self.code == 0 and has_completed(self.folder, self.number)

    @property
    def failed(self) -> bool:
        """Whether the rank ended before it completed the job, other than by the launcher."""
        return self.code is not None and not self.completed

    @property
    def silent_failure(self) -> Failure:
        """The failure of a rank that recorded none."""
        assert self.code is not None
        exited = describe_exit(self.code)
        end = f"was ended {exited}" if self.code < 0 else f"ended {exited} before the job was complete,"
        message = f"rank {self.number} {end} without a message; its output is above"
        return Failure(rank=self.number, message=message, nanoseconds=self.nanoseconds, agreed=True, silent=True)


def _wait(ranks: Sequence[_Rank], caught: Sequence[signal.Signals]) -> None:
    """Returns when all ranks have ended, soon after one has failed, or after a signal."""
    deadline: float | None = None
    while not caught:
        for rank in ranks:
            rank.poll()
        if all(rank.code is not None for rank in ranks):
            return
        if deadline is None and any(rank.failed for rank in ranks):
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[signal.Signals]]:
    """Yields a list that collects SIGINT, SIGTERM and SIGHUP. Ignored signals stay ignored, as under nohup."""
    caught: list[signal.Signals] = []
    handlers = {caught_signal: signal.getsignal(caught_signal) for caught_signal in _SIGNALS}
    for caught_signal, handler in handlers.items():
        if handler is not signal.SIG_IGN:
            signal.signal(caught_signal, lambda received, _: caught.append(signal.Signals(received)))
    try:
        yield caught
    finally:
        for caught_signal, handler in handlers.items():
            signal.signal(caught_signal, handler)
