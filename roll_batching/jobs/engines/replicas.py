"""Rollout engine over HTTP: sends concurrent requests to several servers, retries, and drops failed servers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roll_batching.errors import EngineError
from roll_batching.jobs.config.worker import EngineArgs
from roll_batching.jobs.engines.probe import GapLimit, Probe
from roll_batching.jobs.engines.protocol import (
    GenerationRequest,
    GenerationResult,
    MalformedReply,
    ServerApi,
    ServerProcess,
    check_prompt_tokens,
)
from roll_batching.jobs.engines.routed_experts import checked_experts
from roll_batching.jobs.processes.requests import (
    HEALTH_SECONDS,
    Call,
    RequestFailed,
    excerpt,
    get,
    is_healthy,
    open_session,
    post,
    retry_pause,
)
from roll_batching.strategy.sampling import GenerationSettings

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 5.0
_PROCESS_SECONDS = 30.0
"""Limit for a busy server to identify its process."""
_RESTARTED = "the server was started again, and has not the weights that were sent"


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Time limits, concurrency and retries of requests to servers."""

    seconds: float = 600.0
    """For one attempt of a generation request, and for each request of a weight update."""
    in_flight: int = 128
    """Concurrent requests per server."""
    retries: int = 3
    """Attempts of a request after the first, at other servers where there are any."""


def limits_of(settings: EngineArgs) -> EngineLimits:
    """The limits in a job's settings."""
    return EngineLimits(seconds=settings.request_timeout, in_flight=settings.max_in_flight, retries=settings.retries)


class Server:
    """One server, while requests are sent in one event loop."""

    def __init__(self, url: str, in_flight: int) -> None:
        self.url, self.slots, self.groups = url, asyncio.Semaphore(in_flight), 0


class Attempts:
    """One request: its failed attempts, and its result."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.is_sent = False
        """Whether a server has it and has not replied."""
        self.failures: list[str] = []
        self.failed_urls: set[str] = set()
        self.result: GenerationResult | None = None
        self.url = ""
        """Server that sent the result."""


class Replicas:
    """An `Engine` of several servers of one kind at `urls`, all with the same weights."""

    def __init__(self, urls: Sequence[str], api: ServerApi, limits: EngineLimits | None = None) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.api, self.limits = api, limits or EngineLimits()
        self.version = 0
        self._live: dict[str, ServerProcess | None] = dict.fromkeys(self.urls)
        self._drop_reasons: dict[str, str] = {}
        self._gap_limits: dict[str, GapLimit] = {}
        self._counts: Counter[str] = Counter()

    @property
    def live(self) -> Mapping[str, ServerProcess | None]:
        """Servers in use, with their processes if replies do not name the weights' version."""
        return self._live

    def set_live(self, live: Mapping[str, ServerProcess | None], version: int) -> None:
        """Sets the servers in use, which have the weights of `version`."""
        self._live, self.version = dict(live), version

    def generation_timeout(self, requests: int) -> float:
        """Longest time for `requests`, in seconds: all attempts on one server, each up to its time limit."""
        rounds = -(-requests * (self.limits.retries + 1) // self.limits.in_flight)
        process_checks = 0.0 if self.api.process_path is None else (2 + self.limits.retries) * _PROCESS_SECONDS
        return rounds * (self.limits.seconds + HEALTH_SECONDS + _LONGEST_PAUSE) + process_checks

    def update_timeout(self) -> float:
        """Longest time for a weight update with its check, or for going to sleep: all calls, each up to its limit."""
        update = [*self.api.before_update(asleep=True), *self.api.after_update(asleep=True)]
        process_checks = 0.0 if self.api.process_path is None else 2 * _PROCESS_SECONDS
        return max(2 + len(update), len(self.api.sleep_calls())) * self.limits.seconds + process_checks

    def metrics(self) -> dict[str, float]:
        """Requests, failed attempts and dropped servers since the last call; servers in use."""
        counts, self._counts = self._counts, Counter()
        metrics = {f"engine_{name}": float(counts[name]) for name in ("requests", "failed_attempts", "dropped")}
        return {**metrics, "engine_replicas": float(len(self._live))}

    def generate(self, requests: Sequence[GenerationRequest], settings: GenerationSettings) -> list[GenerationResult]:
        """Results in the order of `requests`.

        Raises EngineError when a server refuses a request, after too many failed attempts, and without servers.
        """
        return asyncio.run(self._generate(requests, settings)) if requests else []

    def update_weights(self, folder: Path, version: int, *, asleep: bool = False) -> None:
        """Loads the model directory `folder` on all servers, also on dropped ones, which are used again if they do.

        `asleep`: the servers sleep and are woken first. Raises EngineError when no server loads the directory.
        """
        before, after = self.api.before_update(asleep=asleep), self.api.after_update(asleep=asleep)
        processes: dict[str, ServerProcess | None] = {}

        async def update(session: Any, url: str) -> None:
            process = await self._process(session, url)
            for call in (*before, self.api.load_call(folder, version), *after):
                self.check_reply(call, await post(session, url, call))
            if await self._process(session, url) != process:
                raise RequestFailed(_RESTARTED)
            processes[url] = process

        errors = self.on_each(self.urls, update)
        self.set_live({url: processes.get(url) for url in self.urls}, version)
        self.drop(
            errors,
            f"took the weights in {folder}",
            "Servers must run at actor_infer.engine_args.urls and be able to read that folder (weights_folder)",
        )

    def check_weights(self, probe: Probe) -> None:
        """Drops servers whose log-probs of `probe` are not the trainer's. Raises EngineError when none has them."""
        call = self.api.score_call(probe.tokens)

        async def compare(session: Any, url: str) -> None:
            gap = probe.gap(self.api.parse_scores(await post(session, url, call)))
            self._gap_limits.setdefault(url, GapLimit()).check(gap, probe.largest_gap)

        self.drop(
            self.on_each(tuple(self._live), compare),
            "has the weights that were sent",
            "See docs/rollout-engines.md, Weight updates",
        )

    def sleep(self) -> None:
        """Has all servers free their device memory until the next weights. There must be no requests meanwhile.

        A server that fails to is dropped. Raises EngineError when all fail.
        """
        errors = self.send_calls(tuple(self._live), self.api.sleep_calls())
        self.drop(
            errors,
            "went to sleep",
            "Under is_offload_states an engine sleeps while the model trains: start its servers with "
            f"{self.api.sleep_options}, or set is_offload_states to false where they have separate devices",
        )

    # ---- all servers at once

    def send_calls(self, urls: Sequence[str], calls: Sequence[Call]) -> dict[str, str]:
        """Sends `calls` in order to each of `urls`, to all servers concurrently; returns errors by URL."""

        async def send(session: Any, url: str) -> None:
            for call in calls:
                self.check_reply(call, await post(session, url, call))

        return self.on_each(urls, send)

    def on_each(self, urls: Sequence[str], work: Callable[[Any, str], Awaitable[None]]) -> dict[str, str]:
        """Runs `work(session, url)` for all of `urls` concurrently; returns errors by URL."""

        async def run(session: Any, url: str) -> str | None:
            try:
                await work(session, url)
            except (RequestFailed, EngineError, MalformedReply) as error:
                return str(error)
            return None

        async def run_all() -> list[str | None]:
            async with open_session(self.limits.seconds) as session:
                return list(await asyncio.gather(*(run(session, url) for url in urls)))

        errors = asyncio.run(run_all())
        return {url: error for url, error in zip(urls, errors, strict=True) if error is not None}

    def check_reply(self, call: Call, reply: Any) -> None:
        """Raises RequestFailed when the reply to a control call is not JSON, or reports an error."""
        if isinstance(reply, str) and reply:
            raise RequestFailed(f"{call.path}: the reply is not JSON: {excerpt(reply)}")
        error = self.api.error_in(reply)
        if error is not None:
            raise RequestFailed(f"{call.path}: {error}")

    def drop(self, errors: Mapping[str, str], action: str, cure: str) -> None:
        """Drops the servers with `errors`, by URL. Raises EngineError when no other is left.

        The message has all errors, the `action` in which all servers failed ("went to sleep"), and the `cure`.
        """
        self._drop({url: f"{url}: {error}" for url, error in errors.items()})
        if not self._live:
            reasons = "; ".join(f"{url}: {error}" for url, error in errors.items())
            raise EngineError(f"{self.api.name}: no server {action}: {reasons}. {cure}")

    # ---- generation

    async def _generate(
        self, requests: Sequence[GenerationRequest], settings: GenerationSettings
    ) -> list[GenerationResult]:
        servers = {url: Server(url, self.limits.in_flight) for url in self._live}
        group_servers: dict[int, Server] = {}
        attempts = [Attempts(request) for request in requests]
        async with open_session(self.limits.seconds) as session:
            await self.drop_restarted(session, servers)
            while pending := [request_attempts for request_attempts in attempts if request_attempts.result is None]:
                tasks = [
                    asyncio.ensure_future(
                        self.send_request(session, request_attempts, settings, servers, group_servers)
                    )
                    for request_attempts in pending
                ]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                # Results of a server that restarted in between are of its first weights: they are requested again.
                restarted = await self.drop_restarted(session, servers, drop_unreachable=False)
                for request_attempts in attempts:
                    if request_attempts.url in restarted:
                        self._count_failure(request_attempts, request_attempts.url, _RESTARTED)
                        request_attempts.result, request_attempts.url = None, ""
        return [request_attempts.result for request_attempts in attempts if request_attempts.result is not None]

    async def send_request(
        self,
        session: Any,
        attempts: Attempts,
        settings: GenerationSettings,
        servers: dict[str, Server],
        group_servers: dict[int, Server],
    ) -> None:
        """Sends one request until it succeeds, to other servers after failures; raises EngineError after the last."""
        call = self.api.generation_call(attempts.request, settings)
        while len(attempts.failures) <= self.limits.retries:
            server = self._choose_server(attempts.request.group, servers, group_servers, attempts.failed_urls)
            async with server.slots:
                if server.url not in servers:  # dropped while this request waited for a slot
                    continue
                self._counts["requests"] += 1
                attempts.is_sent = True
                try:
                    reply = await post(session, server.url, call)
                    attempts.result = self._result(attempts.request, reply, settings)
                    attempts.url = server.url
                    return
                except (RequestFailed, MalformedReply) as error:
                    self._count_failure(attempts, server.url, str(error))
                finally:
                    attempts.is_sent = False
            if not await is_healthy(session, server.url + self.api.health_path):
                self._drop_one(servers, server.url, attempts.failures[-1])
            elif len(attempts.failures) <= self.limits.retries:
                await asyncio.sleep(retry_pause(len(attempts.failures), 0.2, most=_LONGEST_PAUSE))
        raise EngineError(
            f"{self.api.name}: a request failed {len(attempts.failures)} times: {'; '.join(attempts.failures)}. Look "
            "at the servers' logs; actor_infer.engine_args has request_timeout and retries"
        )

    def _result(self, request: GenerationRequest, reply: Any, settings: GenerationSettings) -> GenerationResult:
        """The response in a reply, with experts where they were requested. Raises MalformedReply."""
        result = self.api.parse_generation(reply, settings, self.version)
        if result.aborted and not request.partial:
            raise MalformedReply("the request was aborted")
        if request.images is not None:
            check_prompt_tokens(self.api, reply, len(request.tokens))
        if request.mixture is None:
            return result
        raw = self.api.parse_experts(reply)
        return replace(result, experts=checked_experts(raw, request.mixture, len(request.tokens), result))

    def _count_failure(self, attempts: Attempts, url: str, reason: str) -> None:
        attempts.failures.append(f"{url}: {reason}")
        attempts.failed_urls.add(url)
        self._counts["failed_attempts"] += 1

    async def _process(self, session: Any, url: str) -> ServerProcess | None:
        """The process at `url`; None if replies name the weights' version. Raises RequestFailed, MalformedReply."""
        if self.api.process_path is None:
            return None
        try:
            reply = await asyncio.wait_for(get(session, url, self.api.process_path), _PROCESS_SECONDS)
        except TimeoutError:
            raise RequestFailed(f"it did not identify its process within {_PROCESS_SECONDS:g} seconds") from None
        except EngineError as error:  # the server lacks the path
            raise RequestFailed(f"it does not identify its process, so a restart would go unnoticed: {error}") from None
        return self.api.parse_process(reply)

    async def drop_restarted(
        self,
        session: Any,
        servers: dict[str, Server],
        *,
        drop_unreachable: bool = True,
        among: Collection[str] | None = None,
    ) -> set[str]:
        """Drops servers that restarted since their last weights; returns the URLs of these.

        `drop_unreachable`: also drops servers that do not identify their process. `among`: looks at these URLs only.
        """
        expected = dict(self._live)  # calls overlap, also of other threads, and drop servers meanwhile

        async def check(url: str) -> str | None:
            try:
                return None if await self._process(session, url) == expected.get(url) else _RESTARTED
            except (RequestFailed, MalformedReply) as error:
                return str(error) if drop_unreachable else None

        urls = [url for url in servers if among is None or url in among]
        reasons = dict(zip(urls, await asyncio.gather(*map(check, urls)), strict=True))
        for url, reason in reasons.items():
            if reason is not None:
                self._drop_one(servers, url, f"{url}: {reason}")
        return {url for url, reason in reasons.items() if reason == _RESTARTED}

    def _drop_one(self, servers: dict[str, Server], url: str, reason: str) -> None:
        if servers.pop(url, None) is not None:
            self._drop({url: reason})

    def _choose_server(
        self, group: int, servers: dict[str, Server], group_servers: dict[int, Server], failed_urls: set[str]
    ) -> Server:
        """Chooses the server of the request's group, whose cache has the prompt; else that with the fewest groups."""
        if not servers:
            reasons = "; ".join(self._drop_reasons.values())
            raise EngineError(
                f"{self.api.name}: no server is left: {reasons or 'engine_args.urls is empty'}. Look at the servers' "
                "logs, start them again, and resume from the last checkpoint"
            )
        current = group_servers.get(group)
        if current is not None and current.url in servers and current.url not in failed_urls:
            return current
        others = [server for url, server in servers.items() if url not in failed_urls] or list(servers.values())
        chosen = group_servers[group] = min(others, key=lambda server: server.groups)
        chosen.groups += 1
        return chosen

    def _drop(self, reasons: Mapping[str, str]) -> None:
        """Drops the servers in `reasons`, by URL, and logs why, unless none is left."""
        for url in reasons:
            self._live.pop(url, None)
        self._drop_reasons |= reasons
        self._counts["dropped"] += len(reasons)
        for url, reason in reasons.items() if self._live else ():  # else an error with all reasons follows
            logger.warning("%s is dropped until the next weights are sent: %s", url, reason)
