"""Runs a job on Ray, again from the last checkpoint after ranks were lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.failures import Failure, report_failure
from roll_batching.jobs.launch.local import caught_signals
from roll_batching.jobs.launch.on_ray.actors import start_actors
from roll_batching.jobs.launch.on_ray.cluster import reserve_devices
from roll_batching.jobs.launch.on_ray.rank import RankProcess
from roll_batching.jobs.launch.on_ray.role_workers import StartRayWorkers
from roll_batching.jobs.processes.rank_variables import RESTARTS
from roll_batching.jobs.run.folder import read_lock
from roll_batching.known_warnings import hide_known_warnings


def run_on_ray(config: JobConfig, count: int, variables: Mapping[str, str], *, max_restarts: int) -> str | None:
    """Runs `config` on `count` ranks of the Ray that this process has joined; None, or the error that ended it.

    A lost rank, with its process or its machine, ends all others; they restart up to `max_restarts` times from the last
    checkpoint of this run. An error that a rank reports would recur, and ends the job. The caller holds the lock of the
    run's folder.
    """
    folder, restarts = config.run_folder, 0
    shared = read_lock(folder) if max_restarts else None
    earlier = _latest_checkpoint(folder) if max_restarts else None
    with caught_signals() as caught:
        while True:
            failure = _attempt(config, count, {**variables, RESTARTS: str(restarts)}, caught, shared)
            if caught:
                return f"stopped by {caught[0].name}; all ranks were ended"
            if failure is None:
                return None
            if not (failure.lost or failure.aftermath) or restarts == max_restarts:
                return report_failure(failure, folder)
            restarts += 1
            latest, start = _latest_checkpoint(folder), "where it started"
            if latest is not None and latest != earlier:  # else it is an earlier run's
                config, start = config.model_copy(update={"resume_from_checkpoint": True}), f"from {latest[0]}"
            print(f"{failure.line}\nrestart {restarts} of {max_restarts}, {start}", file=sys.stderr, flush=True)


def _attempt(
    config: JobConfig,
    count: int,
    variables: Mapping[str, str],
    caught: Sequence[object],
    shared: tuple[str, str] | None,
) -> Failure | None:
    """Runs the job once, on `count` ranks; their failure, or None, also when a signal was `caught`.

    No rank is alive afterwards.

    Args:
        job: the job.
        count: ranks.
        variables: added to the ranks' environment, before their interpreters start.
        caught: signals caught so far.
        shared: path and text of a file that rank 0 must be able to read, if the run's folder must be shared.
    """
    minutes = config.actor_train.backend_timeout
    tp_size = {
        name: role.strategy_args.strategy_config.tensor_model_parallel_size for name, role in config.roles.items()
    }
    roles = {name: (len(own), tp_size[name]) for name in config.roles if (own := config.own_devices(name)) is not None}
    with reserve_devices(count, tp_size["actor_train"], minutes, lambda: bool(caught), roles) as reservation:
        if reservation is None:
            return None
        with start_actors(reservation, variables) as ranks:
            environments = ranks.prepare(reservation.ranks, caught)
            if environments and shared is not None and ranks.call("can_read", [shared], caught) == [False]:
                return _folder_not_shared(shared[0], ranks.processes[0])
            start_workers = StartRayWorkers(reservation, variables)
            if environments and ranks.failure is None and not caught:
                ranks.call("run", [(config, own, start_workers) for own in environments], caught)
            return ranks.failure


def _folder_not_shared(file: str, rank_0: RankProcess) -> Failure:
    message = (
        f"--max-restarts needs a run's folder that all machines share: {rank_0.host} ({rank_0.address}), where rank 0 "
        f"runs, does not see {os.path.dirname(file)} as this machine does. Give another output_dir"
    )
    return Failure(rank=0, message=message, nanoseconds=0, agreed=True)


def _latest_checkpoint(folder: Path) -> tuple[Path, int] | None:
    """The last checkpoint in `folder` and the time it was written, in nanoseconds; None when there is none."""
    hide_known_warnings()
    from roll_batching.jobs.run.checkpoint import saved_point

    point = saved_point(folder)
    return None if point is None else (point.path, point.path.stat().st_mtime_ns)
