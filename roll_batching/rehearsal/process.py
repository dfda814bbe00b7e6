"""Rehearsals in processes of their own: what is pretended there stays there."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from roll_batching.errors import RollBatchingError
from roll_batching.rehearsal.task import RankReport, RankTask

PARENT = "ROLL_BATCHING_REHEARSED_BY"
"""Variable by which a process hears for whom it rehearses."""


class RehearsalError(RollBatchingError, RuntimeError):
    """A rehearsed job failed, as it would on the cluster; or what it needs cannot be pretended."""


def run_tasks(tasks: Sequence[RankTask], processes: int | None = None) -> list[RankReport]:
    """The report of each task; as many at a time as there are `processes` (default: cores).

    Raises `RehearsalError` with the words of the first that failed.
    """
    workers = min(len(tasks), processes or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        return list(pool.map(_run, tasks))


def _run(task: RankTask) -> RankReport:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        PARENT: str(os.getpid()),
    }
    command = [sys.executable, "-m", "roll_batching.rehearsal.child"]
    done = subprocess.run(command, input=pickle.dumps(task), capture_output=True, env=environment)
    if done.returncode or not done.stdout:
        words = done.stderr.decode(errors="replace").strip()
        raise RehearsalError(f"the rehearsal of rank {task.rank} {_ended(done.returncode)}:\n{words[-8000:]}")
    kind, value = pickle.loads(done.stdout)
    if kind == "error":
        raise RehearsalError(f"rank {task.rank} of {task.world_size} failed: {value}")
    report: RankReport = value
    return report


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with {code}"
    hint = ", as where the machine has no memory left" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"
