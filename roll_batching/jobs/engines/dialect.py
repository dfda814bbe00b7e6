"""What a kind of server is asked and what it answers, as its publisher documents it: one class per engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from roll_batching.jobs.engines.protocol import Answer, Malformed, Question, ServerProcess, checked, shown
from roll_batching.strategy.sampling import GenerationSettings


@dataclass(frozen=True)
class Call:
    """One POST request."""

    path: str
    body: Any = None
    parameters: Mapping[str, str] = field(default_factory=dict)


class Dialect(Protocol):
    """Requests and replies of one kind of server."""

    name: str
    health: str
    about_process: str | None
    """Path of the GET request whose reply `process` reads; None where every answer tells the version of its weights."""
    sleeps_with: str
    """What a server must be started with to sleep."""

    def call(self, question: Question, settings: GenerationSettings) -> Call:
        """The request for one response."""

    def answer(self, reply: Any, settings: GenerationSettings, version: int) -> Answer:
        """The response in a reply. Raises Malformed."""

    def process(self, about: Any) -> ServerProcess:
        """The process that answered. Raises Malformed."""

    def before_update(self, *, asleep: bool) -> list[Call]:
        """What makes a server ready for new weights; `asleep`: and gives it room for them."""

    def read(self, folder: Path, version: int) -> Call:
        """What makes it read a model directory."""

    def after_update(self, *, asleep: bool) -> list[Call]:
        """What makes it go on; `asleep`: and wakes up the rest of it."""

    def sleep(self) -> list[Call]:
        """What makes a server give its device memory back."""

    def updated(self, reply: Any) -> str | None:
        """What a reply to one of those says went wrong; None where nothing did."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of a server meet the rank that sends weights, which is rank 0 of their group."""

    address: str
    port: int
    group: str
    """Its name."""
    size: int
    """Ranks of the server, and the one that sends."""
    backend: str
    """nccl, or gloo."""


class Receiving(Protocol):
    """The part of a dialect of servers that take weights over a process group of torch's."""

    about: tuple[str, ...]
    """Paths of GET requests, the first of which that there is says what `ranks` and `weights` read."""

    def ranks(self, about: Any) -> int:
        """Processes of a server that join a group. Raises Malformed where they cannot."""

    def weights(self, about: Any) -> str:
        """The version that the server was told last. A process that started since was told none."""

    def join(self, meeting: Meeting) -> Call:
        """What makes a server join a group."""

    def receive(self, tensors: Sequence[tuple[str, torch.Tensor]], group: str, version: int | None) -> Call:
        """What makes it take these from rank 0, a broadcast each, in this order; `version`: they are the last of it."""

    def leave(self, group: str) -> Call:
        """What makes it forget a group."""


def sampling_words(settings: GenerationSettings) -> dict[str, Any]:
    """How to sample, in the words that servers share: all that a model's generation_config.json could change."""
    return {
        "stop_token_ids": sorted({settings.eos_token_id, *settings.stop_token_ids}),
        "temperature": 0.0 if settings.greedy else settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def response(tokens: Sequence[int], log_probs: Sequence[float], reason: str, settings: GenerationSettings) -> Answer:
    """The answer that a server gives with these; `reason` is why it ended. Raises Malformed."""
    if reason not in ("stop", "length"):
        raise Malformed(f"the request ended with {shown(repr(reason))}")
    return checked(Answer(tokens=list(tokens), log_probs=list(log_probs)), settings, ended=reason == "stop")


def not_understood(error: Exception, reply: Any) -> Malformed:
    """Of a reply that lacks what its publisher documents."""
    return Malformed(f"{type(error).__name__}: {error} in {shown(reply)}")
