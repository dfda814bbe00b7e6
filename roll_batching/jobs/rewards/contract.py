"""Interface of reward functions, and two simple ones.

A reward function takes one `Completion` and returns a number, or a `Score` with marks. The YAML names it by a
registered name (`config.rewards`) or by dotted path, `package.module:function`; the module must be importable where the
job runs (the working directory is on the path). It runs in worker processes (`rewards.process`), `reward_workers` per
data-parallel rank, with a limit of `reward_timeout` seconds per call. `random`, `numpy.random`, and torch where the
module imports it, are seeded before each call by step and sample: a resumed run draws the same numbers.

    def reward(completion: Completion) -> float:
        return float(completion.response.strip() == completion.record["answer"])
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from roll_batching.errors import ConfigError
from roll_batching.registry import load_dotted

MOST_MARKS = 100
"""Different names of marks in one step; each is a metric."""
_LONGEST_NAME = 100
_LARGEST_REWARD = 1e15
"""Magnitude of a reward; sums of squares of much larger ones overflow in fp32, in which losses are computed."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One response of the model: the argument of a reward function."""

    prompt: str
    """The prompt's text."""
    response: str
    """The response's text, without the end token."""
    finished: bool
    """Whether the response ended at a stop token; False at the length limit."""
    tokens: int
    """Length of the response in tokens, the end token included."""
    record: Mapping[str, Any]
    """The prompt's line of the data file: `prompt`, `answer`, and all its other keys."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward, and boolean marks by name, whose shares become metrics."""

    reward: float
    marks: Mapping[str, bool] = field(default_factory=dict)


RewardFunction = Callable[[Completion], "float | Score"]


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Rewards of a batch, in the order of its samples."""

    rewards: np.ndarray
    """float64[n]."""
    marks: dict[str, np.ndarray]
    """bool[n] by name; False for samples without the mark."""
    failed: np.ndarray
    """bool[n]: the function failed on the sample, whose reward is 0."""
    failures: list[str]
    """Error messages of failed samples."""
    domains: list[str]
    """Domain of each sample; empty strings without domains."""


def final_answer(completion: Completion) -> Score:
    """1 when the text after the last '#' is exactly `record["answer"]` and the response ended there.

    Marks `shows_work`: whether there is text before that '#'.
    """
    before, hash_sign, final = completion.response.rpartition("#")
    right = bool(hash_sign) and completion.finished and final == str(completion.record["answer"])
    return Score(reward=float(right), marks={"shows_work": bool(before)})


def exact_match(completion: Completion, after: str | None = None, *, ignore_case: bool = False) -> Score:
    """1 when the response equals `record["answer"]`, ignoring surrounding white space.

    With `after`, only the text after its last occurrence counts; a response without it gets 0, and no mark
    `has_answer`.
    """
    _, separator, text = completion.response.rpartition(after) if after else ("", "", completion.response)
    answer = str(completion.record["answer"]).strip()
    text = text.strip()
    if ignore_case:
        answer, text = answer.casefold(), text.casefold()
    has_answer = bool(separator) or not after
    return Score(reward=float(has_answer and text == answer), marks={"has_answer": has_answer})


@dataclass(frozen=True, kw_only=True)
class LoadedReward:
    """A reward function with its keyword arguments."""

    function: Callable[..., float | Score]
    arguments: Mapping[str, Any]
    notice: str = ""
    """Shown to the user before training; empty for none."""

    def __call__(self, completion: Completion) -> float | Score:
        """Scores `completion`."""
        return self.function(completion, **self.arguments)


def load_reward(path: str, arguments: Mapping[str, Any] | None = None) -> LoadedReward:
    """The function `package.module:function` with `arguments`.

    If the function has an attribute `check_arguments`, that is called with `arguments`; it may raise ValueError or
    return a notice. Raises ConfigError when the function cannot be imported or does not take `arguments`.
    """
    function = load_dotted("reward function", path)
    if not callable(function):
        raise ConfigError(f"reward function {path!r}: it is a {type(function).__name__}, not a function")
    keywords = dict(arguments or {})
    try:
        inspect.signature(function).bind(None, **keywords)
    except TypeError as error:
        given = (
            f"a completion and reward_args {sorted(keywords)}" if keywords else "a completion alone (no reward_args)"
        )
        raise ConfigError(f"reward function {path!r} cannot be called with {given}: {error}") from error
    except ValueError:  # a C function without a signature cannot be checked before its first call
        pass
    check, notice = getattr(function, "check_arguments", None), ""
    if check is not None:
        try:
            notice = check(**keywords) or ""
        except ValueError as error:
            raise ConfigError(f"reward function {path!r}: {error}") from error
    return LoadedReward(function=function, arguments=keywords, notice=str(notice))


def check_score(result: Any) -> Score:
    """The result of a reward function as a Score of plain values. Raises TypeError or ValueError for invalid ones."""
    score = result if isinstance(result, Score) else Score(reward=result)
    reward = _number(score.reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}, and advantages of its whole group would not be finite")
    if abs(reward) > _LARGEST_REWARD:
        raise ValueError(
            f"the reward is {reward:g}, above {_LARGEST_REWARD:g}: its square may overflow in fp32, scale it"
        )
    if not isinstance(score.marks, Mapping):
        raise TypeError(f"Score.marks is {_excerpt(score.marks)}, not a dict of names and booleans")
    if len(score.marks) > MOST_MARKS:
        raise ValueError(f"Score.marks has {len(score.marks):,} names; {MOST_MARKS} at most, each is a metric")
    return Score(reward=reward, marks={_name(name): _mark(name, value) for name, value in score.marks.items()})


def _number(value: Any) -> float:
    """`value`, a number of Python, numpy or torch, as a float. Raises TypeError for text, arrays and containers."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"it returned {_excerpt(value)}, not a number")
    if getattr(value, "ndim", 0):
        raise TypeError(f"it returned an array of shape {tuple(value.shape)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"it returned {_excerpt(value)}, which no float can hold") from None


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        text = f"not a text of 1 to {_LONGEST_NAME} printable characters"
        raise TypeError(f"Score.marks has the name {_excerpt(name)}, {text}")
    return name


def _mark(name: str, value: Any) -> bool:
    array = bool(getattr(value, "ndim", 0))
    if isinstance(value, (str, bytes)) or array or value not in (0, 1):
        raise TypeError(f"Score.marks[{name!r}] is {_excerpt(value)}, not True or False")
    return bool(value)


def _excerpt(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "..."
    return f"a {type(value).__name__}, {text[:60]}"
