"""What the environment says of this process: one rank of a job, or the command that starts them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig

LAUNCHER = "ROLL_BATCHING_LAUNCHER"
"""Holds the process id of our own launcher, in the processes that it starts."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's word for: the store where ranks meet is not rank 0's, it was there before."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CURE = (
    "torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every process; whoever starts "
    "processes otherwise sets them all. Unset them to let this command start the processes itself"
)


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Which rank of which world this process is."""

    rank: int
    world_size: int
    host: str
    """Where the ranks meet."""
    port: int
    """On which port of `host`."""
    has_store: bool
    """Whether the process that started this one answers there; else rank 0 does."""
    launcher: int | None
    """Process id of our own launcher; None where something else started this process."""
    has_keeper: bool
    """Whether the process that started this one stays until it ends: our launcher and torchrun's agent do."""

    @property
    def address(self) -> str:
        """Host and port where the ranks meet."""
        return f"{self.host}:{self.port}"


def rank_place(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """This process's place among the ranks; None when it is none, but the command that starts them.

    Raises ConfigError when the environment says half of it, or what cannot be.
    """
    given = [name for name in ("RANK", "WORLD_SIZE") if environment.get(name)]
    if not given:
        return None
    missing = [name for name in _NEEDED if not environment.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{' and '.join(missing)} {verb} not set in the environment, though {given[0]} is: {_CURE}")
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    local_rank, port = _number(environment, "LOCAL_RANK", "0"), _number(environment, "MASTER_PORT")
    if not 0 <= rank < world_size:
        raise ConfigError(f"RANK={rank} is not from 0 to WORLD_SIZE - 1 = {world_size - 1}: {_CURE}")
    if not 0 <= local_rank <= rank:
        raise ConfigError(f"LOCAL_RANK={local_rank} is not from 0 to RANK = {rank}: {_CURE}")
    if not 0 < port < 1 << 16:
        raise ConfigError(f"MASTER_PORT={port} is no port (1 to 65535): {_CURE}")
    launcher = environment.get(LAUNCHER)
    return RankPlace(
        rank=rank,
        world_size=world_size,
        host=environment["MASTER_ADDR"],
        port=port,
        has_store=environment.get(AGENT_STORE) == "True",
        launcher=int(launcher) if launcher else None,
        has_keeper=bool(launcher) or _TORCHRUN in environment,
    )


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no whole number: {_CURE}") from None


def check_world(config: JobConfig, place: RankPlace) -> None:
    """Raises ConfigError when this many processes cannot be those that `config` describes.

    Our own launcher may have been told by --nproc to start another number than device_mapping names.
    """
    config.dp_size(place.world_size)
    named = config.world_size
    if place.launcher is None and named is not None and named != place.world_size:
        raise ConfigError(
            f"actor_train.device_mapping names {named} devices and {place.world_size} processes were started "
            f"(WORLD_SIZE): start {named}, or change or leave out device_mapping"
        )
