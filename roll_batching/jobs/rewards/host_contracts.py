"""Calls reward functions that were written for verl, slime or ROLL as these frameworks call them.

Sources: verl 1dda039, `experimental/reward_loop/reward_manager/naive.py` and `workers/reward_manager/batch.py`; slime
624b824, `rollout/rm_hub/__init__.py`; ROLL 8eb27cc, `pipeline/rlvr/rewards`.
"""

from __future__ import annotations

import asyncio
import enum
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.rewards.contract import Completion, PromptLine, Score
from roll_batching.registry import describe_error, load_dotted, printable

_SINGLE_TURN = 2
"""verl's `num_turns` for a prompt and one response, which both count (`agent_loop/single_turn_agent_loop.py`)."""
_BATCH = {"data_sources": "data_source", "solution_strs": "solution_str"}
"""Parameters by which a function for batches is recognised."""


# ---- verl


def verl_compute_score(
    completion: Completion, *, path: str, name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None
) -> float | Score:
    """Calls a `compute_score` for verl, the function `name` in the file or module `path`.

    It may be a coroutine, take batches (verl's plural argument names), and return a dict: its booleans become marks.
    """
    function = _load(path, name)
    extra = {**(completion.record.get("extra_info") or {}), "num_turns": _SINGLE_TURN, "rollout_reward_scores": {}}
    arguments = {
        "data_source": completion.record.get("data_source"),
        "solution_str": completion.response,
        "ground_truth": completion.answer,
        "extra_info": extra,
    }
    batched = _takes_batches(function)
    if batched:
        # verl's names for batches are plural, `extra_infos` too.
        arguments = {f"{key}s": [value] for key, value in arguments.items()}
    result = _call(function, path, **(arguments | dict(reward_kwargs or {})))
    if batched:
        result = _only(result, path)
    if not isinstance(result, Mapping):
        return result
    reward = _item(result, "score", path)
    return Score(reward=reward, marks={key: bool(value) for key, value in result.items() if _is_boolean(value)})


def _check_verl(*, path: str, name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None) -> str:
    if not _takes_batches(_check_function(path, name)):
        return ""
    return f"{name} of {path} takes batches, and gets one response at a time: it cannot compare responses"


def _check_answer(line: PromptLine, **_: Any) -> None:
    """Raises ValueError for a line without a right answer."""
    if line.answer is None:
        keys = printable(", ".join(line.record), characters=80)
        text = "no ground truth: actor_train.data_args.response names no key with a value"
        raise ValueError(f"{text}; the line's keys are {keys}")


verl_compute_score.check_arguments = _check_verl  # type: ignore[attr-defined]
verl_compute_score.check_record = _check_answer  # type: ignore[attr-defined]


# ---- slime


@dataclass
class _Sample:
    """Stands for slime's `Sample`, with the fields that a job knows of a response."""

    class Status(enum.Enum):
        """How a response ended."""

        COMPLETED = "completed"
        TRUNCATED = "truncated"

    prompt: str
    response: str
    response_length: int
    label: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    status: Status = Status.COMPLETED

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a sample has no {name} here: only {', '.join(self.__dataclass_fields__)}")


class _Options(SimpleNamespace):
    """slime's `args`: the options in `reward_args.options`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"args.{name} is not set here: add it to reward_args.options")


def slime_custom_rm(
    completion: Completion,
    *,
    path: str,
    reward_key: str | None = None,
    metadata_key: str = "metadata",
    grouped: bool = False,
    options: Mapping[str, Any] | None = None,
) -> float:
    """Calls the function of slime's `--custom-rm-path`, an async function of `args` and a sample.

    `options` are attributes of `args`; `reward_key` is the key of the reward if the function returns a dict; `grouped`:
    the function takes a list of samples, as under `--group-rm`.
    """
    function = _load(*_of_slime(path))
    # The function may compare the status with that of slime's own class.
    kind: Any = getattr(sys.modules.get("slime.utils.types"), "Sample", _Sample)
    sample = kind(
        prompt=completion.prompt,
        response=completion.response,
        response_length=completion.tokens,
        label=completion.answer,
        metadata=dict(completion.record.get(metadata_key) or {}),
        status=kind.Status.COMPLETED if completion.finished else kind.Status.TRUNCATED,
    )
    args = _Options(**{"custom_rm_path": path, "reward_key": reward_key, **(options or {})})
    result = _only(_call(function, path, args, [sample]), path) if grouped else _call(function, path, args, sample)
    return result if reward_key is None else _item(result, reward_key, path)


def _check_slime(*, path: str, grouped: bool = False, **_: Any) -> str:
    _check_function(*_of_slime(path))
    return f"{path} takes lists, and gets one sample at a time: it cannot compare samples" if grouped else ""


def _of_slime(path: str) -> tuple[str, str]:
    """Module and function of `package.module.function`."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"reward_args.path is {path!r}: write package.module.function, as slime does")
    return module, name


slime_custom_rm.check_arguments = _check_slime  # type: ignore[attr-defined]


# ---- ROLL


def response_and_answer(
    completion: Completion,
    *,
    path: str,
    name: str,
    arguments: Mapping[str, Any] | None = None,
    item: int | str | None = None,
) -> float:
    """Calls a plain function with the response and the right answer, as ROLL's reward workers do.

    `item`: index or key of the reward if the function returns a tuple or dict.
    """
    result = _call(_load(path, name), path, completion.response, completion.answer, **(arguments or {}))
    return result if item is None else _item(result, item, path)


def _check_plain(*, path: str, name: str, **_: Any) -> str:
    _check_function(path, name)
    return ""


response_and_answer.check_arguments = _check_plain  # type: ignore[attr-defined]
response_and_answer.check_record = _check_answer  # type: ignore[attr-defined]


# ---- functions of others


@cache
def _load(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of a file or module. Raises ConfigError."""
    module = path.removeprefix("pkg://")
    if not module.endswith(".py"):
        return load_dotted("reward function", f"{module}:{name}")  # type: ignore[no-any-return]
    function = getattr(_module_of(Path(module).expanduser()), name, None)
    if function is None:
        raise ConfigError(f"{path} has no {name!r}: correct reward_args.name")
    return function  # type: ignore[no-any-return]


@cache
def _module_of(file: Path) -> ModuleType:
    """The module in `file`. Raises ConfigError."""
    if not file.is_file():
        raise ConfigError(f"{file} is no file: relative paths start at the working directory, {Path.cwd()}")
    spec = importlib.util.spec_from_file_location(f"reward_of_{file.stem}", file)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may raise anything, and call sys.exit
        raise ConfigError(f"{file} cannot be imported: {describe_error(error)}") from error
    return module


def _check_function(path: str, name: str) -> Callable[..., Any]:
    """Loads the function, and raises ValueError, as `check_arguments` must, if it cannot be loaded or called."""
    try:
        function = _load(path, name)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if not callable(function):
        raise ValueError(f"{name} of {path} is a {type(function).__name__}, not a function")
    return function


@cache
def _takes_batches(function: Callable[..., Any]) -> bool:
    return inspect.signature(function).parameters.keys() >= _BATCH.keys()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The event loop of all calls. They share it because an HTTP client's session works in a single loop."""
    return asyncio.new_event_loop()


def _call(function: Callable[..., Any], path: str, *values: Any, **arguments: Any) -> Any:
    """Calls a function or coroutine. Raises ValueError with the function's error and where it was raised."""
    try:
        result = function(*values, **arguments)
        return _loop().run_until_complete(result) if inspect.isawaitable(result) else result
    except Exception as error:
        raise ValueError(f"{path}: {describe_error(error)}") from error


def _only(result: Any, path: str) -> Any:
    """The single item of `result`, the list of scores that a function returned for a batch of one response."""
    if not hasattr(result, "__len__") or isinstance(result, str | Mapping) or len(result) != 1:
        raise ValueError(f"{path} returned {printable(repr(result), characters=60)} for a batch of one: return a list")
    return result[0]


def _item(result: Any, key: int | str, path: str) -> Any:
    try:
        return result[key]
    except (TypeError, LookupError):
        text = printable(repr(result), characters=60)
        raise ValueError(f"{path} returned {text}, which has no {key!r}: return it, or name another key") from None


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")  # numpy 1 and 2
