"""Scores responses by the job's reward functions, one per domain, in parallel worker processes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Literal

import numpy as np

from roll_batching.errors import DataError
from roll_batching.jobs.config import JobConfig
from roll_batching.jobs.config.rewards import REWARDS
from roll_batching.jobs.rewards.contract import MOST_MARKS, Completion, PromptLine, Scored
from roll_batching.jobs.rewards.process import RewardLimits, RewardProcess
from roll_batching.jobs.texts.texts import Prompt

DOMAIN = "domain"
"""Key of a data file's line with the prompt's domain."""
_POLL_SECONDS = 0.05
_CHECKED = 64
"""Lines that one call of a worker checks."""
FailurePolicy = Literal["error", "zero", "drop"]


@dataclass(frozen=True, kw_only=True)
class RewardDomain:
    """A reward function and the prompts that it scores."""

    path: str
    """`package.module:function`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    """Name in metrics; empty without domains."""
    tags: tuple[str, ...] | None = None
    """Tags of the domain's prompts; None: all tags that no other domain has."""

    @property
    def runs_model_code(self) -> bool:
        """Whether its workers run code of the model on this machine: they get no secrets."""
        return self.path == _path("code_tests") and self.arguments.get("run") == "subprocess"


class RewardPool:
    """Calls the reward functions of `domains`, each in `workers` processes, which start at their first use.

    `tag` is the key of a line's tag. `failure` is for responses whose reward raises, times out, exits or returns no
    number: `error` ends the job, `zero` and `drop` give them reward 0 and mark them as failed.
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
            [RewardProcess(d.path, d.arguments, self.limits, secrets=not d.runs_model_code) for _ in range(workers)]
            for d in domains
        ]

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> list[str]:
        """Starts one worker per domain, which imports the function; returns the functions' notices.

        Raises ConfigError when a function cannot be found, imported or called with its arguments.
        """
        for workers in self._workers:
            workers[0].start()
        pairs = zip(self.domains, self._workers, strict=True)
        return [f"{domain.path}: {workers[0].notice}" for domain, workers in pairs if workers[0].notice]

    def close(self) -> None:
        """Ends all workers and their child processes. Safe to call twice."""
        for process in self._processes():
            process.close()

    def most_seconds(self, calls: int) -> float:
        """Longest time for `calls` calls: in sequence, each with a restart of its worker."""
        restart = 0.0 if self.failure == "error" else self.limits.start
        return self.limits.start + calls * (self.limits.seconds + restart)

    def domain_of(self, record: Mapping[str, Any]) -> int | None:
        """Index of the domain of a data file's line; None if it has none.

        The line's key `domain` decides if it names a domain (as in ROLL's `update_dataset_domain`), else its tag.
        """
        names = [domain.name for domain in self.domains]
        if record.get(DOMAIN) and record[DOMAIN] in names:
            return names.index(record[DOMAIN])
        tag, default = str(record.get(self.tag, "")), None
        for index, domain in enumerate(self.domains):
            if domain.tags is None:
                default = index
            elif tag in domain.tags:
                return index
        return default

    def unjudged(self, record: Mapping[str, Any]) -> str:
        """The error for a data file's line without a domain; empty if it has one, or a rollout function scores."""
        if not self.domains or self.domain_of(record) is not None:
            return ""
        by_domain = "" if record.get(DOMAIN) is None else f", nor for its domain ({DOMAIN!r}: {record[DOMAIN]!r})"
        return f"no reward is for its tag ({self.tag!r}: {record.get(self.tag)!r}){by_domain}"

    def score(self, completions: Sequence[Completion], ids: Sequence[int], *, seed: int) -> Scored:
        """Scores all completions. `ids` identify samples in errors, and with `seed` seed random numbers.

        Raises DataError, with sample, function and remedy, for the first failure under the policy `error`, and for a
        prompt without a domain. Without domains all rewards are 0.
        """
        if not self.domains:
            zeros = np.zeros(len(completions))
            return Scored(rewards=zeros, marks={}, failed=zeros > 0, failures=[], domains=[""] * len(completions))
        domains = [self._domain(completion, int(i)) for completion, i in zip(completions, ids, strict=True)]
        results: list[dict[str, Any]] = [{} for _ in completions]
        failures: list[str] = []
        samples = [int(i) for i in ids]

        def call(process: RewardProcess, index: int) -> None:
            process.call(completions[index], samples[index], seed)

        with contextlib.closing(self._results(call, domains)) as stream:
            for index, result in stream:
                if isinstance(result, DataError):
                    if self.failure == "error":
                        raise result
                    failures.append(str(result))
                    result = {"reward": 0.0, "marks": {}, "failed": True}
                results[index] = result
        names = sorted({name for result in results for name in result["marks"]})
        if len(names) > MOST_MARKS:
            raise DataError(
                f"reward function {self.domains[0].path} has used {len(names):,} names of marks, such as {names[0]!r} "
                f"and {names[-1]!r}: each is a metric, and {MOST_MARKS} are the most"
            )
        return Scored(
            rewards=np.array([result["reward"] for result in results], dtype=np.float64),
            marks={name: np.array([result["marks"].get(name, False) for result in results]) for name in names},
            failed=np.array(["failed" in result for result in results], dtype=bool),
            failures=failures,
            domains=[self.domains[domain].name for domain in domains],
        )

    def check(self, prompts: Sequence[Prompt]) -> list[str]:
        """Returns for each prompt why its reward cannot score it, or an empty text if it can.

        Raises ConfigError as `start`, and DataError where a check takes too long or ends its worker.
        """
        lines = [PromptLine(prompt=prompt.prompt, record=prompt.line, answer=prompt.answer) for prompt in prompts]
        batches: list[list[int]] = []
        domains: list[int] = []
        for domain, workers in enumerate(self._workers):
            members = [index for index, prompt in enumerate(prompts) if self.domain_of(prompt.line) == domain]
            if members:
                workers[0].start()
            if members and workers[0].checks:
                batches += [members[start : start + _CHECKED] for start in range(0, len(members), _CHECKED)]
                domains += [domain] * (len(batches) - len(domains))

        def call(process: RewardProcess, index: int) -> None:
            first, last = prompts[batches[index][0]], prompts[batches[index][-1]]
            process.check([lines[member] for member in batches[index]], f"the lines {first.source} to {last.source}")

        faults = [""] * len(prompts)
        with contextlib.closing(self._results(call, domains)) as stream:
            for index, result in stream:
                if isinstance(result, DataError):
                    raise result
                for member, fault in zip(batches[index], result["faults"], strict=True):
                    faults[member] = fault
        return faults

    def _domain(self, completion: Completion, sample: int) -> int:
        domain = self.domain_of(completion.record)
        if domain is None:
            raise DataError(f"sample {sample}: {self.unjudged(completion.record)}")
        return domain

    def _results(
        self, call: Callable[[RewardProcess, int], None], domains: Sequence[int]
    ) -> Generator[tuple[int, dict[str, Any] | DataError]]:
        """Runs one call per item of `domains`; yields (its index, its result) in the order of arrival.

        `call` starts a call in an idle process of its domain. Closing the generator early ends running calls.
        """
        waiting: list[deque[int]] = [deque() for _ in self.domains]
        for index, domain in enumerate(domains):
            waiting[domain].append(index)
        busy: dict[RewardProcess, int] = {}
        try:
            yield from self._run(busy, waiting, call)
        finally:
            for process in busy:
                process.close()

    def _run(
        self,
        busy: dict[RewardProcess, int],
        waiting: list[deque[int]],
        call: Callable[[RewardProcess, int], None],
    ) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
        while busy or any(waiting):
            for indices, workers in zip(waiting, self._workers, strict=True):
                for process in workers:
                    if indices and process not in busy:
                        busy[process] = index = indices.popleft()
                        call(process, index)
            wait([process.connection for process in busy if process.connection is not None], _POLL_SECONDS)
            for process, index in list(busy.items()):
                try:
                    result: dict[str, Any] | DataError | None = process.result()
                except DataError as error:
                    result = error
                if result is not None:
                    del busy[process]
                    yield index, result

    def _processes(self) -> Iterator[RewardProcess]:
        for workers in self._workers:
            yield from workers


def reward_of(config: JobConfig) -> RewardPool | None:
    """Makes the rewards of `config`, not yet started; None without an RL phase.

    The pool has no domains if a rollout function returns the rewards, or in distillation without rewards.
    """
    scored = config.has_reward or config.rollout_function or config.task == "distill"
    if config.is_supervised or not config.max_steps or not scored:
        return None
    domains = [
        RewardDomain(
            name=name,
            path=_path(reward.reward_function),
            arguments=reward.reward_args,
            tags=None if reward.tag_included is None else tuple(reward.tag_included),
        )
        for name, reward in config.rewards.items()
    ]
    if config.reward_function is not None:
        domains = [RewardDomain(path=_path(config.reward_function), arguments=config.reward_args)]
    return RewardPool(
        *domains,
        tag=config.actor_train.data_args.tag,
        workers=config.reward_workers,
        failure=config.reward_failure,
        limits=RewardLimits(seconds=config.reward_timeout, memory=config.reward_memory),
    )


def _path(name: str) -> str:
    """The dotted path of a registered name, which workers need; other paths unchanged."""
    entry = REWARDS.get(name)
    return name if entry is None else entry.target
