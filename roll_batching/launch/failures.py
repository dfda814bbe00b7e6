"""How a worker's last words reach whoever started it.

Each rank that fails writes one small file; the launcher shows the earliest, so that the cause is the last
thing printed and not one of the ranks that failed because their peer was gone.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "ROLL_BATCHING_FAILURES"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What one rank said when it failed."""

    rank: int
    message: str
    nanoseconds: int
    """Time of the failure, on the machine's clock."""


def record_failure(rank: int, message: str) -> None:
    """Writes this rank's failure where the launcher looks; does nothing when no launcher asked for it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return
    record = {"rank": rank, "message": message, "nanoseconds": time.time_ns()}
    partial = Path(folder) / f"rank{rank}.part"
    partial.write_text(json.dumps(record), encoding="utf-8")
    partial.rename(partial.with_suffix(".json"))


def first_failure(folder: str | Path) -> Failure | None:
    """The earliest failure recorded in `folder`; None when no rank left one."""
    found = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in Path(folder).glob("rank*.json")]
    return min(found, key=lambda failure: (failure.nanoseconds, failure.rank), default=None)
