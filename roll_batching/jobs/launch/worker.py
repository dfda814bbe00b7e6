"""One rank of a job: runs it, and makes sure that a failure ends the process at once and is heard."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.environment import RankPlace, rank_place
from roll_batching.jobs.launch.failures import describe, record_completion, record_failure
from roll_batching.jobs.launch.logs import keep_log, named, note
from roll_batching.jobs.processes.world import StartWorld, start_here
from roll_batching.jobs.run_folder import folder_of
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.lifetime import end_with_parent, forks_die_with_us


def run_worker(config: JobConfig, job: Callable[[JobConfig], None] | None = None) -> None:
    """Runs `job` (default: the RL or SFT job that `config` describes) as the rank that the environment names.

    A failure ends the process with exit code 1: nothing is unwound and no peer is waited for, since they may
    wait for this rank in a collective. So does whatever tries to leave early, as `sys.exit(0)` in a loss does.
    """
    rank = 0
    try:
        place = rank_place()
        assert place is not None, "a worker has a rank"
        rank = place.rank
        if place.has_keeper:
            end_with_parent(place.launcher or os.getppid())
        do_job(config, place, job)
    except BaseException as error:
        _end(rank, error, config)
    record_completion(rank)


def do_job(
    config: JobConfig,
    place: RankPlace,
    job: Callable[[JobConfig], None] | None = None,
    start_world: StartWorld = start_here,
) -> None:
    """Does the part of `place` in the job: returns when it is done, and raises what it failed with.

    `start_world` starts the processes of roles that have devices of their own.

    What this process forks is bound to it, and a signal ends it at once without a word: who sent it speaks.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    forks_die_with_us()
    if job is None:
        keep_log(folder_of(config), place, resumes=bool(config.resume_from_checkpoint))
        job, _store = partial(_default_job(), start_world=start_world), _met(config, place)
    job(config)
    _leave()


def _met(config: JobConfig, place: RankPlace) -> object:
    from roll_batching.jobs.launch.meeting import meet

    return meet(place, config.actor_train.backend_timeout)


def _default_job() -> Callable[..., None]:
    hide_known_warnings()
    from roll_batching.jobs.job import run_job

    return run_job


def _leave() -> None:
    if "torch" in sys.modules:
        from roll_batching.distributed.parallel_layout import leave_processes

        leave_processes()


def _end(rank: int, error: BaseException, config: JobConfig) -> NoReturn:
    failure = describe(rank, error)
    # Under torchrun every rank speaks for itself; of what all say, one does.
    if not record_failure(failure) and (not failure.agreed or rank == 0):
        print(failure.frames + named(folder_of(config), rank) + failure.line, file=sys.stderr)
    else:
        note(failure.frames + failure.line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
