"""Runs a job on Ray, and restarts it from the last checkpoint after ranks were lost.

Workers of roles on separate devices are actors in the job's placement group. Rank 0 of the job starts them, so that
they end with it, and has a connection to each.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.failures import Failure, report_failure
from roll_batching.jobs.launch.local import caught_signals
from roll_batching.jobs.launch.on_ray.actors import Rank, RankActors, RankProcess, failure_reason, start_actors
from roll_batching.jobs.launch.on_ray.cluster import Reservation, reserve_devices
from roll_batching.jobs.processes.child_process import RESTARTS
from roll_batching.jobs.processes.role_workers import RoleWorkers, WorkerListener, start_local_workers
from roll_batching.jobs.run.checkpoint_names import advise_resuming
from roll_batching.jobs.run.folder import read_lock
from roll_batching.known_warnings import hide_known_warnings

_CONNECT_SECONDS = 120.0
"""Limit for all actors to connect to rank 0 once they run."""
_POLL_SECONDS = 0.2


class RoleRank(Rank):
    """One worker of a role, as an actor."""

    def __repr__(self) -> str:
        return f"role rank {self.number}"  # Ray's prefix of each line of output

    def serve(self, module: str, variables: Mapping[str, str], address: tuple[str, int], key: bytes) -> None:
        """Calls `serve` of `module` with a connection to the `WorkerListener` at `address` that has `key`."""
        os.environ.update(variables)
        connection = Client(address, authkey=key)
        connection.send(self.number)
        importlib.import_module(module).serve(connection)


class RayRoleWorkers:
    """Workers of a role as actors on the devices of `reservation`, which must be the role's."""

    def __init__(self, role: str, module: str, reservation: Reservation, variables: Mapping[str, str]) -> None:
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as on_failure:
            self._actors: RankActors = on_failure.enter_context(start_actors(reservation, variables, RoleRank))
            environments = self._actors.prepare(reservation.ranks, role=role)
            if self._actors.failure is not None:
                raise DataError(f"its processes cannot be started: {self._actors.failure.line}")
            self.connections = self._connect(module, environments)
            self._resources = on_failure.pop_all()

    def _connect(self, module: str, environments: list[dict[str, str]]) -> list[Connection]:
        """Has all actors serve `module`; returns their connections, by rank."""
        import ray

        with WorkerListener() as listener:
            address = (ray.util.get_node_ip_address(), listener.port)
            pairs = zip(self._actors.actors, environments, strict=True)
            self._calls = [
                actor.serve.remote(module, environment, address, listener.key) for actor, environment in pairs
            ]
            connections: dict[int, Connection] = {}
            deadline = time.monotonic() + _CONNECT_SECONDS
            while len(connections) < len(environments):
                if (accepted := listener.accept(_POLL_SECONDS)) is not None:
                    rank, connection = accepted
                    connections[rank] = connection
                missing = sorted({*range(len(environments))} - connections.keys())
                ended = [reason for rank, reason in self.exits().items() if rank in missing]
                if ended or (missing and time.monotonic() > deadline):
                    reason = f"ended {ended[0]}" if ended else f"did not connect within {_CONNECT_SECONDS:g} s"
                    raise DataError(f"rank {missing[0]} of its {len(environments)} processes {reason}")
        return [connections[rank] for rank in range(len(environments))]

    def exits(self) -> dict[int, str]:
        """Exit descriptions of actors, by rank; empty while all run."""
        import ray

        done, _ = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        return {self._calls.index(call): _exit_reason(call) for call in done}

    def kill(self) -> None:
        """Ends all actors."""
        self._resources.close()


class StartRayWorkers:
    """Starts a role's workers as actors where `reservation` has devices for it, else on this machine.

    A `StartRoleWorkers` for the actor of rank 0.
    """

    def __init__(self, reservation: Reservation, variables: Mapping[str, str]) -> None:
        self.reservation, self.variables = reservation, variables

    def __call__(self, role: str, module: str, count: int, variables: Mapping[str, str]) -> RoleWorkers:
        """See `StartRoleWorkers`."""
        if role not in self.reservation.roles:
            return start_local_workers(role, module, count, variables)
        reservation = replace(self.reservation, ranks=self.reservation.roles[role])
        return RayRoleWorkers(role, module, reservation, {**self.variables, **variables})


def _exit_reason(call: Any) -> str:
    """Describes how the process of a finished call ended: "by itself", "with an error: ..."."""
    import ray

    try:
        ray.get(call)
    except ray.exceptions.RayActorError as error:
        return f"with its process: {failure_reason(error)}"
    except ray.exceptions.RayError as error:
        return f"with an error: {error}"
    return "by itself"


# ---- restarts


def run_on_ray(
    config: JobConfig,
    count: int,
    variables: Mapping[str, str],
    *,
    max_restarts: int,
    prepare: Callable[..., JobConfig] | None = None,
) -> str | None:
    """Runs `config` on `count` ranks of the joined Ray; returns the error that ended it, or None.

    A lost rank, with its process or its machine, ends all others; they restart up to `max_restarts` times from the last
    checkpoint of this run. An error that a rank reports would recur, and ends the job. The caller holds the lock of the
    run's folder. `prepare` as for `run_rank`.
    """
    folder, restarts = config.run_folder, 0
    shared = read_lock(folder) if max_restarts else None
    earlier = _latest_checkpoint(folder) if max_restarts else None
    with caught_signals() as caught:
        while True:
            failure = _attempt(config, count, {**variables, RESTARTS: str(restarts)}, caught, shared, prepare)
            if caught:
                return f"stopped by {caught[0].name}; all ranks were ended. {advise_resuming(folder)}"
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
    prepare: Callable[..., JobConfig] | None,
) -> Failure | None:
    """Runs the job once, on `count` ranks, all of which have ended when it returns.

    Returns their failure, or None for success and when a signal was `caught`.

    Args:
        config: the job.
        count: ranks.
        variables: added to the ranks' environment, before their interpreters start.
        caught: signals caught so far.
        shared: path and text of a file that rank 0 must be able to read, if the run's folder must be shared.
        prepare: as for `run_rank`.
    """
    minutes = config.actor_train.backend_timeout
    tp_size = {
        name: role.strategy_args.strategy_config.tensor_model_parallel_size for name, role in config.roles.items()
    }
    roles = {
        name: (len(devices), tp_size[name])
        for name in config.roles
        if (devices := config.own_devices(name)) is not None
    }
    with reserve_devices(count, tp_size["actor_train"], minutes, lambda: bool(caught), roles) as reservation:
        if reservation is None:
            return None
        with start_actors(reservation, variables) as ranks:
            environments = ranks.prepare(reservation.ranks, caught)
            if environments and shared is not None and ranks.call("can_read", [shared], caught) == [False]:
                return _folder_not_shared(shared[0], ranks.processes[0])
            start_workers = StartRayWorkers(reservation, variables)
            if environments and ranks.failure is None and not caught:
                ranks.call("run", [(config, devices, start_workers, prepare) for devices in environments], caught)
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
