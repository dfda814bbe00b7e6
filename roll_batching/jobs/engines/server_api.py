"""HTTP API of a kind of server, as its publisher documents it: one class per engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from roll_batching.errors import EngineError
from roll_batching.jobs.engines.protocol import (
    GenerationRequest,
    GenerationResult,
    MalformedReply,
    ServerProcess,
    check_result,
    excerpt,
)
from roll_batching.strategy.sampling import GenerationSettings


@dataclass(frozen=True)
class Call:
    """One POST request."""

    path: str
    body: Any = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    extra_bytes: int = 0
    """Bytes by which its reply may exceed the usual limit."""


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
        """The error in a reply to one of these calls; None for success."""


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
        """Version of the last weights sent; another one after a restart."""

    def join_call(self, rendezvous: GroupRendezvous) -> Call:
        """The call that makes a server join a process group."""

    def receive_call(self, tensors: Sequence[tuple[str, torch.Tensor]], group: str, version: int | None) -> Call:
        """The call that receives one broadcast per tensor, in order. `version` with the last tensors of an update."""

    def leave_call(self, group: str) -> Call:
        """The call that destroys a process group."""


def sampling_parameters(settings: GenerationSettings) -> dict[str, Any]:
    """Sampling parameters with the same names on all servers: all that generation_config.json could change."""
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
    """The checked result of a server. Raises MalformedReply."""
    if finish_reason not in ("stop", "length"):
        raise MalformedReply(f"the request ended with {excerpt(repr(finish_reason))}")
    result = GenerationResult(tokens=list(tokens), log_probs=list(log_probs))
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
    """The error for a reply without a documented field, where reading it raised `error`."""
    return MalformedReply(f"{type(error).__name__}: {error} in {excerpt(reply)}")
