"""One rank of a job: runs it, and makes sure that a failure ends the process at once and is heard."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

from roll_batching.config import JobConfig
from roll_batching.errors import RollBatchingError
from roll_batching.launch.failures import record_failure


def run_worker(config: JobConfig, job: Callable[[JobConfig], None] | None = None) -> None:
    """Runs `job` (default: the RL or SFT job that `config` describes) as the rank that the environment names.

    A failure ends the process with exit code 1: nothing is unwound and no peer is waited for, since they may
    wait for this rank in a collective.
    """
    try:
        config.dp_size(int(os.environ["WORLD_SIZE"]))
        run = job if job is not None else _default_job()
        run(config)
    except BaseException as error:
        _end(error)


def _default_job() -> Callable[[JobConfig], None]:
    # Megatron says several times per process that it does without these; on a CPU it always does.
    warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
    from roll_batching.rl.job import run_job

    return run_job


def _end(error: BaseException) -> NoReturn:
    rank = int(os.environ.get("RANK", 0))
    if isinstance(error, SystemExit) and error.code in (None, 0):
        sys.stdout.flush()
        os._exit(0)
    message = str(error) if isinstance(error, RollBatchingError) else f"{type(error).__name__}: {error}"
    record_failure(rank, message)
    if not isinstance(error, RollBatchingError):
        traceback.print_exception(error)
    print(f"rank {rank}: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
