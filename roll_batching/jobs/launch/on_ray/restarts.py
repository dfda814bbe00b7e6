"""A job on Ray from its start to its end: attempts, each from the last checkpoint, while ranks get lost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.failures import told
from roll_batching.jobs.launch.local import caught_signals
from roll_batching.jobs.launch.logs import RESTARTS
from roll_batching.jobs.launch.on_ray.driver import attempt
from roll_batching.jobs.run_folder import folder_of, mark_of
from roll_batching.known_warnings import hide_known_warnings


def run_on_ray(job: JobConfig, count: int, variables: Mapping[str, str], *, max_restarts: int) -> str | None:
    """Runs `job` on `count` ranks of the Ray that this process has joined; None when it is done, else why it is not.

    A rank that is lost, with its process or its machine, ends all others; they start anew up to `max_restarts` times,
    from the last checkpoint that this run has written. An error that a rank could put in words would come again, and
    ends the job. The run's folder is held by the caller.
    """
    folder, restarts = folder_of(job), 0
    shared = mark_of(folder) if max_restarts else None
    before = _latest(folder) if max_restarts else None
    with caught_signals() as caught:
        while True:
            failure = attempt(job, count, {**variables, RESTARTS: str(restarts)}, caught, shared)
            if caught:
                return f"stopped by {caught[0].name}; all ranks were ended"
            if failure is None:
                return None
            if not (failure.lost or failure.aftermath) or restarts == max_restarts:
                return told(failure, folder)
            restarts += 1
            latest, start = _latest(folder), "where it started"
            if latest is not None and latest != before:  # else it is an earlier run's
                job, start = job.model_copy(update={"resume_from_checkpoint": True}), f"from {latest[0]}"
            print(f"{failure.line}\nrestart {restarts} of {max_restarts}, {start}", file=sys.stderr, flush=True)


def _latest(folder: Path) -> tuple[Path, int] | None:
    """The last checkpoint in `folder` and when it was written, in nanoseconds; None where there is none."""
    hide_known_warnings()
    from roll_batching.jobs.run.checkpoint import saved_point

    point = saved_point(folder)
    return None if point is None else (point.path, point.path.stat().st_mtime_ns)
