"""Rendezvous of all ranks before the job begins, with notices and an error about missing ranks."""

from __future__ import annotations

import datetime
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from roll_batching.errors import LayoutError
from roll_batching.jobs.launch.environment import RankInfo

_SECONDS_BEFORE_NOTICE = 10.0
_CONNECT_POLL_SECONDS = 0.2
_KEY = "roll-batching/met"


def wait_for_ranks(info: RankInfo, minutes: float, *, notice_after: float = _SECONDS_BEFORE_NOTICE) -> Any:
    """Waits until every rank has joined the rendezvous; returns its store, which the caller must keep.

    After `notice_after` seconds, and again after each doubling, a notice on standard error names the missing ranks.
    Raises LayoutError with the missing ranks after `minutes`.
    """
    from torch.distributed import DistError

    limit = f"for {minutes:g} minutes at most (actor_train.backend_timeout)"
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
                f"{minutes:g} minutes (MASTER_ADDR, MASTER_PORT): {reason}"
            ) from error
        store.set(f"{_KEY}/{info.rank}", "")
        missing = set(range(info.world_size))
        notices.waits_for = lambda: f"for {_ranks(missing)} of {info.world_size}, which did not start"
        while missing:
            missing -= {rank for rank in missing if store.check([f"{_KEY}/{rank}"])}
            if missing and time.monotonic() - started > timeout.total_seconds():
                raise LayoutError(
                    f"{_ranks(missing)} of {info.world_size} did not start within {minutes:g} minutes "
                    "(actor_train.backend_timeout): start one process per rank, or set WORLD_SIZE to their number"
                )
            if missing:
                time.sleep(0.1)
    return store


def _connect(info: RankInfo, timeout: datetime.timedelta) -> Any:
    """The TCPStore at `info.address`, without waiting for other ranks.

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
        multi_tenant=not info.has_store,  # torch's own rendezvous finds it there later
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
            text = f"notice: rank {self.rank} has waited {waited:g} s {self.waits_for()}, {self.limit}"
            print(text, file=sys.stderr, flush=True)
            pause, waited = waited, 2 * waited


def _ranks(numbers: set[int], limit: int = 8) -> str:
    names = [str(number) for number in sorted(numbers)]
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ("rank " if len(names) == 1 else "ranks ") + ", ".join(names[:limit]) + more
