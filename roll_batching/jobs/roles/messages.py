"""What a job and the processes of a role of its own tell each other."""

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


class Request(Protocol):
    """What is asked of a role; pickled as plain data."""

    @property
    def number(self) -> int:
        """Tells it from others."""

    @property
    def size(self) -> int:
        """How much it asks for."""


class Answer(Protocol):
    """What comes back."""

    @property
    def number(self) -> int:
        """That of the request."""

    @property
    def size(self) -> int:
        """How many samples it has."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The model is built, and what else the role needs answers."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Weights were taken over: those before them are read no more."""

    version: int


@dataclass(frozen=True, kw_only=True)
class Failed:
    """The process ends: nothing that starting it again would mend, unless it only lost another."""

    words: str
    aftermath: bool = False
    """It lost its connection to another process of its world."""


def send(connection: Connection, message: Any) -> None:
    """One message. Pickled as plain data: torch would share memory, which ends with its process."""
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """The next message. Raises EOFError or OSError when there will be none."""
    return pickle.loads(connection.recv_bytes())


_MARGIN = 300.0
"""Seconds that ranks may be apart beside what a role may take."""


def patience_inside(config: JobConfig) -> float:
    """Minutes that the processes of a role's world wait for each other.

    Longer than training waits for them: whoever stalls is found from there, and started again.
    """
    return max(config.actor_train.backend_timeout, 2 * config.rollout_timeout / 60)


def patience_outside(config: JobConfig, answers: int = 1) -> float:
    """Seconds that ranks which train may wait for the one that waits for so many `answers` of a role."""
    return (config.sampler_restarts + 1) * (answers * config.rollout_timeout + _MARGIN) + _MARGIN
