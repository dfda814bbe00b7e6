"""How a worker's last words reach whoever started it.

Each rank leaves one small file: that it completed the job, or why it failed. The launcher shows one failure, the
cause, and none of the ranks that failed because their peer was gone.
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

from roll_batching.errors import RankError, RollBatchingError, lost_a_peer, waited_in_vain
from roll_batching.jobs.launch.logs import named

FOLDER_VARIABLE = "ROLL_BATCHING_FAILURES"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why one rank failed."""

    rank: int
    message: str
    nanoseconds: int
    """Time of the failure, on the machine's clock."""
    frames: str = ""
    """Where it happened, for errors that no user can cure; else empty."""
    agreed: bool = False
    """All ranks failed with this message, which names the ranks it came from."""
    aftermath: bool = False
    """The rank only lost its connection to another."""
    silent: bool = False
    """The rank ended without a word; `message` is somebody else's."""
    lost: bool = False
    """The rank's process, or its machine, is gone."""

    @property
    def shared(self) -> bool:
        """All ranks say the same, or are about to."""
        return self.agreed and not self.silent

    @property
    def line(self) -> str:
        """The failure in one line (or as many as the message has)."""
        return self.message if self.agreed else f"rank {self.rank} failed: {self.message}"


def describe(rank: int, error: BaseException) -> Failure:
    """What there is to say about `error`, which ended `rank` just now."""
    expected = isinstance(error, (RollBatchingError, SystemExit))
    if isinstance(error, SystemExit):
        message = f"{_place(error)} called sys.exit({error.code!r}) before the job was complete; raise an error instead"
    else:
        message = str(error) if expected else f"{type(error).__name__}: {error}"
    lost = not expected and lost_a_peer(error)
    if "Too many open files" in message:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        message += f". ulimit -n is {limit} here: raise it"
    return Failure(
        rank=rank,
        message=message,
        nanoseconds=time.time_ns(),
        frames="" if expected or lost else "".join(traceback.format_tb(error.__traceback__)),
        agreed=isinstance(error, RankError),
        aftermath=lost or (not expected and waited_in_vain(error)),
    )


def cause(failures: Iterable[Failure]) -> Failure:
    """The earliest failure, those last that were only a lost connection to another rank."""
    return min(failures, key=lambda failure: (failure.aftermath, failure.nanoseconds, failure.rank))


def told(failure: Failure, folder: Path | None = None) -> str:
    """What a launcher says of the failure that ended a job.

    Where in the code it was, and which log in the run's `folder` has more than all ranks say, goes to standard error at
    once.
    """
    words = f"Where rank {failure.rank} failed (most recent call last):\n{failure.frames}" if failure.frames else ""
    if folder is not None and not failure.shared:
        words += named(folder, failure.rank)
    print(words, file=sys.stderr, end="", flush=True)
    return failure.line


def _place(error: SystemExit) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "something"


def record_failure(failure: Failure) -> bool:
    """Writes a rank's failure where the launcher looks; False when no launcher asked for it or it cannot be written."""
    return _record(f"rank{failure.rank}.json", json.dumps(asdict(failure)))


def record_completion(rank: int) -> None:
    """Tells the launcher, where there is one, that this rank has done its part of the job."""
    _record(f"rank{rank}.done", "")


def _record(name: str, text: str) -> bool:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return False
    partial = Path(folder) / f"{name}.part"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.rename(Path(folder) / name)
    except OSError:
        return False
    return True


def completed(folder: str | Path, rank: int) -> bool:
    """Whether `rank` said that it has done its part."""
    return (Path(folder) / f"rank{rank}.done").exists()


def recorded_failures(folder: str | Path) -> dict[int, Failure]:
    """The failures that ranks recorded in `folder`, by rank."""
    found = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in Path(folder).glob("rank*.json")]
    return {failure.rank: failure for failure in found}
