"""Writes and finds the log files of ranks: `logs/rank_0003.log` in the run's folder."""

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
from roll_batching.jobs.launch.rendezvous import RankInfo
from roll_batching.jobs.processes.child_process import RESTARTS, notify

_HEADING = "==== rank"
"""Beginning of the heading above each attempt."""
_TAIL_BYTES = 2**16
"""Size of the end of a log that is searched for output of the last attempt."""
_open_files: list[TextIO] = []
"""Files that stay open until the process ends; the log is the first."""


def log_path(folder: Path, rank: int) -> Path:
    """The log file of `rank` in the run's `folder`."""
    return folder / "logs" / f"rank_{rank:04d}.log"


def keep_log(folder: Path, info: RankInfo, *, resumes: bool = False) -> None:
    """Copies this process's output to the rank's log in `folder`, below a heading with the attempt's number.

    The log of rank 0 holds what Python prints, which still goes to the terminal, too. The logs of other ranks hold all
    output, also of libraries such as NCCL and of child processes, which is in the file alone. A native crash writes the
    Python stack there. When the log cannot be written, a notice says so and the run goes on.
    """
    file = log_path(folder, info.rank)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        log = open(file, "a", buffering=1, encoding="utf-8", errors="replace")
        log.write("\n" if log.tell() else "")  # the last attempt may have ended within a line
        log.write(_heading(info, resumes))
    except OSError as error:
        notify(f"rank {info.rank} keeps no log in {file}: {cause(error)}")
        null = open(os.devnull, "w", encoding="utf-8")  # `_Tee` also keeps a full disk from ending the run
        sys.stdout, sys.stderr = _Tee(sys.stdout, null), _Tee(sys.stderr, null)  # type: ignore[assignment]
        return
    _open_files.append(log)
    if not faulthandler.is_enabled():
        faulthandler.enable(log)
    out, err = sys.stdout, sys.stderr
    if info.rank:
        out, err = _redirect(out, log), _redirect(err, log)
    sys.stdout, sys.stderr = _Tee(out, log), _Tee(err, log)  # type: ignore[assignment]


def write_to_log(text: str) -> None:
    """Writes `text` to this process's log, if it has one, and not to the terminal."""
    if _open_files:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=_open_files[0], flush=True)


def log_notice(folder: Path, rank: int) -> str:
    """A line with the path of the log of `rank`; empty when the last attempt wrote nothing to it."""
    file = log_path(folder, rank)
    try:
        with open(file, "rb") as log:
            log.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            *_, attempt = re.split(rf"^{_HEADING}.*$", log.read().decode(errors="replace"), flags=re.MULTILINE)
    except OSError:
        return ""
    return f"notice: the log of rank {rank} is {file}\n" if attempt.strip() else ""


def _heading(info: RankInfo, resumes: bool) -> str:
    attempt = int(os.environ.get(RESTARTS, "0")) + 1
    start = ", from the last checkpoint where there is one" if resumes else ""
    process = f"process {os.getpid()} on {socket.gethostname()}"
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{_HEADING} {info.rank} of {info.world_size}, {now}, attempt {attempt}{start}; {process}\n"


def _redirect(stream: TextIO, log: TextIO) -> TextIO:
    """Points the file descriptor of `stream` to `log`; returns a stream to its former target."""
    stream.flush()
    target = open(os.dup(stream.fileno()), "w", buffering=1, encoding="utf-8", errors="replace")
    _open_files.append(target)
    os.dup2(log.fileno(), stream.fileno())
    return target


class _Tee:
    """A stream whose text also goes to a log. Errors of either, such as a full disk, do not end the run."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._log.write(text)
        with self._survive_errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._log.flush()
        with self._survive_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _survive_errors(self) -> Iterator[None]:
        """Sends further output of the stream to nowhere after an error, and says so once."""
        try:
            yield
        except OSError as error:
            with open(os.devnull, "w") as null:  # also takes what is still buffered when the process ends
                os.dup2(null.fileno(), self._stream.fileno())
            name = "standard error" if self._stream.fileno() == 2 else "standard output"
            notice = f"notice: {name} cannot be written to: {cause(error)}. The run goes on without it\n"
            with contextlib.suppress(OSError, ValueError):
                (sys.stderr if name == "standard output" else self._log).write(notice)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
