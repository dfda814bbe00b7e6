"""The ranks meet before the job begins, and say who is missing."""

from __future__ import annotations

import datetime
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from roll_batching.errors import LayoutError
from roll_batching.jobs.launch.environment import RankPlace

_SECONDS_BEFORE_NOTICE = 10.0
_SECONDS_BETWEEN_TRIES = 0.2
_KEY = "roll-batching/met"


def meet(place: RankPlace, minutes: float, *, notice_after: float = _SECONDS_BEFORE_NOTICE) -> Any:
    """Waits until every rank of the world is there; returns the store that they met at, to be kept.

    After `notice_after` seconds, and again after twice as long, says on standard error who is waited for. Raises
    LayoutError naming the missing ranks after `minutes`.
    """
    from torch.distributed import DistError

    limit = f"for {minutes:g} minutes at most (actor_train.backend_timeout)"
    timeout = datetime.timedelta(minutes=minutes)
    started = time.monotonic()

    def host() -> str:
        return f"for rank 0, which should answer at {place.address}"

    with _Notices(place.rank, host, limit, notice_after) as notices:
        try:
            store = _store(place, timeout)
        except (DistError, RuntimeError, OSError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LayoutError(
                f"rank {place.rank} of {place.world_size} could not meet the others at {place.address} within "
                f"{minutes:g} minutes (MASTER_ADDR, MASTER_PORT): {said}"
            ) from error
        store.set(f"{_KEY}/{place.rank}", "")
        absent = set(range(place.world_size))
        notices.whom = lambda: f"for {_ranks(absent)} of {place.world_size}, which did not start"
        while absent:
            absent -= {rank for rank in absent if store.check([f"{_KEY}/{rank}"])}
            if absent and time.monotonic() - started > timeout.total_seconds():
                raise LayoutError(
                    f"{_ranks(absent)} of {place.world_size} did not start within {minutes:g} minutes "
                    "(actor_train.backend_timeout): start one process per rank, or set WORLD_SIZE to those there are"
                )
            if absent:
                time.sleep(0.1)
    return store


def _store(place: RankPlace, timeout: datetime.timedelta) -> Any:
    """The store at `place.address`, without a wait for the ranks that are to join it.

    torch's own rendezvous has rank 0 wait within, and can then not tell who is missing.
    """
    from torch.distributed import TCPStore

    is_host = place.rank == 0 and not place.has_store
    if not is_host:
        _await_host(place.host, place.port, timeout.total_seconds())
    return TCPStore(
        place.host,
        place.port,
        place.world_size,
        is_master=is_host,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=not place.has_store,  # torch's own rendezvous finds it there later
    )


def _await_host(host: str, port: int, seconds: float) -> None:
    """Returns once someone listens there; raises OSError after `seconds`. torch would fill the screen meanwhile."""
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, until - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(_SECONDS_BETWEEN_TRIES)


class _Notices:
    """Says who is waited for, from a thread: the wait may be inside of torch."""

    def __init__(self, rank: int, whom: Callable[[], str], limit: str, after: float) -> None:
        self.rank, self.whom, self.limit, self.after = rank, whom, limit, after
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> _Notices:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _speak(self) -> None:
        waited, pause = self.after, self.after
        while not self._over.wait(pause):
            text = f"notice: rank {self.rank} has waited {waited:g} s {self.whom()}, {self.limit}"
            print(text, file=sys.stderr, flush=True)
            pause, waited = waited, 2 * waited


def _ranks(numbers: set[int], shown: int = 8) -> str:
    listed = [str(number) for number in sorted(numbers)]
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(listed[:shown]) + more
