"""Runs the command line in real processes, and finds all processes that belong to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.jobs.rl.jobs import settings, write_data

ROOT = Path(__file__).parents[3]
_MARK = "ROLL_BATCHING_TEST_JOB"
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def write_job(folder: Path, **changes: Any) -> Path:
    """The tiny job with its data, as a file."""
    write_data(folder)
    file = folder / "job.yaml"
    file.write_text(json.dumps(settings(folder, **changes)))
    return file


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables for a command that works in `folder`, and by which its processes are found."""
    kept = {key: value for key, value in os.environ.items() if key not in _OF_RANKS}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _MARK: str(folder), **more}


@contextlib.contextmanager
def started(folder: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `python ARGUMENTS` in `folder`; kills all its processes after the block."""
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(folder, **variables),
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
    try:
        yield process
    finally:
        for one in processes(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait(timeout=30)


def done(folder: Path, *arguments: str, timeout: float = 150, **variables: str) -> tuple[int, str]:
    """Exit code and output of `python ARGUMENTS`, which must leave no process."""
    with started(folder, *arguments, **variables) as process:
        code = process.wait(timeout=timeout)
        wait_for(lambda: not processes(folder), 5)
    return code, (folder / "said").read_text()


def trained(folder: Path, *overrides: str, ranks: int = 2, **changes: Any) -> tuple[int, str]:
    """Exit code and output of a small job."""
    return done(folder, *train(write_job(folder, **changes), *overrides, ranks=ranks))


def train(job: Path, *overrides: str, ranks: int = 2) -> list[str]:
    """Arguments of python that train `job`."""
    return ["-m", "roll_batching.cli", "train", "--config", str(job), "--nproc", str(ranks), *overrides]


def processes(folder: Path) -> list[psutil.Process]:
    """Living processes of the command in `folder`, in any session."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == str(folder):
                found.append(process)
    return found


def wait_for(happened: Callable[[], Any], seconds: float) -> None:
    """Returns once `happened()` is true; fails after `seconds`."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, f"still waiting after {seconds:g} s"
        time.sleep(0.02)


def kill(process: subprocess.Popen[str]) -> None:
    """Kills as the kernel does when memory runs out."""
    process.send_signal(signal.SIGKILL)
    process.wait()
