"""Engines that are reached by URL: many requests in flight, retries with limits, replicas that die are dropped."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.engines.dialect import Call, Dialect
from roll_batching.engines.protocol import Answer, Malformed, Question
from roll_batching.engines.requests import SECONDS_FOR_HEALTH, Failed, is_well, open_session, post
from roll_batching.errors import EngineError
from roll_batching.strategy.sampling import GenerationSettings

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 5.0


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How patiently servers are asked."""

    seconds: float = 600.0
    """For one attempt of one request, and for each request of an update."""
    in_flight: int = 128
    """Requests that a replica has at once."""
    retries: int = 3
    """Attempts of a request after the first, at other replicas where there are some."""


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
        return rounds * (self.limits.seconds + SECONDS_FOR_HEALTH + _LONGEST_PAUSE)

    def seconds_to_update(self) -> float:
        """One request after the other, each as long as it may."""
        update = [*self.dialect.before_update(asleep=True), *self.dialect.after_update(asleep=True)]
        return max(1 + len(update), len(self.dialect.sleep())) * self.limits.seconds

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
        before, after = self.dialect.before_update(asleep=asleep), self.dialect.after_update(asleep=asleep)
        wrong = self.tell(self.urls, [*before, self.dialect.read(folder, version), *after])
        self.use(self.urls, version)
        self.drop(wrong, f"took the weights in {folder}")

    def sleep(self) -> None:
        """Tells all servers to give their device memory back, until they get weights again. Nobody asks meanwhile.

        One that does not is dropped. Raises EngineError where none does.
        """
        wrong = self.tell(self._live, self.dialect.sleep())
        try:
            self.drop(wrong, "went to sleep")
        except EngineError as error:
            raise EngineError(
                f"{error}. Under is_offload_states an engine sleeps while the model trains: start its servers with "
                f"{self.dialect.sleeps_with}, or set is_offload_states to false where they have devices of their own"
            ) from None

    # ---- all servers at once

    def tell(self, urls: Sequence[str], calls: Sequence[Call]) -> dict[str, str]:
        """Makes these calls, one after the other, to all of `urls` at once; by URL what went wrong."""

        async def told(session: Any, url: str) -> None:
            for call in calls:
                self.heard(call, await post(session, url, call))

        return self.each(urls, told)

    def each(self, urls: Sequence[str], work: Callable[[Any, str], Awaitable[None]]) -> dict[str, str]:
        """`work` with a session for requests, for all of `urls` at once; by URL what went wrong."""

        async def done(session: Any, url: str) -> str | None:
            try:
                await work(session, url)
            except (Failed, EngineError, Malformed) as error:
                return str(error)
            return None

        async def everywhere() -> list[str | None]:
            async with open_session(self.limits.seconds) as opened:
                return list(await asyncio.gather(*(done(opened, url) for url in urls)))

        said = asyncio.run(everywhere())
        return {url: text for url, text in zip(urls, said, strict=True) if text is not None}

    def heard(self, call: Call, reply: Any) -> None:
        """Raises Failed where a reply says that a call went wrong."""
        text = self.dialect.updated(reply)
        if text is not None:
            raise Failed(f"{call.path}: {text}")

    def drop(self, wrong: Mapping[str, str], what: str) -> None:
        """Drops servers for the reasons in `wrong`. Raises EngineError, with all of them, where no other is left."""
        for url, text in wrong.items():
            self._drop(url, f"{url}: {text}")
        if not self._live:
            said = "; ".join(f"{url}: {text}" for url, text in wrong.items())
            raise EngineError(f"{self.dialect.name}: no server {what}: {said}")

    # ---- generating

    async def _generate(self, questions: Sequence[Question], settings: GenerationSettings) -> list[Answer]:
        replicas = {url: _Replica(url, self.limits.in_flight) for url in self._live}
        homes: dict[int, _Replica] = {}
        async with open_session(self.limits.seconds) as opened:
            tasks = [asyncio.ensure_future(self._ask(opened, q, settings, replicas, homes)) for q in questions]
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
                    reply = await post(session, replica.url, call)
                    return self.dialect.answer(reply, settings, self.version)
                except (Failed, Malformed) as error:
                    failures.append(f"{replica.url}: {error}")
                    failed.add(replica.url)
                    self._counts["failed_attempts"] += 1
            if (
                not await is_well(session, replica.url + self.dialect.health)
                and replicas.pop(replica.url, None) is not None
            ):
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
