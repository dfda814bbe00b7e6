"""Arguments as plain Python values: what numpy or torch call an integer or a switch is one."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import numpy as np

from roll_batching.errors import PlanError, RollBatchingError

LARGEST = 1 << 40
"""Of sizes, token counts and seeds. What plans compute from them stays within 64 bits."""


def integer_of(name: str, value: Any, lowest: int = 1, *, error: type[RollBatchingError] = PlanError) -> int:
    """`value` as an int from `lowest` to `LARGEST`; raises `error` by `name` for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool | np.bool_) or number < lowest:
        raise error(f"{name}={value!r} must be an integer of at least {lowest}")
    if number > LARGEST:
        raise error(f"{name}={value!r} is above 2^40: give a smaller integer")
    return number


def switch_of(name: str, value: Any, *, error: type[RollBatchingError] = PlanError) -> bool:
    """`value` as a bool; raises `error` by `name` for anything but True and False."""
    if not isinstance(value, bool | np.bool_):
        raise error(f"{name}={value!r} must be True or False")
    return bool(value)


def kind_of(value: Any) -> str:
    """What `value` is, for messages: "the class X" or "a X"."""
    return f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}"
