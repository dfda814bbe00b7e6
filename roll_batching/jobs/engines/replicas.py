"""Engines that are reached by URL: many requests in flight, retries with limits, replicas that die are dropped."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.dialect import Call, Dialect
from roll_batching.jobs.engines.protocol import Answer, Malformed, Question, ServerProcess, shown
from roll_batching.jobs.engines.requests import SECONDS_FOR_HEALTH, Failed, get, is_well, open_session, post
from roll_batching.strategy.sampling import GenerationSettings

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 5.0
_SECONDS_TO_TELL = 30.0
"""For a busy server to say which process it is."""
_RESTARTED = "the server was started again, and has not the weights that were sent"


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


class _Asked:
    """One question of a round, and what became of it."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.failures: list[str] = []
        self.failed: set[str] = set()
        """Servers at which it failed."""
        self.answer: Answer | None = None
        self.url = ""
        """Who answered."""


class Replicas:
    """Servers of one kind at `urls`, with the same weights each."""

    def __init__(self, urls: Sequence[str], dialect: Dialect, limits: EngineLimits | None = None) -> None:
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.dialect, self.limits = dialect, limits or EngineLimits()
        self.version = 0
        self._live: dict[str, ServerProcess | None] = dict.fromkeys(self.urls)
        self._reasons: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    @property
    def live(self) -> Mapping[str, ServerProcess | None]:
        """The servers that answer, and their processes where their answers do not tell their weights."""
        return self._live

    def use(self, live: Mapping[str, ServerProcess | None], version: int) -> None:
        """Ask these from now on, which have the weights of `version`."""
        self._live, self.version = dict(live), version

    def seconds_to_answer(self, questions: int) -> float:
        """Every attempt of every question, at one server, `in_flight` at once, each as long as it may."""
        rounds = -(-questions * (self.limits.retries + 1) // self.limits.in_flight)
        told = 0.0 if self.dialect.about_process is None else (2 + self.limits.retries) * _SECONDS_TO_TELL
        return rounds * (self.limits.seconds + SECONDS_FOR_HEALTH + _LONGEST_PAUSE) + told

    def seconds_to_update(self) -> float:
        """One request after the other, each as long as it may."""
        update = [*self.dialect.before_update(asleep=True), *self.dialect.after_update(asleep=True)]
        told = 0.0 if self.dialect.about_process is None else 2 * _SECONDS_TO_TELL
        return max(1 + len(update), len(self.dialect.sleep())) * self.limits.seconds + told

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
        processes: dict[str, ServerProcess | None] = {}

        async def updated(session: Any, url: str) -> None:
            process = await self._process(session, url)
            for call in (*before, self.dialect.read(folder, version), *after):
                self.heard(call, await post(session, url, call))
            if await self._process(session, url) != process:
                raise Failed(_RESTARTED)
            processes[url] = process

        wrong = self.each(self.urls, updated)
        self.use({url: processes.get(url) for url in self.urls}, version)
        self.drop(
            wrong,
            f"took the weights in {folder}",
            "Servers must run at actor_infer.engine_args.urls and be able to read that folder (weights_folder)",
        )

    def sleep(self) -> None:
        """Tells all servers to give their device memory back, until they get weights again. Nobody asks meanwhile.

        One that does not is dropped. Raises EngineError where none does.
        """
        wrong = self.tell(tuple(self._live), self.dialect.sleep())
        self.drop(
            wrong,
            "went to sleep",
            "Under is_offload_states an engine sleeps while the model trains: start its servers with "
            f"{self.dialect.sleeps_with}, or set is_offload_states to false where they have devices of their own",
        )

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
        """Raises Failed where a reply says that a call went wrong, or is none of an engine's."""
        if isinstance(reply, str) and reply:
            raise Failed(f"{call.path}: it answers what is no JSON: {shown(reply)}")
        text = self.dialect.updated(reply)
        if text is not None:
            raise Failed(f"{call.path}: {text}")

    def drop(self, wrong: Mapping[str, str], what: str, cure: str) -> None:
        """Drops servers for the reasons in `wrong`. Raises EngineError where no other is left.

        Its message has all reasons, `what` none of them did, and the `cure`.
        """
        self._drop({url: f"{url}: {text}" for url, text in wrong.items()})
        if not self._live:
            said = "; ".join(f"{url}: {text}" for url, text in wrong.items())
            raise EngineError(f"{self.dialect.name}: no server {what}: {said}. {cure}")

    # ---- generating

    async def _generate(self, questions: Sequence[Question], settings: GenerationSettings) -> list[Answer]:
        replicas = {url: _Replica(url, self.limits.in_flight) for url in self._live}
        homes: dict[int, _Replica] = {}
        asked = [_Asked(question) for question in questions]
        async with open_session(self.limits.seconds) as opened:
            await self._drop_changed(opened, replicas)
            while wanted := [one for one in asked if one.answer is None]:
                tasks = [asyncio.ensure_future(self._ask(opened, one, settings, replicas, homes)) for one in wanted]
                try:
                    await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()
                restarted = await self._drop_changed(opened, replicas, unreachable=False)
                for one in asked:
                    if one.url in restarted:
                        self._failed(one, one.url, _RESTARTED)
                        one.answer, one.url = None, ""
        return [one.answer for one in asked if one.answer is not None]

    async def _ask(
        self,
        session: Any,
        asked: _Asked,
        settings: GenerationSettings,
        replicas: dict[str, _Replica],
        homes: dict[int, _Replica],
    ) -> None:
        call = self.dialect.call(asked.question, settings)
        while len(asked.failures) <= self.limits.retries:
            replica = self._home(asked.question.group, replicas, homes, asked.failed)
            async with replica.slots:
                if replica.url not in replicas:  # it was dropped while this one waited
                    continue
                self._counts["requests"] += 1
                try:
                    reply = await post(session, replica.url, call)
                    asked.answer = self.dialect.answer(reply, settings, self.version)
                    asked.url = replica.url
                    return
                except (Failed, Malformed) as error:
                    self._failed(asked, replica.url, str(error))
            if not await is_well(session, replica.url + self.dialect.health):
                self._drop_one(replicas, replica.url, asked.failures[-1])
            elif len(asked.failures) <= self.limits.retries:
                await asyncio.sleep(min(_LONGEST_PAUSE, 0.1 * 2 ** len(asked.failures)))
        raise EngineError(
            f"{self.dialect.name}: a request failed {len(asked.failures)} times: {'; '.join(asked.failures)}. Look at "
            "the servers' logs; actor_infer.engine_args has request_timeout and retries"
        )

    def _failed(self, asked: _Asked, url: str, why: str) -> None:
        asked.failures.append(f"{url}: {why}")
        asked.failed.add(url)
        self._counts["failed_attempts"] += 1

    async def _process(self, session: Any, url: str) -> ServerProcess | None:
        """The process that answers at `url`, where answers do not tell their weights. Raises Failed, Malformed."""
        if self.dialect.about_process is None:
            return None
        try:
            about = await asyncio.wait_for(get(session, url, self.dialect.about_process), _SECONDS_TO_TELL)
        except TimeoutError:
            raise Failed(f"it did not say which process it is within {_SECONDS_TO_TELL:g} seconds") from None
        except EngineError as error:  # a path that it does not have
            raise Failed(f"it does not say which process it is, so that a restart would be missed: {error}") from None
        return self.dialect.process(about)

    async def _drop_changed(self, session: Any, replicas: dict[str, _Replica], *, unreachable: bool = True) -> set[str]:
        """Drops servers that were started again since their last weights, which are returned.

        `unreachable`: also those that do not say which process they are.
        """

        async def check(url: str) -> str | None:
            try:
                return None if await self._process(session, url) == self._live[url] else _RESTARTED
            except (Failed, Malformed) as error:
                return str(error) if unreachable else None

        urls = list(replicas)
        faults = dict(zip(urls, await asyncio.gather(*map(check, urls)), strict=True))
        for url, why in faults.items():
            if why is not None:
                self._drop_one(replicas, url, f"{url}: {why}")
        return {url for url, why in faults.items() if why == _RESTARTED}

    def _drop_one(self, replicas: dict[str, _Replica], url: str, why: str) -> None:
        if replicas.pop(url, None) is not None:
            self._drop({url: why})

    def _home(
        self, group: int, replicas: dict[str, _Replica], homes: dict[int, _Replica], failed: set[str]
    ) -> _Replica:
        """Where a question goes: where its group went, else to the server with the fewest groups."""
        if not replicas:
            said = "; ".join(self._reasons.values())
            raise EngineError(
                f"{self.dialect.name}: no server is left: {said or 'none was given'}. Look at the servers' logs, start "
                "them again, and resume from the last checkpoint"
            )
        home = homes.get(group)
        if home is not None and home.url in replicas and home.url not in failed:
            return home
        others = [replica for url, replica in replicas.items() if url not in failed] or list(replicas.values())
        home = homes[group] = min(others, key=lambda replica: replica.groups)
        home.groups += 1
        return home

    def _drop(self, reasons: Mapping[str, str]) -> None:
        """Drops servers, by URL with what is wrong with them."""
        for url in reasons:
            self._live.pop(url, None)
        self._reasons |= reasons
        self._counts["dropped"] += len(reasons)
        for url, why in reasons.items() if self._live else ():  # where none is left, an error with all reasons follows
            logger.warning("%s is dropped until the next weights are sent: %s", url, why)
