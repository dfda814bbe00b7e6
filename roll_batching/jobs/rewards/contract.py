"""Interface of reward functions, and two simple reward functions.

A reward function takes one `Completion` and returns a number, or a `Score` with marks. The YAML names it by a
registered name (`config.rewards`) or by dotted path, `package.module:function`; the module must be importable where the
job runs (the working directory is on the path). It runs in worker processes (`rewards.process`), `reward_workers` per
data-parallel rank, with a limit of `reward_timeout` seconds per call. `random`, `numpy.random`, and torch where the
module imports it, are seeded before each call by step and sample: a resumed run draws the same numbers.

    def reward(completion: Completion) -> float:
        return float(completion.response.strip() == completion.answer)

A function may have an attribute `check_record`, which takes a `PromptLine` and the same keyword arguments. The job
calls it for every line of its prompts before it builds a model; a ValueError says why the line cannot be scored.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_batching.errors import ConfigError
from roll_batching.registry import describe_error, load_dotted, printable

MOST_MARKS = 100
"""Different names of marks in one step; each is a metric."""
_LONGEST_NAME = 100
_LARGEST_REWARD = 1e15
"""Magnitude of a reward; sums of squares of much larger ones overflow in fp32, in which losses are computed."""


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A prompt and its line of the data file: the argument of `check_record`."""

    prompt: str
    """The prompt's text."""
    record: Mapping[str, Any]
    """The prompt's line of the data file, as it stands there."""
    answer: Any = None
    """The line's value under `data_args.response`; None without one."""


@dataclass(frozen=True, kw_only=True)
class Completion(PromptLine):
    """One response of the model: the argument of a reward function."""

    response: str
    """The response's text, without the end token."""
    finished: bool
    """Whether the response ended at a stop token; False at the length limit."""
    tokens: int
    """Length of the response in tokens, the end token included."""

    if not TYPE_CHECKING:  # a type checker finds a wrong name itself

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"a completion has no {name!r}, but {', '.join(self.__dataclass_fields__)}")


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
    """1 when the text after the last '#' is exactly the answer and the response ended there.

    Marks `shows_work`: whether there is text before that '#'.
    """
    before, hash_sign, final = completion.response.rpartition("#")
    right = bool(hash_sign) and completion.finished and final == completion.answer
    return Score(reward=float(right), marks={"shows_work": bool(before)})


def check_final_answer(line: PromptLine) -> None:
    """Raises ValueError for an answer that no response can end with."""
    if "#" in text_answer(line):
        text = f"the answer {line.answer[:60]!r} holds a '#', and the text after the last '#' never does"
        raise ValueError(f"{text}: leave the line out, or use another reward function")


final_answer.check_record = check_final_answer  # type: ignore[attr-defined]


def exact_match(completion: Completion, after: str | None = None, *, ignore_case: bool = False) -> Score:
    """1 when the response equals the answer, ignoring surrounding white space.

    With `after`, only the text after its last occurrence counts; a response without it gets 0, and no mark
    `has_answer`.
    """
    _, separator, text = completion.response.rpartition(after) if after else ("", "", completion.response)
    answer, text = text_answer(completion).strip(), text.strip()
    if ignore_case:
        answer, text = answer.casefold(), text.casefold()
    has_answer = bool(separator) or not after
    return Score(reward=float(has_answer and text == answer), marks={"has_answer": has_answer})


def check_exact_match(line: PromptLine, after: str | None = None, *, ignore_case: bool = False) -> None:
    """Raises ValueError for an answer that no response can equal."""
    if after and after in text_answer(line):
        text = f"the answer {line.answer[:60]!r} holds {after!r}, and the text after the last {after!r} never does"
        raise ValueError(f"{text}: leave the line out, or set another reward_args.after")
    text_answer(line)


exact_match.check_record = check_exact_match  # type: ignore[attr-defined]


def text_answer(line: PromptLine) -> str:
    """The answer of a line. Raises ValueError if the answer is missing, no text, or blank."""
    if line.answer is None:
        keys = printable(", ".join(line.record), characters=80)
        raise ValueError(f"the line has no answer (actor_train.data_args.response names its key); it has {keys}")
    if not isinstance(line.answer, str) or not line.answer.strip():
        raise ValueError(f"the answer is {excerpt_of(line.answer)}, and a text that is not blank is needed")
    return line.answer


@dataclass(frozen=True, kw_only=True)
class LoadedReward:
    """A reward function with its keyword arguments."""

    function: Callable[..., float | Score]
    arguments: Mapping[str, Any]
    check: Callable[..., None] | None = None
    """The function's attribute `check_record`."""
    notice: str = ""
    """Shown to the user before training; empty for none."""

    def __call__(self, completion: Completion) -> float | Score:
        """Scores `completion`."""
        return self.function(completion, **self.arguments)

    def fault(self, line: PromptLine) -> str:
        """Why `check_record` refuses `line`; empty if it does not."""
        try:
            if self.check is not None:
                self.check(line, **self.arguments)
        except ValueError as error:
            return str(error) or "check_record raises a ValueError without a text"
        except Exception as error:
            return describe_error(error)
        return ""


def load_reward(path: str, arguments: Mapping[str, Any] | None = None) -> LoadedReward:
    """Loads the function at `path`, `package.module:function`, with `arguments`.

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
        call = f"a completion and reward_args {sorted(keywords)}" if keywords else "a completion alone (no reward_args)"
        raise ConfigError(f"reward function {path!r} cannot be called with {call}: {error}") from error
    except ValueError:  # a C function without a signature cannot be checked before its first call
        pass
    check, notice = getattr(function, "check_arguments", None), ""
    if check is not None:
        try:
            notice = check(**keywords) or ""
        except ValueError as error:
            raise ConfigError(f"reward function {path!r}: {error}") from error
    return LoadedReward(
        function=function, arguments=keywords, check=getattr(function, "check_record", None), notice=str(notice)
    )


def check_score(result: Any) -> Score:
    """Returns the result of a reward function as a Score of plain values. Raises TypeError or ValueError if invalid."""
    score = result if isinstance(result, Score) else Score(reward=result)
    reward = _number(score.reward)
    if not math.isfinite(reward):
        raise ValueError(
            f"the reward is {reward}, and advantages of its whole group would not be finite: return a finite number"
        )
    if abs(reward) > _LARGEST_REWARD:
        raise ValueError(
            f"the reward is {reward:g}, above {_LARGEST_REWARD:g}: its square may overflow in fp32, scale it"
        )
    if not isinstance(score.marks, Mapping):
        raise TypeError(f"Score.marks is {excerpt_of(score.marks)}, not a dict of names and booleans")
    if len(score.marks) > MOST_MARKS:
        raise ValueError(f"Score.marks has {len(score.marks):,} names; {MOST_MARKS} at most, each is a metric")
    return Score(reward=reward, marks={_name(name): _mark(name, value) for name, value in score.marks.items()})


def _number(value: Any) -> float:
    """`value`, a number of Python, numpy or torch, as a float. Raises TypeError for text, arrays and containers."""
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise TypeError(f"it returned {excerpt_of(value)}, not a number: return a float")
    if getattr(value, "ndim", 0):
        raise TypeError(f"it returned an array of shape {tuple(value.shape)}, not a number: return .item()")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"it returned {excerpt_of(value)}, which no float can hold") from None


def _name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        text = f"not a text of 1 to {_LONGEST_NAME} printable characters"
        raise TypeError(f"Score.marks has the name {excerpt_of(name)}, {text}")
    return name


def _mark(name: str, value: Any) -> bool:
    if isinstance(value, (str, bytes)) or bool(getattr(value, "ndim", 0)) or value not in (0, 1):
        raise TypeError(f"Score.marks[{name!r}] is {excerpt_of(value)}, not True or False: give a bool")
    return bool(value)


def excerpt_of(value: Any) -> str:
    """Type and beginning of a wrong value, for errors."""
    try:
        text = repr(value)
    except Exception:  # a user's class
        text = "..."
    return f"a {type(value).__name__}, {printable(text, characters=60)}"


# ---- answers


END_OF_THOUGHTS = "</think>"
_REPEATED_WORDS = 3
"""Words of a repeated sequence. Source: ROLL's reward workers (8eb27cc), `ngram_size=3`."""


def answer_text(response: str) -> str:
    """The text after the last `</think>`, or all of it, without surrounding white space."""
    return response.rpartition(END_OF_THOUGHTS)[2].strip()


def repeated_share(text: str) -> float:
    """Share of the three-word sequences of `text` that occur in it before, ignoring case; 0 without a sequence."""
    words = text.lower().split()
    count = len(words) - _REPEATED_WORDS + 1
    if count < 1:
        return 0.0
    return 1 - len(set(zip(words, islice(words, 1, None), islice(words, 2, None), strict=False))) / count


def check_penalty(penalty: object) -> None:
    """Raises ValueError unless `repetition_penalty` is a number from 0 up to 1e6."""
    if isinstance(penalty, bool) or not isinstance(penalty, (int, float)) or not 0 <= penalty <= 1e6:
        raise ValueError(
            f"reward_args.repetition_penalty is {printable(repr(penalty))}: write a number of at least 0, which is "
            "subtracted times the share of repeated words (ROLL: 0.5)"
        )
