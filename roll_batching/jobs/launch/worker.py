"""Runs one rank of a job; a failure is reported and ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.failures import describe_failure, record_completion, record_failure
from roll_batching.jobs.launch.logs import keep_log, log_notice, write_to_log
from roll_batching.jobs.launch.rendezvous import RankInfo, rank_info
from roll_batching.jobs.processes.role_workers import StartRoleWorkers, start_local_workers
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.lifetime import end_with_parent, forks_die_with_us

Prepare = Callable[[JobConfig, RankInfo, Any], JobConfig]
"""Completes a job's settings, given this rank and the rendezvous store, the same on all ranks; a collective call."""


def run_worker(
    config: JobConfig, job: Callable[[JobConfig], None] | None = None, prepare: Prepare | None = None
) -> None:
    """Runs `job` (default: the RL, SFT or DPO job of `config`) as the rank that the environment names.

    A failure ends the process with exit code 1, without unwinding: peers may wait for this rank in a collective, and
    it must not wait for them. An early exit, as by `sys.exit(0)` in a loss, is a failure, too.
    """
    rank = 0
    try:
        info = rank_info()
        assert info is not None, "a worker has a rank"
        rank = info.rank
        if info.is_supervised:
            end_with_parent(info.launcher or os.getppid())
        run_rank(config, info, job, prepare=prepare)
    except BaseException as error:
        _exit(rank, error, config)
    record_completion(rank)


def run_rank(
    config: JobConfig,
    info: RankInfo,
    job: Callable[[JobConfig], None] | None = None,
    start_workers: StartRoleWorkers = start_local_workers,
    prepare: Prepare | None = None,
) -> None:
    """Runs one rank's part of the job; raises the error that it fails with.

    Processes that this one forks end with it, and a signal ends it at once, without a message: the sender reports it.

    Args:
        config: the job's.
        info: this process's rank.
        job: called in place of the job that `config` describes.
        start_workers: starts the processes of roles on separate devices.
        prepare: called for the job that `config` describes, once all ranks have joined.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    forks_die_with_us()
    if job is None:
        keep_log(config.run_folder, info, resumes=bool(config.resume_from_checkpoint))
        hide_known_warnings()  # before the first import of Megatron
        from roll_batching.jobs.job import run_job
        from roll_batching.jobs.launch.rendezvous import wait_for_ranks

        store = wait_for_ranks(info, config.actor_train.backend_timeout)
        if prepare is not None:
            config = prepare(config, info, store)
        job = partial(run_job, start_workers=start_workers)
    job(config)
    if "torch" in sys.modules:
        from roll_batching.distributed.parallel_layout import leave_processes

        leave_processes()


def _exit(rank: int, error: BaseException, config: JobConfig) -> NoReturn:
    """Reports `error` to the launcher, or prints it without one, and ends the process."""
    failure = describe_failure(rank, error)
    # Under torchrun every rank prints its own failure, and rank 0 prints one that all ranks share.
    if not record_failure(failure) and (not failure.agreed or rank == 0):
        print(failure.frames + log_notice(config.run_folder, rank) + failure.line, file=sys.stderr)
    else:
        write_to_log(failure.frames + failure.line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
