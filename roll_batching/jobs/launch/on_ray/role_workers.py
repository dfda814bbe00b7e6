"""Roles on separate devices under Ray: their workers are actors in the job's placement group.

Rank 0 of the job starts them, so that they end with it, and has a connection to each.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from typing import Any

from roll_batching.errors import DataError
from roll_batching.jobs.launch.on_ray.actors import RankActors, failure_reason, start_actors
from roll_batching.jobs.launch.on_ray.cluster import Reservation
from roll_batching.jobs.launch.on_ray.rank import Rank
from roll_batching.jobs.processes.listener import WorkerListener
from roll_batching.jobs.processes.role_workers import RoleWorkers, start_local_workers

_CONNECT_SECONDS = 120.0
"""Limit for all actors to connect to rank 0 once they run."""
_POLL_SECONDS = 0.2


class RoleRank(Rank):
    """One worker of a role. Becomes an actor."""

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
            self._calls = [actor.serve.remote(module, own, address, listener.key) for actor, own in pairs]
            connections: dict[int, Connection] = {}
            deadline = time.monotonic() + _CONNECT_SECONDS
            while len(connections) < len(environments):
                if (accepted := listener.accept(_POLL_SECONDS)) is not None:
                    rank, connection = accepted
                    connections[rank] = connection
                missing = sorted({*range(len(environments))} - connections.keys())
                ended = [reason for rank, reason in self.exits().items() if rank in missing]
                if ended or (missing and time.monotonic() > deadline):
                    why = f"ended {ended[0]}" if ended else f"did not connect within {_CONNECT_SECONDS:g} s"
                    raise DataError(f"rank {missing[0]} of its {len(environments)} processes {why}")
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
        own = replace(self.reservation, ranks=self.reservation.roles[role])
        return RayRoleWorkers(role, module, own, {**self.variables, **variables})


def _exit_reason(call: Any) -> str:
    """Exit description of the process of a finished call."""
    import ray

    try:
        ray.get(call)
    except ray.exceptions.RayActorError as error:
        return f"with its process: {failure_reason(error)}"
    except ray.exceptions.RayError as error:
        return f"with an error: {error}"
    return "by itself"
