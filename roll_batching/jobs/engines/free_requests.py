"""Requests to an engine's servers one by one, as rollout functions make them: no rollout waits for another.

They may go on while the engine takes new weights. Between `pause` and `resume` nothing is sent; what servers are
sampling they interrupt, and it goes on from its last token under the new weights. So no request spans an update, and
the version of each token's weights is known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from roll_batching.jobs.engines.protocol import GenerationRequest, SampledTokens, ServerProcess
from roll_batching.jobs.engines.replicas import Attempts, Replicas, Server
from roll_batching.jobs.processes.requests import open_session
from roll_batching.jobs.seeds import continued_seed
from roll_batching.strategy.sampling import GenerationSettings

_REPLY_SECONDS = 2.0
"""Time for the replies to interrupted requests. Requests without one are sent again from their beginning."""


class FreeRequests:
    """Sends requests to `engine` in one event loop, between `open` and `close`. Calls may overlap.

    Limits are the engine's: a server has at most `max_in_flight` of these requests at once, and further ones wait for
    a slot.
    """

    def __init__(self, engine: Replicas) -> None:
        self._engine = engine
        self._stack = contextlib.AsyncExitStack()
        self._session: Any = None
        self._servers: dict[str, Server] = {}
        self._group_servers: dict[int, Server] = {}
        self._processes: Mapping[str, ServerProcess | None] = {}
        """Of the servers in use since the last `open` or `resume`."""
        self._losses: Counter[str] = Counter()
        """How often each server was found dropped or restarted."""
        self._sends: dict[asyncio.Task[None], Attempts] = {}
        self._is_open = asyncio.Event()

    async def open(self) -> None:
        """Opens connections, and drops servers that have restarted since their last weights. Raises EngineError."""
        limits = self._engine.limits
        self._session = await self._stack.enter_async_context(open_session(limits.seconds))
        self._use_servers()
        await self._engine.drop_restarted(self._session, self._servers)
        self._is_open.set()

    async def close(self) -> None:
        """Closes all connections."""
        await self._stack.aclose()

    async def generate(self, request: GenerationRequest, settings: GenerationSettings) -> SampledTokens:
        """Samples the response to `request`, over updates of weights. Raises EngineError, as `Replicas.generate`."""
        tokens: list[int] = []
        log_probs: list[float] = []
        versions: list[int] = []
        servers: set[str] = set()
        is_complete = False
        while not is_complete:
            await self._is_open.wait()
            attempts = Attempts(
                replace(
                    request,
                    tokens=[*request.tokens, *tokens],
                    seed=continued_seed(request.seed, len(tokens)),
                    partial=True,
                )
            )
            version, limits = (
                self._engine.version,
                replace(settings, max_new_tokens=settings.max_new_tokens - len(tokens)),
            )
            send = asyncio.ensure_future(
                self._engine.send_request(self._session, attempts, limits, self._servers, self._group_servers)
            )
            self._sends[send] = attempts
            try:
                await asyncio.wait([send])
            finally:
                del self._sends[send]
                send.cancel()
            if send.cancelled():  # by `pause` or `drain`
                continue
            send.result()
            result = attempts.result
            assert result is not None  # or it has raised
            tokens += result.tokens
            log_probs += result.log_probs
            versions += [version] * len(result.tokens)
            servers.add(f"{attempts.url} {self._losses[attempts.url]}")
            is_complete = not result.aborted or len(tokens) == settings.max_new_tokens
        return SampledTokens(tokens=tokens, log_probs=log_probs, versions=versions, servers=frozenset(servers))

    async def has_restarted(self, servers: Collection[str]) -> bool:
        """Whether one of `servers` has restarted since its last weights, so that its responses may be of others."""
        if self._engine.api.process_path is None:  # every reply names the version of its weights
            return False
        await self._is_open.wait()  # in an update the engine has processes already that did not sample these
        now = {f"{url} {self._losses[url]}": url for url in self._servers}
        if not set(servers) <= set(now):  # dropped meanwhile: what it was when it answered is not known
            return True
        return bool(
            await self._engine.drop_restarted(
                self._session, self._servers, drop_unreachable=False, among={now[name] for name in servers}
            )
        )

    # ---- updates of weights

    async def pause(self) -> None:
        """Holds requests back that no server has yet."""
        self._is_open.clear()
        for send, attempts in self._sends.items():
            if not attempts.is_sent:
                send.cancel()

    async def drain(self) -> None:
        """Waits for the replies to all requests, once servers have interrupted them. Others are sent again."""
        if self._sends:
            await asyncio.wait(set(self._sends), timeout=_REPLY_SECONDS)
        for send in self._sends:
            send.cancel()

    async def resume(self) -> None:
        """Goes on with the servers in use."""
        self._use_servers()
        self._is_open.set()

    def _use_servers(self) -> None:
        """Uses the engine's servers. Those that were dropped or restarted meanwhile count as others."""
        live = dict(self._engine.live)
        self._losses.update(
            url for url, process in self._processes.items() if url not in self._servers or live.get(url) != process
        )
        self._servers = {url: Server(url, self._engine.limits.in_flight) for url in live}
        self._group_servers, self._processes = {}, live
