"""Stand-alone ranks for tests of the launcher: `python -m tests.jobs.launch.workers WHAT FOLDER`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.worker import run_worker
from roll_batching.jobs.processes.child_process import FAILURES

RANK = int(os.environ.get("RANK", 0))


def environment(config: JobConfig) -> None:
    assert "torch" not in sys.modules
    Path(sys.argv[2], f"rank{RANK}").write_text(os.environ["NVTE_FLASH_ATTN"])


def wait(config: JobConfig) -> None:
    Path(sys.argv[2], f"rank{RANK}").write_text(str(os.getpid()))
    time.sleep(60)


def note_time() -> None:
    Path(sys.argv[2], "failing").write_text(str(time.time()))


def error(config: JobConfig) -> None:
    if RANK == 1:
        note_time()
        raise DataError("prompts.jsonl:7: not an object")
    time.sleep(60)


def aftermath(config: JobConfig) -> None:
    if RANK == 1:
        note_time()
    while RANK == 0 and not Path(os.environ[FAILURES], "rank1.json").exists():
        time.sleep(0.05)
    raise RuntimeError("the cause" if RANK == 1 else "connection closed by peer")


def my_loss() -> None:
    sys.exit(0)


def leaves(config: JobConfig) -> None:
    if RANK == 1:
        note_time()
        my_loss()
    time.sleep(60)


def vanishes(config: JobConfig) -> None:
    if RANK == 1:
        note_time()
        os._exit(0)
    time.sleep(60)


def lost(config: JobConfig) -> None:
    """Rank 1 ends while rank 0 waits for it in a collective."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if RANK == 1:
        note_time()
        os._exit(0)
    dist.all_reduce(torch.ones(1))


def leaves_children(config: JobConfig) -> None:
    """Rank 1 is killed and has forked, and started a command in a group of its own."""
    if RANK == 1:
        if os.fork() == 0:
            time.sleep(60)
        subprocess.Popen(["sleep", "60"], process_group=0)
        note_time()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def forks(config: JobConfig) -> None:
    if os.fork() == 0:
        Path(sys.argv[2], f"forked{RANK}").touch()
    time.sleep(60)


def killed(config: JobConfig) -> None:
    if RANK == 1:
        note_time()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


if __name__ == "__main__":
    run_worker(JobConfig(), globals()[sys.argv[1]])
