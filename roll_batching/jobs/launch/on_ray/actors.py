"""The ranks of a job as Ray's actors: started, asked, and ended together."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from roll_batching.jobs.launch.environment import AGENT_STORE
from roll_batching.jobs.launch.failures import Failure, cause
from roll_batching.jobs.launch.on_ray.cluster import Room
from roll_batching.jobs.launch.on_ray.placement import Seat
from roll_batching.jobs.launch.on_ray.rank import Rank, Whereabouts
from roll_batching.secret_names import is_secret

_PASSED_ON = ("PYTHONPATH", "PYTHONWARNINGS", "OMP_NUM_THREADS")
_FAMILIES_PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "HF_")
_SECONDS_BETWEEN_LOOKS = 0.2
_SECONDS_FOR_LAST_WORDS = 1.0
"""How long after a failure the other ranks may say theirs: it may be the cause."""
_SECONDS_FOR_THE_CAUSE = 20.0
"""How long when all that is known are connections lost to others, as Ray takes this long to miss a machine; or an error
that all ranks raise together."""
_SECONDS_TO_END = 10.0


class Ranks:
    """The actors of a job, by rank."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors
        self.whereabouts: Sequence[Whereabouts] = ()
        self.failure: Failure | None = None
        """Of several, the cause."""

    def ask(self, method: str, arguments: Sequence[tuple[Any, ...]], caught: Sequence[object] = ()) -> list[Any]:
        """Calls `method` on as many ranks as there are arguments; their answers, by rank.

        Returns soon after one has failed, with `failure` set, or when a signal was `caught`.
        """
        asked = zip(self.actors, arguments, strict=False)
        return self.answers([getattr(actor, method).remote(*given) for actor, given in asked], caught)

    def answers(self, made: Sequence[Any], caught: Sequence[object] = ()) -> list[Any]:
        """What calls that were `made`, one per rank from rank 0 on, return; else as `ask`."""
        import ray

        calls = {call: rank for rank, call in enumerate(made)}
        answers: dict[int, Any] = {}
        failures: list[Failure] = []
        first: float | None = None
        while calls and not caught:
            done, _ = ray.wait(list(calls), timeout=_SECONDS_BETWEEN_LOOKS)
            for call in done:
                rank = calls.pop(call)
                answers[rank] = self._answer(rank, call)
                if isinstance(answers[rank], Failure):
                    failures.append(answers[rank])
            if failures:
                first = first or time.monotonic()
                known = not all(failure.aftermath or failure.shared for failure in failures)
                if time.monotonic() - first > (_SECONDS_FOR_LAST_WORDS if known else _SECONDS_FOR_THE_CAUSE):
                    break
        self.failure = cause(failures) if failures else None
        return [answers[rank] for rank in sorted(answers)]

    def settle(self, seats: Sequence[Seat], caught: Sequence[object] = (), who: str = "") -> list[dict[str, str]]:
        """Brings all ranks into this process's folder, says where they are, and opens the store where they will meet.

        Returns the variables that tell each rank its place; nothing where one has failed or a signal was `caught`.
        """
        found = self.ask("settle", [(os.getcwd(),)] * len(seats), caught)
        if self.failure is not None or caught:
            return []
        self.whereabouts = found
        _tell(seats, found, who)
        port = self.ask("open_store", [()], caught)
        return _places(seats, found, *port) if self.failure is None and not caught else []

    def _answer(self, rank: int, call: Any) -> Any:
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            place = self.whereabouts[rank] if self.whereabouts else None
            where = f" (process {place.pid} on {place.host}, {place.address})" if place else ""
            init_failed = getattr(error, "actor_init_failed", False)
            return Failure(
                rank=rank,
                message=f"rank {rank}{where} ended without a message: {reason_of(error)}",
                nanoseconds=time.time_ns(),
                agreed=True,
                silent=True,
                lost=isinstance(error, ray.exceptions.RayActorError) and not init_failed,
            )

    def end(self) -> None:
        """Kills all actors; returns when they are dead."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
        dead = [actor.__ray_ready__.remote() for actor in self.actors]
        ray.wait(dead, num_returns=len(dead), timeout=_SECONDS_TO_END)


@contextlib.contextmanager
def started(room: Room, variables: Mapping[str, str], kind: type[Rank] = Rank) -> Iterator[Ranks]:
    """One actor of `kind` per seat of `room`, with `variables` in its environment; none is alive afterwards."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    passed = passed_on(os.environ)
    shown, secret = shown_and_secret(variables)
    actors = []
    for seat in room.seats:
        threads = {"OMP_NUM_THREADS": str(max(1, int(room.cpus[seat.node]) // seat.local_size))}
        place = PlacementGroupSchedulingStrategy(room.group, placement_group_bundle_index=seat.bundle)
        actor = ray.remote(kind).options(
            num_cpus=1,
            num_gpus=int(room.on_gpus),
            scheduling_strategy=place,
            runtime_env={"env_vars": {**threads, **passed, **shown}},
        )
        actors.append(actor.remote(seat.rank, secret))
    ranks = Ranks(actors)
    try:
        yield ranks
    finally:
        ranks.end()


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """What of the command's environment the ranks get as well."""
    wanted = {name for name in environment if name in _PASSED_ON or name.startswith(_FAMILIES_PASSED_ON)}
    return {name: environment[name] for name in sorted(wanted) if not is_secret(name)}


def shown_and_secret(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """`variables` for the actors' environment, which Ray shows to whoever sees the cluster; and the secret ones."""
    secret = {name: value for name, value in variables.items() if is_secret(name)}
    return {name: value for name, value in variables.items() if name not in secret}, secret


def _places(seats: Sequence[Seat], found: Sequence[Whereabouts], port: int) -> list[dict[str, str]]:
    """What tells each rank its place, in torchrun's words. Ranks of a machine see each other's GPUs, as NCCL wants."""
    places = []
    for seat in seats:
        shown = [device for other in seats if other.node == seat.node for device in found[other.rank].devices]
        places.append(
            {
                "RANK": str(seat.rank),
                "LOCAL_RANK": str(seat.local_rank),
                "WORLD_SIZE": str(len(seats)),
                "LOCAL_WORLD_SIZE": str(seat.local_size),
                "MASTER_ADDR": found[0].address,
                "MASTER_PORT": str(port),
                AGENT_STORE: "True",
                **({"CUDA_VISIBLE_DEVICES": ",".join(shown)} if shown else {}),
            }
        )
    return places


def _tell(seats: Sequence[Seat], found: Sequence[Whereabouts], who: str) -> None:
    """One line: which ranks, of `who`, run where."""
    told = []
    for _, together in groupby(seats, key=lambda seat: seat.node):
        ranks = [seat.rank for seat in together]
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        told.append(f"{named} on {found[ranks[0]].host} ({found[ranks[0]].address})")
    print(f"{who and who + ' '}placed by Ray: {', '.join(told)}", file=sys.stderr, flush=True)


def reason_of(error: BaseException) -> str:
    """The part of Ray's words that says what happened to this actor."""
    text = str(error)
    start = text.find("The actor ", text.find("\n") + 1)
    return text[max(0, start) :].partition(" Some common causes include")[0].strip()
