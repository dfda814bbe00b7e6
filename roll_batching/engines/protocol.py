"""What a rollout engine is asked, what it answers, and what it must be able to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from roll_batching.strategy.sampling import GenerationSettings


@dataclass(frozen=True, kw_only=True)
class Question:
    """One response that is wanted."""

    tokens: list[int]
    """The prompt."""
    seed: int
    """Of this response's draws, for engines that take one; 31 bits."""
    group: int
    """Which prompt it is: questions of a group should share the work on it."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response."""

    tokens: list[int]
    """Its stop token included, where it ended at one."""
    log_probs: list[float]
    """Of each token, at the temperature that it was drawn with, before top-k and top-p."""


class Engine(Protocol):
    """Answers questions with the weights that it was given last. Token ids in and out: nothing is tokenised again."""

    def generate(self, questions: Sequence[Question], settings: GenerationSettings) -> list[Answer]:
        """The answers, in the order of `questions`. Raises EngineError where that is not possible."""

    def update_weights(self, folder: Path, version: int, *, asleep: bool = False) -> None:
        """Reads the model directory `folder`; what is generated from now on is of `version`. Raises EngineError.

        `asleep`: it sleeps, and wakes up with these weights.
        """

    def sleep(self) -> None:
        """Gives its device memory back, weights and cache, until it gets weights again. Raises EngineError."""

    def seconds_to_answer(self, questions: int) -> float:
        """What so many answers may take at most."""

    def seconds_to_update(self) -> float:
        """What new weights, or going to sleep, may take at most."""

    @property
    def live(self) -> tuple[str, ...]:
        """The replicas that answer."""

    def use(self, live: Sequence[str], version: int) -> None:
        """Somebody else has given these replicas the weights of `version`."""

    def figures(self) -> dict[str, float]:
        """What happened since the last call, as metrics."""


class Malformed(ValueError):
    """An answer that is none."""


def checked(answer: Answer, settings: GenerationSettings, *, ended: bool) -> Answer:
    """`answer`, if it can be one. Raises Malformed.

    `ended`: the engine says that the response ended by itself, which it may at the job's stop tokens only.
    """
    tokens, log_probs = answer.tokens, answer.log_probs
    if len(log_probs) != len(tokens):
        raise Malformed(f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    if not 0 < len(tokens) <= settings.max_new_tokens:
        raise Malformed(f"{len(tokens)} tokens, where 1 to {settings.max_new_tokens} were asked for")
    if not all(isinstance(token, int) and token >= 0 for token in tokens):
        raise Malformed("its tokens are no token ids")
    if not all(isinstance(value, (int, float)) and math.isfinite(value) and value < 1e-3 for value in log_probs):
        raise Malformed("its log-probs are no logarithms of probabilities")
    stops = {settings.eos_token_id, *settings.stop_token_ids}
    if ended and tokens[-1] not in stops:
        raise Malformed(
            f"it ended at token {tokens[-1]}, and the tokenizer's stop tokens are {sorted(stops)}: give the engine the "
            "model directory of the job, with its generation_config.json"
        )
    if not ended and len(tokens) < settings.max_new_tokens and tokens[-1] not in stops:
        raise Malformed(f"it was cut off after {len(tokens)} of {settings.max_new_tokens} tokens")
    return answer
