"""Roles on devices of their own under Ray: their processes are actors, in bundles of the job's placement group.

Rank 0 of the job starts them, so that they end with it, and speaks with each over a connection of its own.
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
from roll_batching.jobs.launch.on_ray.actors import Ranks, reason_of, started
from roll_batching.jobs.launch.on_ray.callers import Callers
from roll_batching.jobs.launch.on_ray.cluster import Room
from roll_batching.jobs.launch.on_ray.rank import Rank
from roll_batching.jobs.processes.world import World, start_here

_SECONDS_TO_CALL = 120.0
"""How long its processes may take to speak to rank 0, once they are there."""
_SECONDS_BETWEEN_LOOKS = 0.2


class RoleRank(Rank):
    """One process of a role's world, to be made an actor."""

    def __repr__(self) -> str:
        return f"role rank {self.number}"  # what Ray puts before each line that the process says

    def join(self, module: str, variables: Mapping[str, str], address: tuple[str, int], key: bytes) -> None:
        """Calls `join` of `module` with a connection to whoever listens at `address` and knows `key`."""
        os.environ.update(variables)
        connection = Client(address, authkey=key)
        connection.send(self.number)
        importlib.import_module(module).join(connection)


class ActorWorld:
    """Actors in the seats of `room`, which must belong to a role."""

    def __init__(self, role: str, module: str, room: Room, variables: Mapping[str, str]) -> None:
        self._until_the_end = contextlib.ExitStack()
        with contextlib.ExitStack() as on_failure:
            self._ranks: Ranks = on_failure.enter_context(started(room, variables, RoleRank))
            places = self._ranks.settle(room.seats, who=role)
            if self._ranks.failure is not None:
                raise DataError(f"its processes cannot be started: {self._ranks.failure.line}")
            self.connections = self._met(module, places)
            self._until_the_end = on_failure.pop_all()

    def _met(self, module: str, places: list[dict[str, str]]) -> list[Connection]:
        """All processes are told to join, and have called back."""
        import ray

        with Callers() as callers:
            address = (ray.util.get_node_ip_address(), callers.port)
            calls = zip(self._ranks.actors, places, strict=True)
            self._joins = [actor.join.remote(module, place, address, callers.key) for actor, place in calls]
            found: dict[int, Connection] = {}
            until = time.monotonic() + _SECONDS_TO_CALL
            while len(found) < len(places):
                if (caller := callers.next(_SECONDS_BETWEEN_LOOKS)) is not None:
                    rank, connection = caller
                    found[rank] = connection
                missing = sorted({*range(len(places))} - found.keys())
                gone = [how for rank, how in self.ended().items() if rank in missing]
                if gone or (missing and time.monotonic() > until):
                    why = gone[0] if gone else f"did not call within {_SECONDS_TO_CALL:g} s"
                    raise DataError(f"rank {missing[0]} of its {len(places)} processes {why}")
        return [found[rank] for rank in range(len(places))]

    def ended(self) -> dict[int, str]:
        """How those ended that have, by rank."""
        import ray

        done, _ = ray.wait(self._joins, num_returns=len(self._joins), timeout=0)
        return {self._joins.index(call): _how(call) for call in done}

    def end(self) -> None:
        """Ends all actors."""
        self._until_the_end.close()


class Worlds:
    """Starts the worlds of roles on Ray that have seats in `room`, and others here. To be used by rank 0's actor."""

    def __init__(self, room: Room, variables: Mapping[str, str]) -> None:
        self.room, self.variables = room, variables

    def __call__(self, role: str, module: str, count: int, variables: Mapping[str, str]) -> World:
        """See `rl.roles.world.StartWorld`."""
        if role not in self.room.roles:
            return start_here(role, module, count, variables)
        room = replace(self.room, seats=self.room.roles[role])
        return ActorWorld(role, module, room, {**self.variables, **variables})


def _how(call: Any) -> str:
    """How the process of a call that is over ended."""
    import ray

    try:
        ray.get(call)
    except ray.exceptions.RayActorError as error:
        return f"with its process: {reason_of(error)}"
    except ray.exceptions.RayError as error:
        return f"with an error: {error}"
    return "by itself"
