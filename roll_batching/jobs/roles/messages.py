"""Messages between a job and the workers of a role, and their time limits."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from roll_batching.jobs.config import JobConfig


@dataclass(frozen=True, kw_only=True)
class Weights:
    """New weights: a checkpoint's folder, or a model directory."""

    version: int
    """RL steps that made them."""
    path: Path
    probe: Any = None
    """The `Probe` that shows whether an engine has them; None for other samplers."""


class Request(Protocol):
    """A request to a role's workers; pickled as plain data."""

    @property
    def number(self) -> int:
        """Unique among the requests to the role."""

    @property
    def size(self) -> int:
        """Prompts or samples in it."""


class Answer(Protocol):
    """The answer to a request."""

    @property
    def number(self) -> int:
        """Number of the request."""

    @property
    def size(self) -> int:
        """Samples in it."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The worker has built its model and reached everything else that it needs."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Weights of `version` are loaded: folders of earlier ones are no longer read."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The worker ends after an error that would recur after a restart, unless it is an `aftermath`."""

    message: str
    aftermath: bool = False
    """It only lost its connection to another worker of the role."""


def send(connection: Connection, message: Any) -> None:
    """Sends one message, as plain pickle: torch's pickling shares memory, which ends with its process."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError once the other end is closed."""
    return pickle.loads(connection.recv_bytes())


_MARGIN = 300.0
"""Seconds added to a role's limits for the time between ranks."""


def worker_timeout_minutes(config: JobConfig) -> float:
    """Minutes that a role's workers wait for each other.

    Longer than training waits for them: rank 0 finds a stalled worker first, and restarts the role.
    """
    return max(config.actor_train.backend_timeout, 2 * config.rollout_timeout / 60)


def answer_timeout(config: JobConfig, answers: int = 1) -> float:
    """Seconds that training ranks wait for rank 0, which waits for `answers` of a role, restarts included."""
    return (config.sampler_restarts + 1) * (answers * config.rollout_timeout + _MARGIN) + _MARGIN
