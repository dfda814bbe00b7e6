"""The ranks of a job as Ray actors: starts them, calls them, collects their failures, and ends them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.failures import Failure, describe_failure, root_cause
from roll_batching.jobs.launch.logs import write_to_log
from roll_batching.jobs.launch.on_ray.cluster import RankPlacement, Reservation
from roll_batching.jobs.launch.rendezvous import rank_info
from roll_batching.jobs.processes.child_process import rank_variables
from roll_batching.jobs.processes.role_workers import StartRoleWorkers
from roll_batching.secret_names import is_secret


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """Machine, process id and GPUs of a rank."""

    address: str
    """Address of the machine, as Ray knows it."""
    host: str
    """Name of the machine."""
    pid: int
    devices: tuple[str, ...]
    """The GPUs that Ray gave the rank, in the format of CUDA_VISIBLE_DEVICES; empty on CPU."""


class Rank:
    """One rank of a job, as an actor. Methods run one at a time on the main thread, as signal handlers need it."""

    def __init__(self, number: int, secrets: Mapping[str, str]) -> None:
        """`secrets`: variables that must not be in the actor's runtime environment, which Ray shows."""
        os.environ.update(secrets)
        self.number = number
        self._store: Any = None

    def __repr__(self) -> str:
        return f"rank {self.number}"  # Ray's prefix of each line of output

    def enter_folder(self, folder: str) -> RankProcess | Failure:
        """Changes to the command's working directory, so that relative paths agree. Returns a Failure if it cannot."""
        import ray

        try:
            os.chdir(folder)
        except OSError as error:
            place = f"machine {socket.gethostname()}, where rank {self.number} is to run, cannot enter {folder}"
            cure = "Start the command in a folder that all machines share, or with `ray job submit --working-dir`"
            return Failure(rank=self.number, message=f"{place}: {error.strerror}. {cure}", nanoseconds=0, agreed=True)
        return RankProcess(
            address=ray.util.get_node_ip_address(),
            host=socket.gethostname(),
            pid=os.getpid(),
            devices=tuple(str(device) for device in ray.get_runtime_context().get_accelerator_ids().get("GPU", ())),
        )

    def open_store(self) -> int:
        """Opens the rendezvous store in this process, which keeps the port taken; returns the port."""
        from torch.distributed import TCPStore

        self._store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def can_read(self, file: str, text: str) -> bool:
        """Whether `file` begins with `text` on this machine; ranks append lines of their own."""
        path = Path(file)
        return path.is_file() and path.read_text(encoding="utf-8", errors="replace").startswith(text)

    def run(
        self,
        config: JobConfig,
        variables: Mapping[str, str],
        start_workers: StartRoleWorkers,
        prepare: Callable[..., JobConfig] | None,
    ) -> Failure | None:
        """Runs this rank's part of the job; returns a Failure if it failed. Other arguments as for `run_rank`."""
        from roll_batching.jobs.launch.worker import run_rank

        os.environ.update(variables)
        try:
            info = rank_info()
            assert info is not None, "the variables name a rank"
            run_rank(config, info, start_workers=start_workers, prepare=prepare)
        except BaseException as error:  # also SystemExit: every failure must reach the driver
            failure = describe_failure(self.number, error)
            write_to_log(failure.frames + failure.line)
            return failure
        return None


# ---- actors


_INHERITED = ("PYTHONPATH", "PYTHONWARNINGS", "OMP_NUM_THREADS")
_INHERITED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "HF_")
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 1.0
"""After a failure, other ranks may still report theirs: one of them may be the cause."""
_CAUSE_SECONDS = 20.0
"""Longer grace while only lost connections are known, or an error that all ranks raise: Ray takes this long to notice
that a machine is gone, which may be the cause."""
_KILL_SECONDS = 10.0


class RankActors:
    """The actors of a job, by rank."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors
        self.processes: Sequence[RankProcess] = ()
        self.failure: Failure | None = None
        """Root cause of the last call's failures."""

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]], caught: Sequence[object] = ()) -> list[Any]:
        """Calls `method` on the first ranks, one per item of `arguments`; returns results in order of rank.

        Returns early, with `failure` set, soon after a rank has failed, and when a signal was `caught`.
        """
        pairs = zip(self.actors, arguments, strict=False)
        return self.results([getattr(actor, method).remote(*items) for actor, items in pairs], caught)

    def results(self, calls: Sequence[Any], caught: Sequence[object] = ()) -> list[Any]:
        """Waits for `calls`, one per rank from rank 0 on, and returns their results; early return as in `call`."""
        import ray

        pending = {call: rank for rank, call in enumerate(calls)}
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        first_failed: float | None = None
        while pending and not caught:
            done, _ = ray.wait(list(pending), timeout=_POLL_SECONDS)
            for call in done:
                rank = pending.pop(call)
                results[rank] = self._result(rank, call)
                if isinstance(results[rank], Failure):
                    failures.append(results[rank])
            if failures:
                first_failed = first_failed or time.monotonic()
                cause_known = not all(failure.aftermath or failure.shared for failure in failures)
                if time.monotonic() - first_failed > (_GRACE_SECONDS if cause_known else _CAUSE_SECONDS):
                    break
        self.failure = root_cause(failures) if failures else None
        return [results[rank] for rank in sorted(results)]

    def prepare(
        self, placements: Sequence[RankPlacement], caught: Sequence[object] = (), role: str = ""
    ) -> list[dict[str, str]]:
        """Moves all ranks to this process's folder, prints their machines, and opens the rendezvous store on rank 0.

        Returns the rank variables of each; empty when a rank has failed or a signal was `caught`.
        """
        processes = self.call("enter_folder", [(os.getcwd(),)] * len(placements), caught)
        if self.failure is not None or caught:
            return []
        self.processes = processes
        _print_placement(placements, processes, role)
        port = self.call("open_store", [()], caught)
        return _environments(placements, processes, *port) if self.failure is None and not caught else []

    def _result(self, rank: int, call: Any) -> Any:
        """The result of a finished call; a Failure if the rank's process has ended."""
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            process = self.processes[rank] if self.processes else None
            place = f" (process {process.pid} on {process.host}, {process.address})" if process else ""
            init_failed = getattr(error, "actor_init_failed", False)
            return Failure(
                rank=rank,
                message=f"rank {rank}{place} ended without a message: {failure_reason(error)}",
                nanoseconds=time.time_ns(),
                agreed=True,
                silent=True,
                lost=isinstance(error, ray.exceptions.RayActorError) and not init_failed,
            )

    def kill(self) -> None:
        """Kills all actors; returns when they are dead."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
        dead = [actor.__ray_ready__.remote() for actor in self.actors]  # calls that fail once the actor is dead
        ray.wait(dead, num_returns=len(dead), timeout=_KILL_SECONDS)


@contextlib.contextmanager
def start_actors(
    reservation: Reservation, variables: Mapping[str, str], actor_class: type[Rank] = Rank
) -> Iterator[RankActors]:
    """Starts one actor per rank of `reservation`, with `variables` in its environment; kills all after the block."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    inherited = inherited_variables(os.environ)
    public, secrets = split_secrets(variables)
    actors = []
    for placement in reservation.ranks:
        threads = {"OMP_NUM_THREADS": str(max(1, int(reservation.cpus[placement.node]) // placement.local_size))}
        strategy = PlacementGroupSchedulingStrategy(reservation.group, placement_group_bundle_index=placement.bundle)
        actor = ray.remote(actor_class).options(
            num_cpus=1,
            num_gpus=int(reservation.on_gpus),
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {**threads, **inherited, **public}},
        )
        actors.append(actor.remote(placement.rank, secrets))
    ranks = RankActors(actors)
    try:
        yield ranks
    finally:
        ranks.kill()


def inherited_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the command's environment that ranks inherit, without secrets."""
    wanted = {name for name in environment if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)}
    return {name: environment[name] for name in sorted(wanted) if not is_secret(name, environment[name])}


def split_secrets(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """`variables` split in two: for the runtime environment, which Ray shows to all its users, and secrets."""
    secrets = {name: value for name, value in variables.items() if is_secret(name, value)}
    return {name: value for name, value in variables.items() if name not in secrets}, secrets


def _environments(
    placements: Sequence[RankPlacement], processes: Sequence[RankProcess], port: int
) -> list[dict[str, str]]:
    """The rank variables of each rank. Ranks of a machine see each other's GPUs, as NCCL needs it."""
    environments = []
    for placement in placements:
        devices = [
            name for other in placements if other.node == placement.node for name in processes[other.rank].devices
        ]
        variables = rank_variables(
            placement.rank,
            len(placements),
            local_rank=placement.local_rank,
            local_size=placement.local_size,
            host=processes[0].address,
            port=port,
        )
        environments.append(variables | ({"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}))
    return environments


def _print_placement(placements: Sequence[RankPlacement], processes: Sequence[RankProcess], role: str) -> None:
    """Prints one line with the ranks on each machine."""
    machines = []
    for _, group in groupby(placements, key=lambda placement: placement.node):
        ranks = [placement.rank for placement in group]
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        machines.append(f"{names} on {processes[ranks[0]].host} ({processes[ranks[0]].address})")
    print(f"{role and role + ' '}placed by Ray: {', '.join(machines)}", file=sys.stderr, flush=True)


def failure_reason(error: BaseException) -> str:
    """The part of Ray's message that says what happened to this actor."""
    text = str(error)
    start = text.find("The actor ", text.find("\n") + 1)
    return text[max(0, start) :].partition(" Some common causes include")[0].strip()
