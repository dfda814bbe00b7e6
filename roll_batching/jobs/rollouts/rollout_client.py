"""The client of one rollout: it checks a rollout function's requests for tokens, and passes them on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from roll_batching.errors import DataError
from roll_batching.jobs.engines.protocol import SampledTokens
from roll_batching.jobs.rollouts.contract import Generation, LoadedRolloutFunction, TokenRequest
from roll_batching.jobs.rollouts.token_versions import TokenVersions
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.planning.arrays import integer_of
from roll_batching.registry import printable
from roll_batching.strategy.sampling import GenerationSettings


class Calls(Protocol):
    """What clients need of all calls of a function."""

    function: LoadedRolloutFunction
    tokenizer: Tokenizer
    settings: GenerationSettings
    max_new_tokens: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    loop: asyncio.AbstractEventLoop

    def is_open(self, rollout: int) -> bool:
        """Whether the rollout's call has not returned."""

    async def sample(self, request: TokenRequest) -> SampledTokens:
        """Samples a request's tokens."""


class Client:
    """The `RolloutClient` of one rollout."""

    def __init__(self, calls: Calls, number: int) -> None:
        self._all, self._number = calls, number
        self.calls = 0
        """Number of calls so far."""
        self.servers: set[str] = set()
        """Servers that sampled for it."""
        self.versions = TokenVersions()

    @property
    def settings(self) -> GenerationSettings:
        """The job's sampling settings."""
        return self._all.settings

    def room(self, tokens: Sequence[int]) -> int:
        """Number of tokens that may follow `tokens` within the job's sequence_length."""
        return max(0, self._all.function.sequence_length - len(tokens))

    async def generate(
        self, tokens: Sequence[int], *, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Generation:
        """Samples tokens that follow `tokens`; see `contract.RolloutClient`."""
        calls, function = self._all, self._all.function
        if asyncio.get_running_loop() is not calls.loop:
            raise DataError(
                "client.generate must be awaited in the event loop of the rollout function, not in another thread's"
            )
        if not calls.is_open(self._number):
            raise DataError(
                "client.generate was called after the rollout's function had returned: await every call before"
            )
        if self.calls == function.max_calls:
            raise DataError(
                f"the rollout calls its client more than {function.max_calls} times: end the rollout earlier, or raise "
                "rollout_max_calls"
            )
        context = self._token_ids("tokens", tokens)
        if not context:
            raise DataError("client.generate got no tokens: pass the whole context, the prompt's tokens included")
        room = self.room(context)
        if not room:
            raise DataError(
                f"client.generate got {len(context):,} tokens, and sequence_length is {function.sequence_length:,}: "
                "nothing fits behind them. Ask client.room, and end the rollout earlier, or raise sequence_length"
            )
        limit = min(calls.max_new_tokens, room)
        if max_new_tokens is not None:
            limit = min(limit, integer_of("max_new_tokens", max_new_tokens, 1, error=DataError))
        self.calls += 1
        request = TokenRequest(
            rollout=self._number,
            number=self.calls,
            tokens=context,
            max_new_tokens=limit,
            stop_token_ids=frozenset(self._token_ids("stop_token_ids", stop_token_ids)),
            future=calls.loop.create_future(),
        )
        result = await calls.sample(request)
        self.servers |= result.servers
        self.versions.add(result)
        sampled = result.tokens
        finished = sampled[-1] in calls.stop_token_ids | request.stop_token_ids
        text = calls.tokenizer.decode(sampled[:-1] if sampled[-1] in calls.stop_token_ids else sampled)
        return Generation(tokens=sampled, log_probs=result.log_probs, text=text, finished=finished)

    def _token_ids(self, name: str, values: Any) -> list[int]:
        if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
            raise DataError(
                f"client.generate: {name} is a {type(values).__name__}: give token ids, as tokenizer.encode makes them"
            )
        ids = values.tolist() if hasattr(values, "tolist") else list(values)
        for index, token in enumerate(ids):
            is_integer = isinstance(token, (int, np.integer)) and not isinstance(token, bool)
            if not is_integer or not 0 <= token < self._all.vocab_size:
                raise DataError(
                    f"client.generate: {name}[{index}] is {printable(repr(token), characters=60)}: give token ids of "
                    f"the model, 0 to {self._all.vocab_size - 1}"
                )
        return [int(token) for token in ids]
