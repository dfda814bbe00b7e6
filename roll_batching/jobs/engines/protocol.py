"""What a rollout engine is asked, what it answers, and what it must be able to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from roll_batching.strategy.sampling import GenerationSettings

_ANY_VOCABULARY = 1 << 31
_LARGEST_FLOAT32 = 3e38


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


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """The process that answers at a server's URL."""

    identity: str
    """Another one after a restart, which forgets all weights but those it was started with."""
    logprobs_mode: str
    """vLLM's `--logprobs-mode`."""


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
    def live(self) -> Mapping[str, ServerProcess | None]:
        """The replicas that answer; None for those whose answers tell the version of their weights."""

    def use(self, live: Mapping[str, ServerProcess | None], version: int) -> None:
        """Somebody else has given these replicas the weights of `version`."""

    def figures(self) -> dict[str, float]:
        """What happened since the last call, as metrics."""


class Malformed(ValueError):
    """An answer that is none."""


def shown(reply: Any, length: int = 200) -> str:
    """The beginning of what a server says, without characters that would change a terminal."""
    return "".join(character if character.isprintable() else " " for character in str(reply)[:length])


def checked(answer: Answer, settings: GenerationSettings, *, ended: bool) -> Answer:
    """`answer`, if it can be one. Raises Malformed.

    `ended`: the engine says that the response ended by itself, which it may at the job's stop tokens only.
    """
    tokens, log_probs = answer.tokens, answer.log_probs
    if len(log_probs) != len(tokens):
        raise Malformed(f"{len(log_probs)} log-probs for {len(tokens)} tokens")
    if not 0 < len(tokens) <= settings.max_new_tokens:
        raise Malformed(f"{len(tokens)} tokens, where 1 to {settings.max_new_tokens} were asked for")
    if not all(type(token) is int and 0 <= token < (settings.vocab_size or _ANY_VOCABULARY) for token in tokens):
        known = "" if settings.vocab_size is None else f" of the model's {settings.vocab_size}"
        raise Malformed(f"its tokens are no token ids{known}: {shown(tokens, 80)}")
    if not all(type(value) in (int, float) and -_LARGEST_FLOAT32 < value < 1e-3 for value in log_probs):
        raise Malformed(f"its log-probs are no logarithms of probabilities: {shown(log_probs, 80)}")
    stops = {settings.eos_token_id, *settings.stop_token_ids}
    if ended and tokens[-1] not in stops:
        raise Malformed(
            f"it ended at token {tokens[-1]}, and the tokenizer's stop tokens are {sorted(stops)}: give the engine the "
            "model directory of the job, with its generation_config.json"
        )
    if not ended and len(tokens) < settings.max_new_tokens and tokens[-1] not in stops:
        raise Malformed(f"it was cut off after {len(tokens)} of {settings.max_new_tokens} tokens")
    return answer
