"""Rank and rendezvous of this process, read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.processes.rank_variables import AGENT_STORE, LAUNCHER

_TORCHRUN = "TORCHELASTIC_RUN_ID"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CURE = (
    "torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every process; any other launcher "
    "must set them all. Unset them to let this command start the processes itself"
)


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank, world size and rendezvous of this process."""

    rank: int
    world_size: int
    host: str
    """Host of the rendezvous store."""
    port: int
    """Port of the rendezvous store."""
    has_store: bool
    """The launcher holds the rendezvous store; else rank 0 opens it."""
    launcher: int | None
    """Process id of our own launcher; None under another launcher."""
    is_supervised: bool
    """The parent lives until this process ends, as our launcher and torchrun's agent do."""

    @property
    def address(self) -> str:
        """`host:port` of the rendezvous store."""
        return f"{self.host}:{self.port}"


def rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """This process's rank; None in the command that starts the ranks.

    Raises ConfigError when variables are missing or invalid.
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
    return RankInfo(
        rank=rank,
        world_size=world_size,
        host=environment["MASTER_ADDR"],
        port=port,
        has_store=environment.get(AGENT_STORE) == "True",
        launcher=int(launcher) if launcher else None,
        is_supervised=bool(launcher) or _TORCHRUN in environment,
    )


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is no whole number: {_CURE}") from None


def check_world_size(config: JobConfig, info: RankInfo) -> None:
    """Raises ConfigError when the world size does not fit the parallel layout or device_mapping.

    Under our own launcher --nproc may differ from device_mapping.
    """
    config.dp_size(info.world_size)
    mapped = config.world_size
    if info.launcher is None and mapped is not None and mapped != info.world_size:
        raise ConfigError(
            f"actor_train.device_mapping names {mapped} devices and {info.world_size} processes were started "
            f"(WORLD_SIZE): start {mapped}, or change or leave out device_mapping"
        )
