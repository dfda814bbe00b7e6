"""Reads this process's rank from the environment, and waits for all ranks before the job begins."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roll_batching.errors import ConfigError, LayoutError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.processes.child_process import AGENT_STORE, LAUNCHER, notify

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
    """Reads this process's rank from `environment`; None in the command that starts the ranks.

    Raises ConfigError when variables are missing or invalid.
    """
    named = [name for name in ("RANK", "WORLD_SIZE") if environment.get(name)]
    if not named:
        return None
    missing = [name for name in _NEEDED if not environment.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ConfigError(f"{' and '.join(missing)} {verb} not set in the environment, though {named[0]} is: {_CURE}")
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


# ---- rendezvous


_SECONDS_BEFORE_NOTICE = 10.0
_CONNECT_POLL_SECONDS = 0.2
_KEY = "roll-batching/met"
"""Prefix of the keys of the store that ranks set when they have joined."""


def wait_for_ranks(info: RankInfo, minutes: float, *, notice_after: float = _SECONDS_BEFORE_NOTICE) -> Any:
    """Waits until every rank has joined the rendezvous; returns its store, which the caller must keep.

    After `notice_after` seconds, and again after each doubling, a notice on standard error names the missing ranks.
    Raises LayoutError with the missing ranks after `minutes`.
    """
    from torch.distributed import DistError

    limit = f"for {minutes:g} minutes at most (in jobs: actor_train.backend_timeout)"
    timeout = datetime.timedelta(minutes=minutes)
    started = time.monotonic()

    def rank_0() -> str:
        return f"for rank 0, which should answer at {info.address}"

    with _Notices(info.rank, rank_0, limit, notice_after) as notices:
        try:
            store = _connect(info, timeout)
        except (DistError, RuntimeError, OSError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LayoutError(
                f"rank {info.rank} of {info.world_size} could not meet the others at {info.address} within "
                f"{minutes:g} minutes: {reason}. Check that rank 0 runs, and that this machine reaches it at "
                "MASTER_ADDR and MASTER_PORT"
            ) from error
        store.set(f"{_KEY}/{info.rank}", "")
        missing = set(range(info.world_size))
        notices.waits_for = lambda: f"for {_ranks(missing)} of {info.world_size}, which did not start"
        while missing:
            missing -= {rank for rank in missing if store.check([f"{_KEY}/{rank}"])}
            if missing and time.monotonic() - started > timeout.total_seconds():
                raise LayoutError(
                    f"{_ranks(missing)} of {info.world_size} did not start within {minutes:g} minutes (in jobs: "
                    "actor_train.backend_timeout): start one process per rank, or set WORLD_SIZE to their number"
                )
            if missing:
                time.sleep(0.1)
    return store


def _connect(info: RankInfo, timeout: datetime.timedelta) -> Any:
    """Opens or joins the TCPStore at `info.address`, without waiting for other ranks.

    torch's own rendezvous waits inside rank 0's store, where missing ranks cannot be named.
    """
    from torch.distributed import TCPStore

    is_host = info.rank == 0 and not info.has_store
    if not is_host:
        _await_host(info.host, info.port, timeout.total_seconds())
    return TCPStore(
        info.host,
        info.port,
        info.world_size,
        is_master=is_host,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=not info.has_store,  # torch's own rendezvous opens the same port later, and shares it
    )


def _await_host(host: str, port: int, seconds: float) -> None:
    """Returns once the port accepts connections; raises OSError after `seconds`. torch would log every retry."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_CONNECT_POLL_SECONDS)


class _Notices:
    """Prints notices about the wait, from a thread: the wait may be inside of torch."""

    def __init__(self, rank: int, waits_for: Callable[[], str], limit: str, after: float) -> None:
        self.rank, self.waits_for, self.limit, self.after = rank, waits_for, limit, after
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Notices:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self) -> None:
        waited, pause = self.after, self.after
        while not self._over.wait(pause):
            notify(f"rank {self.rank} has waited {waited:g} s {self.waits_for()}, {self.limit}")
            pause, waited = waited, 2 * waited


def _ranks(numbers: set[int], limit: int = 8) -> str:
    names = [str(number) for number in sorted(numbers)]
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names[:limit]) + rest
