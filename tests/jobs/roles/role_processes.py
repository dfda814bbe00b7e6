"""Processes of roles, found by a variable, and rewards that kill one; quick to import."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil

MARK = "ROLL_BATCHING_OWN_DEVICES_TEST"
"""Variable that marks the processes of a test."""
ROLES = {"sampler": "roll_batching.jobs.roles.sampler", "reference": "roll_batching.jobs.roles.reference"}


def left_of(folder: Path) -> list[psutil.Process]:
    """Living processes that jobs in `folder` have started."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.environ().get(MARK) == str(folder / "runs") and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def is_of_role(process: psutil.Process, role: str) -> bool:
    """Whether it is a worker of the role: its command line imports the role's module."""
    return f"{ROLES[role]} import serve" in " ".join(process.cmdline())


def kills_a_rank(completion: Any, folder: str, role: str, rank: int) -> float:
    """The length as reward; the 15th call kills one worker of the role, once."""
    calls, done = Path(folder) / "calls", Path(folder) / "killed"
    with calls.open("a") as file:
        file.write(".")
    if calls.stat().st_size >= 15:
        with contextlib.suppress(FileExistsError):
            done.touch(exist_ok=False)
            workers = [one for one in left_of(Path(folder)) if is_of_role(one, role)]
            next(one for one in workers if one.environ()["RANK"] == str(rank)).kill()
            time.sleep(3)
    return completion.tokens / 10


def refuses(completion: Any) -> float:
    raise ValueError("no reward today")
