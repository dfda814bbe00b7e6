"""Run rehearsals in separate processes, because fake CUDA and fake process groups cannot be undone.

Run as a program, this module is one such process: it reads a pickled task from stdin and writes the report to stdout.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from roll_batching.errors import RollBatchingError
from roll_batching.lifetime import end_with_parent
from roll_batching.tools.rehearsal.task import RankReport, RankTask

PARENT = "ROLL_BATCHING_REHEARSED_BY"
"""Environment variable with the process id of the parent. The rehearsal ends when the parent ends."""


class RehearsalError(RollBatchingError, RuntimeError):
    """A rehearsed rank failed: as it would on the cluster, or because it needs something that cannot be faked."""


def run_tasks(tasks: Sequence[RankTask], processes: int | None = None) -> list[RankReport]:
    """Reports of `tasks`, with at most `processes` at a time (default: the available cores).

    Raises `RehearsalError` with the output of the first task that failed.
    """
    workers = min(len(tasks), processes or len(os.sched_getaffinity(0)))
    reports: list[RankReport] = []
    with ThreadPoolExecutor(max_workers=max(workers, 1)) as pool:
        _show(0, len(tasks))
        for report in pool.map(_run, tasks):
            reports.append(report)
            _show(len(reports), len(tasks))
    return reports


def _show(done: int, total: int) -> None:
    """On a terminal, a line on standard error that updates and is gone at the end."""
    if sys.stderr.isatty():
        text = f"\rrehearsing ranks: {done} of {total} are done "
        print(text if done < total else f"\r{' ' * len(text)}\r", end="", file=sys.stderr, flush=True)


def _run(task: RankTask) -> RankReport:
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        PARENT: str(os.getpid()),
    }
    command = [sys.executable, "-m", "roll_batching.tools.rehearsal.process"]
    done = subprocess.run(command, input=pickle.dumps(task), capture_output=True, env=environment)
    if done.returncode or not done.stdout:
        output = done.stderr.decode(errors="replace").strip()
        reason = f"exited with code {done.returncode}"
        if done.returncode < 0:
            hint = ", probably because the machine ran out of memory" if done.returncode == -signal.SIGKILL else ""
            reason = f"was killed by {signal.Signals(-done.returncode).name}{hint}"
        raise RehearsalError(f"the rehearsal of rank {task.rank} {reason}:\n{output[-8000:]}")
    kind, value = pickle.loads(done.stdout)
    if kind == "error":
        raise RehearsalError(f"rank {task.rank} of {task.world_size} failed: {value}")
    report: RankReport = value
    return report


# ---- the process of one rehearsal


def _main() -> None:
    end_with_parent(int(os.environ[PARENT]))
    task = pickle.load(sys.stdin.buffer)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # prints of libraries must not mix with the report
    from roll_batching.tools.rehearsal.rank import rehearse_rank

    try:
        result: tuple[str, object] = ("report", rehearse_rank(task))
    except RollBatchingError as error:
        result = ("error", str(error))
    with answer:
        pickle.dump(result, answer)
    os._exit(0)  # no clean-up: destroying fake process groups would wait for ranks that do not exist


if __name__ == "__main__":
    _main()
