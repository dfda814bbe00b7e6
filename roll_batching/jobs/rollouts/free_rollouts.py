"""Rollouts that run free: each asks an engine's servers for itself, and goes on while weights change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll_batching.jobs.engines.free_requests import FreeRequests
from roll_batching.jobs.engines.protocol import GenerationRequest, SampledTokens
from roll_batching.jobs.engines.replicas import Replicas
from roll_batching.jobs.rollouts.contract import LoadedRolloutFunction, RolloutPrompt, TokenRequest
from roll_batching.jobs.rollouts.function_calls import FunctionCalls
from roll_batching.jobs.rollouts.sample_checks import CheckedRollout
from roll_batching.jobs.seeds import call_seed
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.strategy import GenerationSettings


class EngineSender:
    """Sends the requests of rollouts to an engine; see `contract.Sender`. Its prompts are numbered as those of calls.

    `settings` without their seed: prompts bring their step's.
    """

    def __init__(self, requests: FreeRequests, settings: GenerationSettings) -> None:
        self._requests, self._settings = requests, settings
        self._seeds: dict[int, tuple[int, int]] = {}
        """By number, the step's seed and the rollout's index in the step."""
        self._num_prompts = 0
        self.open, self.close, self.has_restarted = requests.open, requests.close, requests.has_restarted

    def add(self, prompts: Sequence[RolloutPrompt], seed: int) -> None:
        """Adds rollouts of whole groups, of a step with this seed."""
        self._seeds |= {number: (seed, prompt.sample) for number, prompt in enumerate(prompts, self._num_prompts)}
        self._num_prompts += len(prompts)

    def forget(self, numbers: range) -> None:
        """Forgets complete rollouts."""
        for number in numbers:
            del self._seeds[number]

    async def sample(self, request: TokenRequest, /) -> SampledTokens:
        """Samples the tokens of one request."""
        settings, (seed, rollout) = self._settings, self._seeds[request.rollout]
        sent = GenerationRequest(
            tokens=request.tokens,
            seed=call_seed(seed, rollout, request.number),
            group=request.rollout // settings.num_return_sequences,
        )
        stops = tuple(sorted({*settings.stop_token_ids, *request.stop_token_ids}))
        limits = replace(settings, max_new_tokens=request.max_new_tokens, stop_token_ids=stops)
        return await self._requests.generate(sent, limits)


@dataclass(frozen=True, kw_only=True)
class CompleteRequest:
    """The rollouts of one request."""

    number: int
    prompts: list[RolloutPrompt]
    rollouts: list[CheckedRollout]


class FreeRollouts:
    """Rollouts of many requests at once, by an `engine` that has weights already. A context manager.

    One thread starts them and changes weights; another may wait for them.
    """

    def __init__(
        self,
        engine: Replicas,
        function: LoadedRolloutFunction,
        tokenizer: Tokenizer,
        settings: GenerationSettings,
    ) -> None:
        self._engine, self._requests = engine, FreeRequests(engine)
        self._sender = EngineSender(self._requests, settings)
        self._calls = FunctionCalls(function, [], tokenizer, settings, self._sender)
        self._numbers: dict[int, range] = {}
        """Numbers of the rollouts of each request."""
        self._request_of: dict[int, int] = {}
        """Request of each rollout under way."""
        self._num_open: dict[int, int] = {}
        """Rollouts under way of each request."""

    def __enter__(self) -> FreeRollouts:
        self._calls.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._calls.__exit__(*details)

    def start(self, number: int, prompts: Sequence[RolloutPrompt], seed: int) -> None:
        """Starts the rollouts of request `number`, whole groups of a step with this seed."""
        self._sender.add(prompts, seed)
        self._num_open[number] = len(prompts)
        first = self._calls.num_prompts
        self._numbers[number] = numbers = range(first, first + len(prompts))
        self._request_of |= dict.fromkeys(numbers, number)
        self._calls.add(prompts)

    def wait(self, seconds: float) -> CompleteRequest | None:
        """Waits for a request to be complete, for `seconds` at most. Raises DataError and EngineError, as the calls."""
        rollout = self._calls.wait(seconds)
        if rollout is None:
            return None
        number = self._request_of.pop(rollout)
        self._num_open[number] -= 1
        if self._num_open[number]:
            return None
        del self._num_open[number]
        numbers = self._numbers.pop(number)
        self._sender.forget(numbers)
        prompts = [self._calls.prompts[rollout] for rollout in numbers]
        return CompleteRequest(number=number, prompts=prompts, rollouts=self._calls.collect(numbers))

    @contextlib.contextmanager
    def interrupted(self) -> Iterator[None]:
        """Interrupts what servers are sampling, for the block, in which they take new weights. Then it goes on."""
        self._run(self._requests.pause())
        self._engine.send_calls(tuple(self._engine.live), self._engine.api.before_update(asleep=False))
        self._run(self._requests.drain())
        yield
        self._run(self._requests.resume())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._calls.loop).result()
