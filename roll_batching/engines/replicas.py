"""Engines that are reached by URL: many requests in flight, retries with limits, replicas that die are dropped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from roll_batching.engines.protocol import Answer, Malformed, Question
from roll_batching.errors import EngineError
from roll_batching.strategy.sampling import GenerationSettings

logger = logging.getLogger(__name__)

_SECONDS_FOR_HEALTH = 5.0
_LONGEST_PAUSE = 5.0
_BUSY = (408, 429)
"""Statuses below 500 that say nothing of the request itself."""


@dataclass(frozen=True)
class Call:
    """One POST request."""

    path: str
    body: Any = None
    parameters: Mapping[str, str] = field(default_factory=dict)


class Dialect(Protocol):
    """Requests and replies of one kind of server."""

    name: str
    health: str
    sleeps_with: str
    """What a server must be started with to sleep."""

    def call(self, question: Question, settings: GenerationSettings) -> Call:
        """The request for one response."""

    def answer(self, reply: Any, settings: GenerationSettings, version: int) -> Answer:
        """The response in a reply. Raises Malformed."""

    def update(self, folder: Path, version: int, *, asleep: bool) -> list[Call]:
        """What gives a server new weights, one request after the other; `asleep`: and what wakes it up."""

    def sleep(self) -> list[Call]:
        """What makes a server give its device memory back."""

    def updated(self, reply: Any) -> str | None:
        """What a reply to one of those says went wrong; None where nothing did."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How patiently servers are asked."""

    seconds: float = 600.0
    """For one attempt of one request, and for each request of an update."""
    in_flight: int = 128
    """Requests that a replica has at once."""
    retries: int = 3
    """Attempts of a request after the first, at other replicas where there are some."""


class _Failed(Exception):
    """An attempt that failed in a way that another one may not."""


class _Replica:
    """One server, for one round of questions."""

    def __init__(self, url: str, slots: int) -> None:
        self.url, self.slots, self.groups = url, asyncio.Semaphore(slots), 0


class Replicas:
    """Servers of one kind at `urls`, with the same weights each."""

    def __init__(self, urls: Sequence[str], dialect: Dialect, limits: EngineLimits | None = None) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.dialect, self.limits = dialect, limits or EngineLimits()
        self.version = 0
        self._live = self.urls
        self._reasons: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    @property
    def live(self) -> tuple[str, ...]:
        """The servers that answer."""
        return self._live

    def use(self, live: Sequence[str], version: int) -> None:
        """Ask these from now on, which have the weights of `version`."""
        self._live, self.version = tuple(live), version

    def seconds_to_answer(self, questions: int) -> float:
        """Every attempt of every question, at one server, `in_flight` at once, each as long as it may."""
        rounds = -(-questions * (self.limits.retries + 1) // self.limits.in_flight)
        return rounds * (self.limits.seconds + _SECONDS_FOR_HEALTH + _LONGEST_PAUSE)

    def seconds_to_update(self) -> float:
        """One request after the other, each as long as it may."""
        most = max(self.dialect.update(Path(), 0, asleep=True), self.dialect.sleep(), key=len)
        return len(most) * self.limits.seconds

    def figures(self) -> dict[str, float]:
        """Requests, attempts that failed and servers that were dropped since the last call; servers that answer."""
        counts, self._counts = self._counts, Counter()
        found = {f"engine_{name}": float(counts[name]) for name in ("requests", "failed_attempts", "dropped")}
        return {**found, "engine_replicas": float(len(self._live))}

    def generate(self, questions: Sequence[Question], settings: GenerationSettings) -> list[Answer]:
        """The answers, in the order of `questions`.

        Raises EngineError where a server refuses a request, an attempt too many has failed, or no server is left.
        """
        return asyncio.run(self._generate(questions, settings)) if questions else []

    def update_weights(self, folder: Path, version: int, *, asleep: bool = False) -> None:
        """Tells all servers, also those that were dropped, to read `folder`; those that do are asked from now on.

        `asleep`: they sleep, and wake up. Raises EngineError where none does.
        """
        calls = self.dialect.update(folder, version, asleep=asleep)
        wrong = asyncio.run(self._tell(self.urls, calls))
        self.use(self.urls, version)
        self._drop_all(wrong, f"took the weights in {folder}")

    def sleep(self) -> None:
        """Tells all servers to give their device memory back, until they get weights again. Nobody asks meanwhile.

        One that does not is dropped. Raises EngineError where none does.
        """
        wrong = asyncio.run(self._tell(self._live, self.dialect.sleep()))
        try:
            self._drop_all(wrong, "went to sleep")
        except EngineError as error:
            raise EngineError(
                f"{error}. Under is_offload_states an engine sleeps while the model trains: start its servers with "
                f"{self.dialect.sleeps_with}, or set is_offload_states to false where they have devices of their own"
            ) from None

    # ---- generating

    async def _generate(self, questions: Sequence[Question], settings: GenerationSettings) -> list[Answer]:
        replicas = {url: _Replica(url, self.limits.in_flight) for url in self._live}
        homes: dict[int, _Replica] = {}
        async with _session(self.limits.seconds) as session:
            tasks = [asyncio.ensure_future(self._ask(session, q, settings, replicas, homes)) for q in questions]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    async def _ask(
        self,
        session: Any,
        question: Question,
        settings: GenerationSettings,
        replicas: dict[str, _Replica],
        homes: dict[int, _Replica],
    ) -> Answer:
        call = self.dialect.call(question, settings)
        failures: list[str] = []
        failed: set[str] = set()
        while len(failures) <= self.limits.retries:
            replica = self._home(question.group, replicas, homes, failed)
            async with replica.slots:
                if replica.url not in replicas:  # it was dropped while this one waited
                    continue
                self._counts["requests"] += 1
                try:
                    reply = await self._post(session, replica.url, call)
                    return self.dialect.answer(reply, settings, self.version)
                except (_Failed, Malformed) as error:
                    failures.append(f"{replica.url}: {error}")
                    failed.add(replica.url)
                    self._counts["failed_attempts"] += 1
            if not await self._is_well(session, replica.url) and replicas.pop(replica.url, None) is not None:
                self._drop(replica.url, failures[-1])
            elif len(failures) <= self.limits.retries:
                await asyncio.sleep(min(_LONGEST_PAUSE, 0.1 * 2 ** len(failures)))
        raise EngineError(
            f"{self.dialect.name}: a request failed {len(failures)} times: {'; '.join(failures)}. Look at the servers' "
            "logs; actor_infer.engine_args has request_timeout and retries"
        )

    def _home(
        self, group: int, replicas: dict[str, _Replica], homes: dict[int, _Replica], failed: set[str]
    ) -> _Replica:
        """Where a question goes: where its group went, else to the server with the fewest groups."""
        if not replicas:
            said = "; ".join(self._reasons.values())
            raise EngineError(f"{self.dialect.name}: no server is left: {said or 'none was given'}")
        home = homes.get(group)
        if home is not None and home.url in replicas and home.url not in failed:
            return home
        others = [replica for url, replica in replicas.items() if url not in failed] or list(replicas.values())
        home = homes[group] = min(others, key=lambda replica: replica.groups)
        home.groups += 1
        return home

    def _drop(self, url: str, why: str) -> None:
        self._live = tuple(one for one in self._live if one != url)
        self._reasons[url] = why
        self._counts["dropped"] += 1
        logger.warning("%s is dropped until the next weights are sent: %s", url, why)

    # ---- weights and sleep

    async def _tell(self, urls: Sequence[str], calls: Sequence[Call]) -> dict[str, str]:
        """Makes these calls, one after the other, to all of `urls` at once; by URL what went wrong."""
        async with _session(self.limits.seconds) as session:
            said = await asyncio.gather(*(self._tell_one(session, url, calls) for url in urls))
        return {url: text for url, text in zip(urls, said, strict=True) if text is not None}

    async def _tell_one(self, session: Any, url: str, calls: Sequence[Call]) -> str | None:
        try:
            for call in calls:
                text = self.dialect.updated(await self._post(session, url, call))
                if text is not None:
                    return f"{call.path}: {text}"
        except (_Failed, EngineError) as error:
            return str(error)
        return None

    def _drop_all(self, wrong: Mapping[str, str], what: str) -> None:
        """Drops servers for the reasons in `wrong`. Raises EngineError, with all of them, where no other is left."""
        for url, text in wrong.items():
            self._drop(url, f"{url}: {text}")
        if not self._live:
            said = "; ".join(f"{url}: {text}" for url, text in wrong.items())
            raise EngineError(f"{self.dialect.name}: no server {what}: {said}")

    # ---- requests

    async def _post(self, session: Any, url: str, call: Call) -> Any:
        """The reply's JSON, or its text. Raises EngineError where it is refused, _Failed for what may pass."""
        import aiohttp

        try:
            async with session.post(url + call.path, json=call.body, params=call.parameters) as response:
                text = await response.text()
                status = response.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _Failed(f"{call.path}: {type(error).__name__} {error}".strip()) from None
        if status >= 500 or status in _BUSY:
            raise _Failed(f"{call.path}: status {status}: {text[:200]}")
        if status >= 400:
            raise EngineError(f"{url}{call.path} refuses the request with status {status}: {text[:500]}")
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text

    async def _is_well(self, session: Any, url: str) -> bool:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=_SECONDS_FOR_HEALTH)
        try:
            async with session.get(url + self.dialect.health, timeout=timeout) as response:
                return bool(response.status == 200)
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False


def _session(seconds: float) -> Any:
    try:
        import aiohttp
    except ImportError as error:
        raise EngineError("engines by URL need aiohttp: pip install 'roll-batching[engines]'") from error
    timeout = aiohttp.ClientTimeout(total=seconds)
    # Every request a connection of its own: one that a server cut in between would fail the next request.
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))
