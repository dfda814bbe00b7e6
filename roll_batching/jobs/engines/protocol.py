"""Protocol of rollout engines: requests, results, and checks of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from roll_batching.jobs.engines.probe import Probe
from roll_batching.strategy.sampling import GenerationSettings

_ANY_VOCABULARY = 1 << 31
_LARGEST_FLOAT32 = 3e38


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Numbers of a model's layers and experts."""

    num_layers: int
    """All layers, with experts or without."""
    layers: tuple[int, ...]
    """Those with experts, from 0 on, ascending."""
    top_k: int
    """Experts per token."""
    num_experts: int

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the experts of `tokens` in a reply: int32 as base64."""
        return tokens * self.num_layers * self.top_k * 4 * 4 // 3 + 1024


@dataclass(frozen=True, kw_only=True)
class PromptImages:
    """Images of a prompt, as servers take them."""

    tokens: list[int]
    """The prompt with one token for each image."""
    data: tuple[str, ...]
    """The images as data: URLs, in the order of their tokens."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request for one response."""

    tokens: list[int]
    """Token ids of the prompt."""
    seed: int
    """31-bit seed of this response, for engines that take one per request."""
    group: int
    """Number of the prompt: requests of a group can share its prefix cache."""
    mixture: Mixture | None = None
    """Return the experts of this model's tokens; None: do not."""
    images: PromptImages | None = None
    """Images of the prompt, whose tokens `tokens` has all."""


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One response."""

    tokens: list[int]
    """Token ids, including the stop token if it ended at one."""
    log_probs: list[float]
    """Of each token, at the sampling temperature, before top-k and top-p."""
    experts: np.ndarray | None = None
    """int16 `[tokens, layers with experts, top-k]` of prompt and response, where they were requested."""


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """The process behind a server's URL."""

    identity: str
    """Changes with a restart, after which a server has its initial weights."""
    logprobs_mode: str
    """vLLM's `--logprobs-mode`."""


class Engine(Protocol):
    """Generates responses with the last weights. Takes and returns token ids, so nothing is tokenised twice."""

    def generate(self, requests: Sequence[GenerationRequest], settings: GenerationSettings) -> list[GenerationResult]:
        """Results in the order of `requests`. Raises EngineError."""

    def update_weights(self, folder: Path, version: int, *, asleep: bool = False) -> None:
        """Loads the model directory `folder`, whose weights are `version`. Raises EngineError.

        `asleep`: the engine sleeps, and is woken up.
        """

    def check_weights(self, probe: Probe) -> None:
        """Compares the log-probs of `probe` under the last weights. Raises EngineError when no replica has them."""

    def sleep(self) -> None:
        """Frees its device memory, weights and cache, until the next weights. Raises EngineError."""

    def generation_timeout(self, requests: int) -> float:
        """Longest time for `requests`, in seconds."""

    def update_timeout(self) -> float:
        """Longest time for a weight update, or for going to sleep, in seconds."""

    @property
    def live(self) -> Mapping[str, ServerProcess | None]:
        """Replicas in use; None for those whose replies name the version of their weights."""

    def set_live(self, live: Mapping[str, ServerProcess | None], version: int) -> None:
        """Sets the replicas in use, which got the weights of `version` from another rank."""

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""


class MalformedReply(ValueError):
    """A reply that is not what its server documents, or not a possible result."""


def excerpt(reply: Any, length: int = 200) -> str:
    """The beginning of a server's reply, without control characters, which would change a terminal."""
    return "".join(character if character.isprintable() else " " for character in str(reply)[:length])


def check_result(result: GenerationResult, settings: GenerationSettings, *, ended: bool) -> GenerationResult:
    """`result`, if lengths, token ids, log-probs and stop token are possible. Raises MalformedReply.

    `ended`: the engine says that the response ended at a stop token, which must be one of the job's.
    """
    tokens, log_probs = result.tokens, result.log_probs
    if len(log_probs) != len(tokens):
        raise MalformedReply(f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    if not 0 < len(tokens) <= settings.max_new_tokens:
        raise MalformedReply(f"{len(tokens)} tokens, where 1 to {settings.max_new_tokens} were asked for")
    if not all(type(token) is int and 0 <= token < (settings.vocab_size or _ANY_VOCABULARY) for token in tokens):
        vocabulary = "" if settings.vocab_size is None else f" of the model's {settings.vocab_size}"
        raise MalformedReply(f"its tokens are no token ids{vocabulary}: {excerpt(tokens, 80)}")
    if not all(type(value) in (int, float) and -_LARGEST_FLOAT32 < value < 1e-3 for value in log_probs):
        raise MalformedReply(f"its log-probs are no logarithms of probabilities: {excerpt(log_probs, 80)}")
    stops = {settings.eos_token_id, *settings.stop_token_ids}
    if ended and tokens[-1] not in stops:
        raise MalformedReply(
            f"it ended at token {tokens[-1]}, and the tokenizer's stop tokens are {sorted(stops)}: give the engine the "
            "model directory of the job, with its generation_config.json"
        )
    if not ended and len(tokens) < settings.max_new_tokens and tokens[-1] not in stops:
        raise MalformedReply(f"it was cut off after {len(tokens)} of {settings.max_new_tokens} tokens")
    return result
