"""Passes the errors of ranks to the launcher.

Each rank writes one small file: that it completed the job, or its error. The launcher shows one error, the root cause,
and leaves out ranks that failed because another one was gone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from roll_batching.errors import RankError, RollBatchingError, is_collective_timeout, is_lost_peer
from roll_batching.jobs.launch.logs import log_notice
from roll_batching.jobs.processes.child_process import FAILURES
from roll_batching.secret_names import redact_forms


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The error with which one rank failed, or how it ended."""

    rank: int
    message: str
    nanoseconds: int
    """Time of the failure, on the machine's clock."""
    frames: str = ""
    """Traceback of an unexpected error; empty for errors that a user can correct."""
    agreed: bool = False
    """All ranks failed with this message, which itself names the ranks where the error began."""
    aftermath: bool = False
    """The rank only lost its connection to another."""
    silent: bool = False
    """The rank ended without a message; `message` is the launcher's."""
    lost: bool = False
    """The rank's process, or its machine, is gone."""

    @property
    def shared(self) -> bool:
        """Whether all ranks report this failure."""
        return self.agreed and not self.silent

    @property
    def line(self) -> str:
        """The message, with the rank where only that rank failed."""
        return self.message if self.agreed else f"rank {self.rank} failed: {self.message}"


def describe_failure(rank: int, error: BaseException) -> Failure:
    """Makes the failure of `rank` by `error`, at the present time."""
    expected = isinstance(error, (RollBatchingError, SystemExit))
    if isinstance(error, SystemExit):
        message = (
            f"{_origin(error)} called sys.exit({error.code!r}) before the job was complete; raise an error instead"
        )
    else:
        message = str(error) if expected else f"{type(error).__name__}: {error}"
    lost = not expected and is_lost_peer(error)
    if "Too many open files" in message:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        message += f". ulimit -n is {limit} here: raise it"
    return Failure(
        rank=rank,
        message=redact_forms(message),
        nanoseconds=time.time_ns(),
        frames="" if expected or lost else "".join(traceback.format_tb(error.__traceback__)),
        agreed=isinstance(error, RankError),
        aftermath=lost or (not expected and is_collective_timeout(error)),
    )


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure; lost connections to other ranks count last."""
    return min(failures, key=lambda failure: (failure.aftermath, failure.nanoseconds, failure.rank))


def report_failure(failure: Failure, folder: Path | None = None) -> str:
    """The error message of a job that ended by `failure`.

    Prints the traceback, and the rank's log in the run's `folder` where it holds more, to standard error.
    """
    details = f"Where rank {failure.rank} failed (most recent call last):\n{failure.frames}" if failure.frames else ""
    if folder is not None and not failure.shared:
        details += log_notice(folder, failure.rank)
    print(details, file=sys.stderr, end="", flush=True)
    return failure.line


def _origin(error: SystemExit) -> str:
    """The function, file and line that called `sys.exit`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "something"


def record_failure(failure: Failure) -> bool:
    """Writes a rank's failure for the launcher; False without a launcher, or when it cannot be written."""
    return _record(f"rank{failure.rank}.json", json.dumps(asdict(failure)))


def record_completion(rank: int) -> None:
    """Tells the launcher, if there is one, that this rank completed the job."""
    _record(f"rank{rank}.done", "")


def _record(name: str, text: str) -> bool:
    """Writes a file for the launcher; False without a launcher, or when it cannot be written."""
    folder = os.environ.get(FAILURES)
    if not folder:
        return False
    partial = Path(folder) / f"{name}.part"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.rename(Path(folder) / name)  # the launcher must not read half a file
    except OSError:
        return False
    return True


def has_completed(folder: str | Path, rank: int) -> bool:
    """Whether `rank` recorded that it completed the job."""
    return (Path(folder) / f"rank{rank}.done").exists()


def read_failures(folder: str | Path) -> dict[int, Failure]:
    """The failures that ranks recorded in `folder`, by rank."""
    failures = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in Path(folder).glob("rank*.json")]
    return {failure.rank: failure for failure in failures}
