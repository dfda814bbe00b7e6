"""What each rank says, also in a file of its own: `logs/rank_0003.log` in the run's folder."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from roll_batching.files import cause
from roll_batching.jobs.launch.environment import RankPlace

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""torch's word for: how often the ranks were started anew."""
_HEADING = "==== rank"
"""First words of the heading above each attempt."""
_LAST_BYTES = 2**16
"""The tail of a log that is searched for output of the last attempt."""
_kept: list[TextIO] = []
"""What is written to until the process ends: its log first."""


def log_of(folder: Path, rank: int) -> Path:
    """The log of `rank` in the run's folder `folder`."""
    return folder / "logs" / f"rank_{rank:04d}.log"


def keep_log(folder: Path, place: RankPlace, *, resumes: bool = False) -> None:
    """From now on what this process says goes into the rank's log in `folder` too, after a line that tells the attempt.

    Of rank 0 that is what Python prints; it stays on the terminal, progress included. Of the other ranks it is all:
    what libraries such as NCCL, and processes that a rank starts, write by themselves is then in the file alone.
    Native crashes leave the Python stack there. A log that cannot be written is said, and done without.
    """
    file = log_of(folder, place.rank)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        log = open(file, "a", buffering=1, encoding="utf-8", errors="replace")
        log.write("\n" if log.tell() else "")  # the last attempt may have ended within a line
        log.write(_first_line(place, resumes))
    except OSError as error:
        print(f"notice: rank {place.rank} keeps no log in {file}: {cause(error)}", file=sys.stderr, flush=True)
        nowhere = open(os.devnull, "w", encoding="utf-8")
        sys.stdout, sys.stderr = _Both(sys.stdout, nowhere), _Both(sys.stderr, nowhere)  # type: ignore[assignment]
        return
    _kept.append(log)
    if not faulthandler.is_enabled():
        faulthandler.enable(log)
    out, err = sys.stdout, sys.stderr
    if place.rank:
        out, err = _moved(out, log), _moved(err, log)
    sys.stdout, sys.stderr = _Both(out, log), _Both(err, log)  # type: ignore[assignment]


def note(text: str) -> None:
    """Writes `text` into this process's log alone, where it keeps one."""
    if _kept:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=_kept[0], flush=True)


def named(folder: Path, rank: int) -> str:
    """A line that names the log of `rank`; empty where the last attempt wrote nothing to it."""
    file = log_of(folder, rank)
    try:
        with open(file, "rb") as log:
            log.seek(max(0, file.stat().st_size - _LAST_BYTES))
            *_, attempt = re.split(rf"^{_HEADING}.*$", log.read().decode(errors="replace"), flags=re.MULTILINE)
    except OSError:
        return ""
    return f"notice: the log of rank {rank} is {file}\n" if attempt.strip() else ""


def _first_line(place: RankPlace, resumes: bool) -> str:
    attempt = int(os.environ.get(RESTARTS, "0")) + 1
    how = ", from the last checkpoint where there is one" if resumes else ""
    who = f"process {os.getpid()} on {socket.gethostname()}"
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{_HEADING} {place.rank} of {place.world_size}, {when}, attempt {attempt}{how}; {who}\n"


def _moved(stream: TextIO, log: TextIO) -> TextIO:
    """Where `stream` led until now; its file descriptor leads to `log` from now on."""
    stream.flush()
    before = open(os.dup(stream.fileno()), "w", buffering=1, encoding="utf-8", errors="replace")
    _kept.append(before)
    os.dup2(log.fileno(), stream.fileno())
    return before


class _Both:
    """A stream whose text goes into a log as well. One that is closed or full ends nothing: it is done without."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # a full disk ends no training
            self._log.write(text)
        with self._lasting():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._log.flush()
        with self._lasting():
            self._stream.flush()

    @contextlib.contextmanager
    def _lasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with open(os.devnull, "w") as nowhere:  # what is buffered goes there, too, when the process ends
                os.dup2(nowhere.fileno(), self._stream.fileno())
            name = "standard error" if self._stream.fileno() == 2 else "standard output"
            told = f"notice: {name} cannot be written to: {cause(error)}. The run goes on without it\n"
            with contextlib.suppress(OSError, ValueError):
                (sys.stderr if name == "standard output" else self._log).write(told)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
