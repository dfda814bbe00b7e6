"""All rewards of a job: one function per domain, each in processes that work side by side, failures by policy."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Literal

import numpy as np

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.rewards import REWARDS
from roll_batching.jobs.rewards.contract import MOST_MARKS, Completion, Scored
from roll_batching.jobs.rewards.process import RewardLimits, RewardProcess

DOMAIN = "domain"
"""Key of a prompt's line that names its domain."""
_SECONDS_BETWEEN_LOOKS = 0.05
FailurePolicy = Literal["error", "zero", "drop"]


@dataclass(frozen=True, kw_only=True)
class RewardDomain:
    """Which prompts one reward function judges."""

    path: str
    """`package.module:function`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """Its name in metrics; empty for a job's only one."""
    tags: tuple[str, ...] | None = None
    """The tags of its prompts; None: those that no other domain names."""

    @property
    def runs_foreign_code(self) -> bool:
        """Whether its processes start code of the model on this machine: keys are kept from them."""
        return self.path == _path("code_tests") and self.arguments.get("run") == "subprocess"


class RewardPool:
    """Calls the reward functions of `domains`, each in `workers` processes, which start when they are needed.

    `tag` is the key of a prompt's line that holds its tag. `failure` says what becomes of a response whose reward
    raises, hangs, exits, or returns no number: `error` ends the job, `zero` and `drop` give it 0 and mark it as failed.
    """

    def __init__(
        self,
        *domains: RewardDomain,
        tag: str = "tag",
        workers: int = 1,
        failure: FailurePolicy = "error",
        limits: RewardLimits | None = None,
    ) -> None:
        self.domains, self.tag, self.failure = domains, tag, failure
        self.limits = limits or RewardLimits()
        self._workers = [
            [RewardProcess(d.path, d.arguments, self.limits, secrets=not d.runs_foreign_code) for _ in range(workers)]
            for d in domains
        ]

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> list[str]:
        """Starts one process of each domain and imports its function. Notices of the functions.

        Raises ConfigError when one cannot be found, imported or called with its arguments.
        """
        for workers in self._workers:
            workers[0].start()
        named = zip(self.domains, self._workers, strict=True)
        return [f"{domain.path}: {workers[0].notice}" for domain, workers in named if workers[0].notice]

    def close(self) -> None:
        """Ends all processes and what they have started. Safe to call twice."""
        for process in self._processes():
            process.close()

    def most_seconds(self, calls: int) -> float:
        """How long `calls` calls may take at most: one after the other, each with its process anew."""
        again = 0.0 if self.failure == "error" else self.limits.start
        return self.limits.start + calls * (self.limits.seconds + again)

    def domain_of(self, record: Mapping[str, Any]) -> int | None:
        """Number of the domain that judges a prompt's line; None: there is none.

        The line's key `domain` says so where it names one (as in ROLL's `update_dataset_domain`), else its tag.
        """
        names = [domain.name for domain in self.domains]
        if record.get(DOMAIN) and record[DOMAIN] in names:
            return names.index(record[DOMAIN])
        given, rest = str(record.get(self.tag, "")), None
        for number, domain in enumerate(self.domains):
            if domain.tags is None:
                rest = number
            elif given in domain.tags:
                return number
        return rest

    def unjudged(self, record: Mapping[str, Any]) -> str:
        """What is said of a prompt's line that belongs to no domain; nothing of others."""
        if self.domain_of(record) is not None:
            return ""
        named = "" if record.get(DOMAIN) is None else f", nor for its domain ({DOMAIN!r}: {record[DOMAIN]!r})"
        return f"no reward is for its tag ({self.tag!r}: {record.get(self.tag)!r}){named}"

    def score(self, completions: Sequence[Completion], ids: Sequence[int], *, seed: int) -> Scored:
        """Judges each completion; `ids` name the samples in errors, and seed random numbers together with `seed`.

        Raises DataError naming sample, function and cure for the first failure under the policy `error`, and for a
        prompt of no domain.
        """
        homes = [self._home(completion, int(i)) for completion, i in zip(completions, ids, strict=True)]
        answers: list[dict[str, Any]] = [{} for _ in completions]
        failures: list[str] = []
        with contextlib.closing(self._answers(completions, [int(i) for i in ids], homes, seed)) as coming:
            for place, answer in coming:
                if isinstance(answer, DataError):
                    if self.failure == "error":
                        raise answer
                    failures.append(str(answer))
                    answer = {"reward": 0.0, "marks": {}, "failed": True}
                answers[place] = answer
        names = sorted({name for answer in answers for name in answer["marks"]})
        if len(names) > MOST_MARKS:
            raise DataError(
                f"reward function {self.domains[0].path} has used {len(names):,} names of marks, such as {names[0]!r} "
                f"and {names[-1]!r}: each is a metric, and {MOST_MARKS} are the most"
            )
        return Scored(
            rewards=np.array([answer["reward"] for answer in answers], dtype=np.float64),
            marks={name: np.array([answer["marks"].get(name, False) for answer in answers]) for name in names},
            failed=np.array(["failed" in answer for answer in answers], dtype=bool),
            failures=failures,
            domains=[self.domains[home].name for home in homes],
        )

    def _home(self, completion: Completion, sample: int) -> int:
        home = self.domain_of(completion.record)
        if home is None:
            raise DataError(f"sample {sample}: {self.unjudged(completion.record)}")
        return home

    def _answers(
        self, completions: Sequence[Completion], ids: list[int], homes: list[int], seed: int
    ) -> Generator[tuple[int, dict[str, Any] | DataError]]:
        """Answers as they come, each with the place of its completion. Whoever stops early ends what is under way."""
        left: list[deque[int]] = [deque() for _ in self.domains]
        for place, home in enumerate(homes):
            left[home].append(place)
        busy: dict[RewardProcess, int] = {}
        try:
            yield from self._while_busy(busy, left, completions, ids, seed)
        finally:
            for process in busy:
                process.close()

    def _while_busy(
        self,
        busy: dict[RewardProcess, int],
        left: list[deque[int]],
        completions: Sequence[Completion],
        ids: list[int],
        seed: int,
    ) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
        while busy or any(left):
            for places, workers in zip(left, self._workers, strict=True):
                for process in workers:
                    if places and process not in busy:
                        busy[process] = place = places.popleft()
                        process.ask(completions[place], ids[place], seed)
            wait([process.connection for process in busy if process.connection is not None], _SECONDS_BETWEEN_LOOKS)
            for process, place in list(busy.items()):
                try:
                    answer: dict[str, Any] | DataError | None = process.answer()
                except DataError as error:
                    answer = error
                if answer is not None:
                    del busy[process]
                    yield place, answer

    def _processes(self) -> Iterator[RewardProcess]:
        for workers in self._workers:
            yield from workers


def reward_of(job: JobConfig) -> RewardPool | None:
    """The rewards that `job` names, not yet started; None for a job without an RL phase."""
    if job.task != "grpo" or not job.max_steps or not (job.rewards or job.reward_function):
        return None
    domains = [
        RewardDomain(
            name=name,
            path=_path(one.reward_function),
            arguments=one.reward_args,
            tags=None if one.tag_included is None else tuple(one.tag_included),
        )
        for name, one in job.rewards.items()
    ]
    if job.reward_function is not None:
        domains = [RewardDomain(path=_path(job.reward_function), arguments=job.reward_args)]
    return RewardPool(
        *domains,
        tag=job.actor_train.data_args.tag,
        workers=job.reward_workers,
        failure=job.reward_failure,
        limits=RewardLimits(seconds=job.reward_timeout, memory=job.reward_memory),
    )


def _path(name: str) -> str:
    """Where a function stands: its process need not know names."""
    entry = REWARDS.get(name)
    return name if entry is None else entry.target
