"""Protocols of rollout engines and of the HTTP API of their servers, with requests, results and their checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.probe import Probe
from roll_batching.jobs.processes.requests import Call, excerpt
from roll_batching.strategy.sampling import GenerationSettings

_ANY_VOCABULARY = 1 << 31
"""Bound of token ids where the vocabulary is not known."""
_LARGEST_FLOAT32 = 3e38
"""Log-probs become float32, in which a larger number would be infinite."""
_LARGEST_LOG_PROB = 1e-3
"""A log-prob of rounded numbers may be this much above 0."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shape of a mixture of experts: which layers have experts, and how many."""

    num_layers: int
    """All layers, with experts or without."""
    layers: tuple[int, ...]
    """Layers with experts, counted from 0, ascending."""
    top_k: int
    """Experts per token."""
    num_experts: int

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the experts of `tokens` in a reply: int32 as base64 (4 bytes for 3), and 1 KiB around it."""
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
    partial: bool = False
    """Take what was sampled until the request was aborted, and not as a failure."""
    images: PromptImages | None = None
    """Images of the prompt. `tokens` has all tokens of each image, `images.tokens` one for each."""


@dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """One response."""

    tokens: list[int]
    """Token ids, including the stop token if it ended at one."""
    log_probs: list[float]
    """Log-prob of each token, at the sampling temperature, before top-k and top-p."""
    aborted: bool = False
    """Whether the engine ended it for an update of weights: there may be no tokens at all."""
    experts: np.ndarray | None = None
    """int16 `[tokens, layers with experts, top-k]` of prompt and response, where they were requested."""


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """The response to a request that may have gone on under new weights."""

    tokens: list[int]
    """Token ids, including the stop token if it ended at one."""
    log_probs: list[float]
    """Log-prob of each token, under the weights that sampled it."""
    versions: list[int]
    """Version of the weights that sampled each token; empty where all are the step's."""
    servers: frozenset[str] = frozenset()
    """Names of the servers that sampled them, for `has_restarted`."""


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
        """Replicas in use, each with its process, or None if its replies name the weights' version."""

    def set_live(self, live: Mapping[str, ServerProcess | None], version: int) -> None:
        """Sets the replicas in use, which got the weights of `version` from another rank."""

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call."""


class MalformedReply(ValueError):
    """A server's reply breaks the server's documented format, or is no possible result."""


def check_result(result: GenerationResult, settings: GenerationSettings, *, ended: bool = False) -> GenerationResult:
    """`result`, if lengths, token ids, log-probs and stop token are possible. Raises MalformedReply.

    `ended`: the engine says that the response ended at a stop token, which must be one of the job's.
    """
    tokens, log_probs = result.tokens, result.log_probs
    if len(log_probs) != len(tokens):
        raise MalformedReply(f"{len(log_probs)} log-probs for {len(tokens)} tokens, not one each")
    least = 0 if result.aborted else 1
    if not least <= len(tokens) <= settings.max_new_tokens:
        raise MalformedReply(f"{len(tokens)} tokens, where 1 to {settings.max_new_tokens} were asked for")
    if not all(type(token) is int and 0 <= token < (settings.vocab_size or _ANY_VOCABULARY) for token in tokens):
        vocabulary = "" if settings.vocab_size is None else f" of the model's {settings.vocab_size}"
        raise MalformedReply(f"its tokens are no token ids{vocabulary}: {excerpt(tokens, 80)}")
    if not all(type(value) in (int, float) and -_LARGEST_FLOAT32 < value < _LARGEST_LOG_PROB for value in log_probs):
        raise MalformedReply(f"its log-probs are no logarithms of probabilities: {excerpt(log_probs, 80)}")
    stops = {settings.eos_token_id, *settings.stop_token_ids}
    if ended and tokens[-1] not in stops:
        raise MalformedReply(
            f"it ended at token {tokens[-1]}, and the tokenizer's stop tokens are {sorted(stops)}: give the engine the "
            "model directory of the job, with its generation_config.json"
        )
    if not ended and not result.aborted and len(tokens) < settings.max_new_tokens and tokens[-1] not in stops:
        raise MalformedReply(f"it was cut off after {len(tokens)} of {settings.max_new_tokens} tokens")
    return result


# ---- server api


class ServerApi(Protocol):
    """Requests and replies of one kind of server."""

    name: str
    health_path: str
    process_path: str | None
    """Path of the GET request for `parse_process`; None when every reply names the version of its weights."""
    sleep_options: str
    """Options with which a server must be started to be able to sleep."""

    def generation_call(self, request: GenerationRequest, settings: GenerationSettings) -> Call:
        """The request for one response."""

    def parse_generation(self, reply: Any, settings: GenerationSettings, version: int) -> GenerationResult:
        """The response in a reply. Raises MalformedReply."""

    def score_call(self, tokens: Sequence[int]) -> Call:
        """The request for the log-probs of a prompt's tokens, at temperature 1."""

    def parse_scores(self, reply: Any) -> list[float]:
        """The log-probs in a reply, of all tokens but the first. Raises MalformedReply."""

    def parse_experts(self, reply: Any) -> np.ndarray:
        """Integers: the experts of all tokens but the last, in all layers, flat or shaped. Raises MalformedReply."""

    def count_prompt_tokens(self, reply: Any) -> int:
        """Tokens of the prompt that the server computed, those of images included. Raises MalformedReply."""

    def parse_process(self, reply: Any) -> ServerProcess:
        """The server's process. Raises MalformedReply."""

    def before_update(self, *, asleep: bool) -> list[Call]:
        """Calls before new weights: pause generation, or if `asleep` allocate memory for weights."""

    def load_call(self, folder: Path, version: int) -> Call:
        """The call that loads a model directory."""

    def after_update(self, *, asleep: bool) -> list[Call]:
        """Calls after new weights: continue generation, if `asleep` with memory for the cache."""

    def sleep_calls(self) -> list[Call]:
        """Calls that free the device memory."""

    def error_in(self, reply: Any) -> str | None:
        """The error in the reply to a call of an update or of sleep; None for success."""


@dataclass(frozen=True, kw_only=True)
class GroupRendezvous:
    """Rendezvous of a server's ranks with the sender of weights, which is rank 0 of the process group."""

    address: str
    port: int
    group: str
    """Name of the process group."""
    size: int
    """World size: the server's ranks, and the sender."""
    backend: str
    """nccl or gloo."""


class WeightReceiverApi(Protocol):
    """API of servers that receive weights over a torch process group."""

    info_paths: tuple[str, ...]
    """Paths of GET requests for `world_size` and `weight_version`; the first that exists is used."""

    def world_size(self, info: Any) -> int:
        """Ranks of a server that join the process group. Raises MalformedReply when they cannot."""

    def weight_version(self, info: Any) -> str:
        """The version of the last weights that the server received; another version after a restart."""

    def join_call(self, rendezvous: GroupRendezvous) -> Call:
        """The call that makes a server join a process group."""

    def receive_call(self, tensors: Sequence[tuple[str, torch.Tensor]], group: str, version: int | None) -> Call:
        """The call that receives one broadcast per tensor, in order. `version` with the last tensors of an update."""

    def leave_call(self, group: str) -> Call:
        """The call that destroys a process group."""


def sampling_parameters(settings: GenerationSettings) -> dict[str, Any]:
    """Sampling parameters with the same names on all servers.

    They include all that a model's generation_config.json could change, so that servers ignore that file.
    """
    return {
        "stop_token_ids": sorted({settings.eos_token_id, *settings.stop_token_ids}),
        "temperature": 0.0 if settings.greedy else settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def make_result(
    tokens: Sequence[int], log_probs: Sequence[float], finish_reason: str, settings: GenerationSettings
) -> GenerationResult:
    """Makes and checks the result of a server's reply. Raises MalformedReply."""
    if finish_reason not in ("stop", "length", "abort"):
        raise MalformedReply(f"the request ended with {excerpt(repr(finish_reason))}")
    aborted = finish_reason == "abort"
    result = GenerationResult(tokens=list(tokens), log_probs=list(log_probs), aborted=aborted)
    return check_result(result, settings, ended=finish_reason == "stop")


def check_prompt_tokens(api: ServerApi, reply: Any, expected: int) -> None:
    """Raises EngineError where a server made another number of tokens of a prompt with images."""
    actual = api.count_prompt_tokens(reply)
    if actual != expected:
        raise EngineError(
            f"{api.name} made {actual:,} tokens of a prompt with images that has {expected:,} in training: its image "
            "processor resizes otherwise, or its tokenizer splits the decoded prompt otherwise. Start the server with "
            "the job's model directory, and limits of pixels that include image_min_pixels and image_max_pixels"
        )


def missing_field(error: Exception, reply: Any) -> MalformedReply:
    """The error for a reply that lacks a documented field; `error` is what reading the field raised."""
    return MalformedReply(f"{type(error).__name__}: {error} in {excerpt(reply)}")
