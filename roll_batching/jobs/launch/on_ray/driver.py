"""The command that runs a job on Ray: one attempt, from placing its ranks to their end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.launch.failures import Failure
from roll_batching.jobs.launch.on_ray.actors import started
from roll_batching.jobs.launch.on_ray.cluster import room_for
from roll_batching.jobs.launch.on_ray.rank import Whereabouts
from roll_batching.jobs.launch.on_ray.worlds import Worlds


def attempt(
    job: JobConfig,
    count: int,
    variables: Mapping[str, str],
    caught: Sequence[object],
    shared: tuple[str, str] | None = None,
) -> Failure | None:
    """Runs the job once, on `count` ranks; returns why it failed, or None, also when a signal was `caught`.

    `variables` are added to the ranks' environment, before their interpreters start. `shared` is a file and its text,
    by which rank 0 must see the run's folder as it is seen here. No rank is alive afterwards.
    """
    minutes = job.actor_train.backend_timeout
    tp_size = {name: role.strategy_args.strategy_config.tensor_model_parallel_size for name, role in job.roles.items()}
    roles = {name: (len(own), tp_size[name]) for name in job.roles if (own := job.own_devices(name)) is not None}
    with room_for(count, tp_size["actor_train"], minutes, lambda: bool(caught), roles) as room:
        if room is None:
            return None
        with started(room, variables) as ranks:
            places = ranks.settle(room.seats, caught)
            if places and shared is not None and ranks.ask("sees", [shared], caught) == [False]:
                return _not_shared(shared[0], ranks.whereabouts[0])
            worlds = Worlds(room, variables)
            if places and ranks.failure is None and not caught:
                ranks.ask("run", [(job, own, worlds) for own in places], caught)
            return ranks.failure


def _not_shared(file: str, rank_0: Whereabouts) -> Failure:
    message = (
        f"--max-restarts needs a run's folder that all machines share: {rank_0.host} ({rank_0.address}), where rank 0 "
        f"runs, does not see {os.path.dirname(file)} as this machine does. Give another output_dir"
    )
    return Failure(rank=0, message=message, nanoseconds=0, agreed=True)
