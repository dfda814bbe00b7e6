"""What a reward function is: what it is called with, and what it may return; and two simple ones.

A reward function takes one `Completion` and returns a number, or a `Score` when it has more to say. It is named in the
YAML by a registered name (`config.rewards`) or by dotted path, `package.module:function`; the module must be importable
where the job runs (the working directory is on the path). It runs in processes of its own (`rewards.process`),
`reward_workers` per data-parallel rank, and may take `reward_timeout` seconds per call. The generators of `random` and
`numpy.random`, and torch's where the module imports it, are seeded anew for each call, by step and sample: a resumed
run draws as one that was never stopped.

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
"""Names of marks that one step may have: each is a metric."""
_LONGEST_NAME = 100


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


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A batch's rewards, in the order of its samples."""

    rewards: np.ndarray
    """float64[n]."""
    marks: dict[str, np.ndarray]
    """bool[n] by name; False where a sample has none."""
    failed: np.ndarray
    """bool[n]: the function failed on it, and the reward is 0."""
    failures: list[str]
    """What was said of those."""
    domains: list[str]
    """The domain of each; empty for a job's only one."""


def final_answer(completion: Completion) -> Score:
    """1 when the text after the last '#' is exactly `record["answer"]` and the response ended there.

    Marks `shows_work`: whether anything stands before that '#'.
    """
    before, hash_sign, final = completion.response.rpartition("#")
    right = bool(hash_sign) and completion.finished and final == str(completion.record["answer"])
    return Score(reward=float(right), marks={"shows_work": bool(before)})


def exact_match(completion: Completion, after: str | None = None, *, ignore_case: bool = False) -> Score:
    """1 when the response is `record["answer"]`, blanks around both aside.

    With `after` it is what follows the last occurrence of that text; a response without it gets 0, and its mark
    `has_answer` is not set.
    """
    before, found, said = completion.response.rpartition(after) if after else ("", "", completion.response)
    answer = str(completion.record["answer"]).strip()
    said = said.strip()
    if ignore_case:
        answer, said = answer.casefold(), said.casefold()
    has_answer = bool(found) or not after
    return Score(reward=float(has_answer and said == answer), marks={"has_answer": has_answer})


@dataclass(frozen=True, kw_only=True)
class LoadedReward:
    """A reward function with its settings, to be called with a completion."""

    function: Callable[..., float | Score]
    arguments: Mapping[str, Any]
    notice: str = ""
    """What its users should know before it is called."""

    def __call__(self, completion: Completion) -> float | Score:
        """The function's answer to `completion`."""
        return self.function(completion, **self.arguments)


def load_reward(path: str, arguments: Mapping[str, Any] | None = None) -> LoadedReward:
    """The function that `package.module:function` names, to be called with a completion and `arguments` by name.

    A function may have an attribute `check_arguments`, which is called with `arguments`, raises ValueError, and may
    return a notice.
    Raises ConfigError when there is none, when its module cannot be imported, and when it does not take these.
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
    except ValueError:  # written in C, without a signature: the first call will show
        pass
    check, notice = getattr(function, "check_arguments", None), ""
    if check is not None:
        try:
            notice = check(**keywords) or ""
        except ValueError as error:
            raise ConfigError(f"reward function {path!r}: {error}") from error
    return LoadedReward(function=function, arguments=keywords, notice=str(notice))


def checked(result: Any) -> Score:
    """What a reward function returned, as a Score of plain values. Raises TypeError or ValueError if it is none."""
    score = result if isinstance(result, Score) else Score(reward=result)
    reward = _number(score.reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}, and advantages of its whole group would not be finite")
    if not isinstance(score.marks, Mapping):
        raise TypeError(f"Score.marks is {_shown(score.marks)}, not a dict of names and booleans")
    if len(score.marks) > MOST_MARKS:
        raise ValueError(f"Score.marks has {len(score.marks):,} names; {MOST_MARKS} at most, each is a metric")
    return Score(reward=reward, marks={_name(name): _mark(name, value) for name, value in score.marks.items()})


def _number(value: Any) -> float:
    """`value` as a float: numbers of Python, numpy and torch are taken, text and containers are not."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"it returned {_shown(value)}, not a number")
    if getattr(value, "ndim", 0):
        raise TypeError(f"it returned an array of shape {tuple(value.shape)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"it returned {_shown(value)}, which no float can hold") from None


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        text = f"not a text of 1 to {_LONGEST_NAME} printable characters"
        raise TypeError(f"Score.marks has the name {_shown(name)}, {text}")
    return name


def _mark(name: str, value: Any) -> bool:
    array = bool(getattr(value, "ndim", 0))
    if isinstance(value, (str, bytes)) or array or value not in (0, 1):
        raise TypeError(f"Score.marks[{name!r}] is {_shown(value)}, not True or False")
    return bool(value)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = "..."
    return f"a {type(value).__name__}, {text[:60]}"
