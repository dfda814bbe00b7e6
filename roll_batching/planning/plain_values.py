"""Conversion of arguments to plain Python values, also from numpy and torch scalars."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import numpy as np

from roll_batching.checked_fields import LARGEST
from roll_batching.errors import PlanError, RollBatchingError


def integer_of(name: str, value: Any, lowest: int = 1, *, error: type[RollBatchingError] = PlanError) -> int:
    """`value` as an int from `lowest` to `LARGEST`; raises `error` with `name` for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        number = lowest - 1
    if isinstance(value, bool | np.bool_) or number < lowest:
        raise error(f"{name}={value!r} must be an integer of at least {lowest}")
    if number > LARGEST:
        raise error(f"{name}={value!r} is above 2^40: set a smaller integer")
    return number


def kind_of(value: Any) -> str:
    """Description of the type of `value` for messages: "the class X" or "a X"."""
    return f"the class {value.__name__}" if inspect.isclass(value) else f"a {type(value).__name__}"
