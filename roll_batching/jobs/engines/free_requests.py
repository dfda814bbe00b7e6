"""Requests to an engine's servers one by one, as rollout functions make them: no rollout waits for another."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

from roll_batching.jobs.engines.protocol import GenerationRequest, GenerationResult
from roll_batching.jobs.engines.replicas import Attempts, Replicas, Server
from roll_batching.jobs.processes.requests import open_session
from roll_batching.strategy.sampling import GenerationSettings


class FreeRequests:
    """Sends requests to `engine` in one event loop, between `open` and `close`. Calls may overlap.

    Limits are the engine's: a server has at most `max_in_flight` requests at once, and further ones wait for a slot.
    """

    def __init__(self, engine: Replicas) -> None:
        self._engine = engine
        self._stack = contextlib.AsyncExitStack()
        self._session: Any = None
        self._servers: dict[str, Server] = {}
        self._group_servers: dict[int, Server] = {}

    async def open(self) -> None:
        """Opens connections, and drops servers that have restarted since their last weights. Raises EngineError."""
        limits = self._engine.limits
        self._session = await self._stack.enter_async_context(open_session(limits.seconds))
        self._servers = {url: Server(url, limits.in_flight) for url in self._engine.live}
        await self._engine.drop_restarted(self._session, self._servers)

    async def close(self) -> None:
        """Closes all connections."""
        await self._stack.aclose()

    async def generate(self, request: GenerationRequest, settings: GenerationSettings) -> tuple[GenerationResult, str]:
        """Returns the response and the URL of its server. Raises EngineError, as `Replicas.generate`."""
        attempts = Attempts(request)
        await self._engine.send_request(self._session, attempts, settings, self._servers, self._group_servers)
        assert attempts.result is not None  # or it has raised
        return attempts.result, attempts.url

    async def has_restarted(self, urls: Collection[str]) -> bool:
        """Whether one of `urls` has restarted since its last weights, so that its responses may be of others."""
        among = {url for url in urls if url in self._servers}
        if self._engine.api.process_path is None:  # every reply names the version of its weights
            return False
        if len(among) < len(set(urls)):  # dropped meanwhile: what it was when it answered is not known
            return True
        return bool(
            await self._engine.drop_restarted(self._session, self._servers, drop_unreachable=False, among=among)
        )
