"""Interface of rollout functions: the prompt, the client that samples, and the sample that they return.

A rollout function makes one rollout. It is `async`, and the YAML names it by dotted path (`rollout_function`):

    async def rollout(prompt: RolloutPrompt, client: RolloutClient, tokenizer: Tokenizer) -> RolloutSample:
        turn = await client.generate(prompt.tokens)
        return RolloutSample(
            tokens=turn.tokens, loss_mask=[1] * len(turn.tokens), log_probs=turn.log_probs, reward=1.0
        )

A rollout is one sample, or a list of them: of sub-agents, say, or one before and one after its context was compacted.
All rollouts of a rank run concurrently in one event loop, in a thread of the rank's process.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import ConfigError
from roll_batching.jobs.engines.protocol import SampledTokens
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.registry import load_dotted
from roll_batching.samples import SampleBatch
from roll_batching.strategy import GenerationSettings
from roll_batching.strategy.offload import OffloadStats


@dataclass(frozen=True, kw_only=True)
class RolloutPrompt:
    """The prompt of one rollout; changes of its tokens and record reach neither the samples nor the reward."""

    tokens: list[int]
    """Token ids; the rollout's samples begin with them, unless they name `prompt_tokens` of their own."""
    text: str
    """The prompt's text, after the chat template where the job uses one."""
    record: Mapping[str, Any]
    """The prompt's line of the data file, as it stands there."""
    answer: Any = None
    """The line's value under `data_args.response`; None without one."""
    sample: int
    """Index of the rollout in the step: index of the prompt x group size + index in the group."""
    seed: int
    """Seed for the function's own random numbers; a resumed run passes the same."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Tokens that the policy sampled in one call of the client."""

    tokens: list[int]
    """Token ids, including the stop token if it ended at one."""
    log_probs: list[float]
    """Log-prob of each token, at the sampling temperature, before top-k and top-p."""
    text: str
    """The tokens as text, without the end token."""
    finished: bool
    """Whether it ended at a stop token; False at the length limit."""


class RolloutClient(Protocol):
    """Samples from the policy of the job, for one rollout."""

    @property
    def settings(self) -> GenerationSettings:
        """The job's sampling settings; in an evaluation the settings for held-out prompts."""

    def room(self, tokens: Sequence[int]) -> int:
        """Number of tokens that may follow `tokens` within the job's sequence_length."""

    async def generate(
        self, tokens: Sequence[int], *, max_new_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Generation:
        """Samples tokens that follow `tokens`, with the job's sampling settings.

        Args:
            tokens: the whole context: the prompt and all that followed.
            max_new_tokens: at most this many. Default: the job's limit, or what `room` leaves if that is less.
            stop_token_ids: further tokens that end the generation, beside the tokenizer's.

        Raises DataError for invalid arguments, without room for a token, and after rollout_max_calls calls.
        """


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    """All that followed a prompt: turns of the policy, and between them tokens of tools and environments."""

    tokens: Sequence[int]
    """Token ids after the prompt's."""
    loss_mask: Sequence[int | bool]
    """1 for each token that the policy sampled, which is trained on; 0 for others."""
    log_probs: Sequence[float | None]
    """Log-prob of each token, as the client returned it; None or 0 where `loss_mask` is 0."""
    reward: float | Sequence[float] | None = None
    """The reward, or a list with one reward per turn, which are added. None: the job's reward function scores, or the
    sample is one of several and adds nothing to the reward of its rollout, the sum over its samples."""
    states: Sequence[str | int] | None = None
    """A key of the environment's state before each turn, a run of tokens with `loss_mask` 1: equal for equal states.
    Read by `adv_estimator: gigpo`, which needs one reward per turn as well."""
    finished: bool | None = None
    """Whether the sample ended by itself. None: whether its last token is a stop token. Of a rollout its last sample
    says it."""
    marks: Mapping[str, bool] = field(default_factory=dict)
    """Booleans by name, whose shares become metrics; only with a `reward`."""
    prompt_tokens: Sequence[int] | None = None
    """Token ids before `tokens` that are not trained on: of a server's own chat template, of a sub-agent's task or of a
    compacted context. None: the job's prompt's."""


RolloutFunction = Callable[..., Awaitable[RolloutSample | Sequence[RolloutSample]]]


@dataclass(frozen=True, kw_only=True)
class LoadedRolloutFunction:
    """A rollout function with its keyword arguments and limits."""

    path: str
    """`package.module:function`."""
    function: RolloutFunction
    arguments: Mapping[str, Any]
    timeout: float
    """Most seconds between two calls of the client."""
    max_calls: int
    """Most calls of the client for one rollout."""
    sequence_length: int
    """Most tokens of a prompt and all that follows."""
    has_reward: bool
    """Whether a reward function of the job scores the rollouts, so that the function returns no reward."""
    needs_states: bool = False
    """Whether the advantage estimator compares states: then the function returns a state and a reward per turn."""
    needs_versions: bool = False
    """Whether weights change while rollouts are under way: then the version of each token's is found."""

    def __call__(
        self, prompt: RolloutPrompt, client: RolloutClient, tokenizer: Tokenizer
    ) -> Awaitable[RolloutSample | Sequence[RolloutSample]]:
        """Calls the function for one rollout, and returns the awaitable."""
        return self.function(prompt, client, tokenizer, **self.arguments)


def load_rollout_function(path: str, arguments: Mapping[str, Any]) -> RolloutFunction:
    """Loads the function at `path`, `package.module:function`.

    Raises ConfigError when it cannot be imported, is not async, or does not take a prompt, a client, a tokenizer and
    `arguments`.
    """
    function = load_dotted("rollout function", path)
    if not callable(function):
        raise ConfigError(f"rollout function {path!r}: it is a {type(function).__name__}, not a function")
    called = function if inspect.isroutine(function) or inspect.isclass(function) else type(function).__call__
    called = getattr(function, "func", called)  # of functools.partial
    if inspect.isasyncgenfunction(called):
        raise ConfigError(f"rollout function {path!r} yields: it must return its samples, without `yield`")
    if not inspect.iscoroutinefunction(called):
        kind = "a class" if inspect.isclass(function) else "not async"
        raise ConfigError(
            f"rollout function {path!r} is {kind}: write it as `async def`; run what blocks with `await "
            "asyncio.to_thread(...)`"
        )
    try:
        inspect.signature(function).bind(None, None, None, **arguments)
    except TypeError as error:
        with_arguments = f" and rollout_args {sorted(arguments)}" if arguments else " (no rollout_args)"
        raise ConfigError(
            f"rollout function {path!r} cannot be called with a prompt, a client, a tokenizer{with_arguments}: {error}"
        ) from error
    loaded: RolloutFunction = function
    return loaded


# ---- sampler


@dataclass(eq=False)
class TokenRequest:
    """Tokens that a rollout waits for."""

    rollout: int
    """Index among this rank's prompts."""
    number: int
    """Number of the call among the calls of the rollout's client, from 1."""
    tokens: list[int]
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    """Stop tokens in addition to the job's."""
    future: asyncio.Future[tuple[list[int], list[float]]]


class Sender(Protocol):
    """Samples the tokens of single requests, in the event loop of the calls."""

    async def open(self) -> None:
        """Called before the first request. Raises EngineError."""

    async def close(self) -> None:
        """Called after the last."""

    async def sample(self, request: TokenRequest, /) -> SampledTokens:
        """Samples a request's tokens. Raises EngineError."""

    async def has_restarted(self, servers: Collection[str], /) -> bool:
        """Whether one of these servers may have sampled with other weights, so that its rollouts begin again."""


class Sampler(Protocol):
    """Samples responses to prompts: the model in training, a copy of it, or an engine."""

    @property
    def layout(self) -> ParallelLayout:
        """Parallel layout of the ranks that call `generate`."""

    def generate(self, prompts: SampleBatch, settings: GenerationSettings) -> SampleBatch:
        """Samples responses to this data-parallel rank's prompts, as `MegatronInferStrategy.generate`. Collective."""


class SeparateSampler(Sampler, Protocol):
    """A sampler with a copy of the weights in training. Every method is collective."""

    @property
    def offload_stats(self) -> OffloadStats:
        """Bytes of the copy's weights moved between devices and host so far, and the seconds that it took."""

    def update(self, version: int) -> None:
        """Copy the weights in training, which are those after `version` RL steps."""

    def release_memory(self) -> None:
        """Free the memory of devices that the sampler shares with training, until the next `update`."""

    def metrics(self, local_batch: SampleBatch) -> Metrics:
        """Metrics of the rollouts `local_batch`, and of weight updates since the last call."""
