"""Rewards: functions that a user can replace, called with what the model answered.

A reward function takes one `Completion` and returns a number, or a `Score` when it has more to say. It is
named in the YAML by dotted path, `package.module:function`; the module must be importable where the job runs
(the working directory is on the path). It may be slow: every data-parallel rank scores its own completions
only.

    def reward(completion: Completion) -> float:
        return float(completion.response.strip() == completion.record["answer"])
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll_batching.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer of the model, as a reward function sees it."""

    prompt: str
    """The prompt's text."""
    response: str
    """The response's text, without the end token."""
    finished: bool
    """Whether the model ended its response itself; False where it ran out of room."""
    tokens: int
    """Length of the response in tokens, the end token included."""
    record: Mapping[str, Any]
    """The prompt's line of the data file: `prompt`, `answer`, and whatever else it holds."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward and, by name, 0/1 marks of the answer whose shares the metrics should show."""

    reward: float
    marks: Mapping[str, bool] = field(default_factory=dict)


RewardFunction = Callable[[Completion], "float | Score"]


def final_answer(completion: Completion) -> Score:
    """1 when the text after the last '#' is exactly `record["answer"]` and the response ended there.

    Marks `shows_work`: whether anything stands before that '#'.
    """
    before, hash_sign, final = completion.response.rpartition("#")
    right = bool(hash_sign) and completion.finished and final == str(completion.record["answer"])
    return Score(reward=float(right), marks={"shows_work": bool(before)})


def load_reward(path: str) -> RewardFunction:
    """The function that `package.module:function` names. Raises ConfigError when there is none."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"reward function {path!r}: write it as package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
    except ImportError as error:
        raise ConfigError(f"reward function {path!r}: cannot import {module_name!r} ({error})") from error
    except AttributeError as error:
        raise ConfigError(f"reward function {path!r}: {module_name!r} has no {name!r}") from error
    if not callable(function):
        raise ConfigError(f"reward function {path!r}: {name!r} is a {type(function).__name__}, not a function")
    return function


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A batch's `rewards`, float64[n], and `marks`, bool[n] by name (False where a sample has none)."""

    rewards: np.ndarray
    marks: dict[str, np.ndarray]


def score(function: RewardFunction, completions: Sequence[Completion], ids: Sequence[int]) -> Scored:
    """Call the reward function on each completion; `ids` name the samples in errors.

    Raises DataError when a reward is no number, is not finite, or the function raises.
    """
    scores = [_checked(function, c, int(i)) for c, i in zip(completions, ids, strict=True)]
    names = sorted({name for s in scores for name in s.marks})
    return Scored(
        rewards=np.array([s.reward for s in scores], dtype=np.float64),
        marks={name: np.array([bool(s.marks.get(name, False)) for s in scores]) for name in names},
    )


def _checked(function: RewardFunction, completion: Completion, sample_id: int) -> Score:
    name = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', function)}"
    where = f"sample {sample_id} (prompt {_short(completion.prompt)}, response {_short(completion.response)})"
    try:
        result = function(completion)
        if not isinstance(result, Score):
            result = Score(reward=float(result))
        reward = float(result.reward)
    except Exception as error:
        raise DataError(
            f"reward function {name} failed on {where}: {type(error).__name__}: {error}. "
            "It must return a number or a roll_batching.rl.rewards.Score."
        ) from error
    if not math.isfinite(reward):
        raise DataError(
            f"reward of {where} is {reward}: advantages of its whole group would not be finite. "
            f"{name} must return a finite number for every response."
        )
    return Score(reward=reward, marks=result.marks)


def _short(text: str, limit: int = 40) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
