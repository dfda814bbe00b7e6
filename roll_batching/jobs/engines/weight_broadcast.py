"""Weights to servers over process groups: no file, and never more than a bucket of them here.

Every server has a group of its own with this process. In a group of all, one that dies in a broadcast takes the others
with it under NCCL, whose watchdog ends them; so it costs itself alone, and one that was started again joins by itself.
What it costs is that this process sends the weights once per server.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import torch

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.dialect import Dialect, Meeting, Receiving
from roll_batching.jobs.engines.replicas import Replicas
from roll_batching.jobs.engines.requests import SECONDS_FOR_HEALTH, Failed, get, post
from roll_batching.jobs.engines.weight_group import WeightGroup, address_towards, backend_for, in_thread, new_store

T = TypeVar("T")

_MARGIN = 10.0
"""Seconds by which a group waits longer than we do for a server: that error says more."""


class ReceivingDialect(Dialect, Receiving, Protocol):
    """Of servers that take weights over a process group."""


class WeightBroadcast:
    """Sends weights that lie on `device` to the servers of `replicas`, whose dialect is `dialect`.

    An update is `begin`, `send` for every bucket, `end`. A server with which anything fails, or that does not do its
    part within the limit for a request, is dropped until the next update; what was on its way is given up. All methods
    raise EngineError when no server is left.
    """

    def __init__(self, replicas: Replicas, dialect: ReceivingDialect, device: torch.device) -> None:
        self._replicas, self._dialect, self._device = replicas, dialect, device
        self._seconds = replicas.limits.seconds
        self._store = new_store()
        self._groups: dict[str, WeightGroup] = {}
        """By server; only of those that had all of what was sent last."""
        self._sent: int | None = None
        """The version of that."""

    def begin(self, *, asleep: bool = False) -> None:
        """All servers, also those that were dropped, stop generating and join; `asleep`: they sleep."""
        replicas = self._replicas

        async def joined(session: Any, url: str) -> None:
            for call in self._dialect.before_update(asleep=asleep):
                replicas.heard(call, await post(session, url, call))
            await self._join(session, url)

        wrong = replicas.each(replicas.urls, joined)
        replicas.use(dict.fromkeys(replicas.urls), replicas.version)
        self._drop(wrong)

    def send(self, tensors: Sequence[tuple[str, torch.Tensor]], version: int | None = None) -> int:
        """The servers load these; `version`: they are the last of it. Bytes that left this process."""

        async def sent(session: Any, url: str) -> None:
            group = self._groups[url]
            call = self._dialect.receive(tensors, group.name, version)
            values = [tensor for _, tensor in tensors]
            replied = await self._both(post(session, url, call), lambda: group.broadcast(values))
            self._replicas.heard(call, replied[0])

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the tensors are there: the groups have streams of their own
        count = len(self._replicas.live)
        self._drop(self._replicas.each(tuple(self._replicas.live), sent))
        if version is not None:
            self._sent = version
        return count * sum(tensor.nbytes for _, tensor in tensors)

    def end(self, version: int, *, asleep: bool = False) -> None:
        """The servers generate with what was sent, which is of `version`; `asleep`: and wake up."""
        live = self._replicas.live
        self._drop(self._replicas.tell(tuple(live), self._dialect.after_update(asleep=asleep)))
        self._replicas.use(self._replicas.live, version)

    def close(self) -> None:
        """Leaves the groups. Nobody is waited for long."""
        groups, self._groups = self._groups, {}

        async def left(session: Any, url: str) -> None:
            with contextlib.suppress(TimeoutError):
                call = self._dialect.leave(groups[url].name)
                await asyncio.wait_for(post(session, url, call), SECONDS_FOR_HEALTH)

        self._replicas.each(tuple(groups), left)
        for group in groups.values():
            group.abort()

    # ---- one server

    async def _join(self, session: Any, url: str) -> None:
        """It has a group with this process. One that was started since has forgotten it, and every version with it."""
        about = await self._about(session, url)
        if url in self._groups and self._dialect.weights(about) == str(self._sent):
            return
        self._forget(url)
        name, size = f"roll-batching-{uuid.uuid4().hex}", 1 + self._dialect.ranks(about)
        try:
            address = await in_thread(lambda: address_towards(url, SECONDS_FOR_HEALTH))
        except OSError as error:
            raise Failed(f"{type(error).__name__} {error}") from None
        meeting = Meeting(
            address=address, port=self._store.port, group=name, size=size, backend=backend_for(self._device)
        )
        call = self._dialect.join(meeting)
        reply, group = await self._both(
            post(session, url, call),
            lambda: WeightGroup(self._store.port, name, size, self._device, self._seconds + _MARGIN),
        )
        self._replicas.heard(call, reply)
        self._groups[url] = group

    async def _about(self, session: Any, url: str) -> Any:
        for path in self._dialect.about[:-1]:
            with contextlib.suppress(EngineError):  # there is no such path
                return await get(session, url, path)
        return await get(session, url, self._dialect.about[-1])

    async def _both(self, request: Coroutine[Any, Any, Any], here: Callable[[], T]) -> tuple[Any, T]:
        """The reply to a request, and what its counterpart in this process returns. Raises Failed and EngineError."""
        asked, done = asyncio.ensure_future(request), in_thread(here)
        await asyncio.wait((asked, done), timeout=self._seconds, return_when=asyncio.FIRST_EXCEPTION)
        try:
            if asked.done():
                asked.result()
            if done.done():
                done.result()
            if asked.done() and done.done():
                return asked.result(), done.result()
        except EngineError:
            raise
        except RuntimeError as error:  # torch's
            raise Failed(f"its process group: {error}") from None
        finally:
            for one in (asked, done):
                one.add_done_callback(_heard)
                one.cancel()
        raise Failed(f"it did not do its part in actor_infer.engine_args.request_timeout = {self._seconds:g} seconds")

    def _drop(self, wrong: dict[str, str]) -> None:
        for url in wrong:
            self._forget(url)
        self._replicas.drop(
            wrong,
            "took the weights that were sent",
            "Servers must run at actor_infer.engine_args.urls, of one model with the job's, and reach this machine",
        )

    def _forget(self, url: str) -> None:
        group = self._groups.pop(url, None)
        if group is not None:
            group.abort()


def _heard(future: asyncio.Future[Any]) -> None:
    """What somebody had given up on did not go well either."""
    if not future.cancelled():
        future.exception()
