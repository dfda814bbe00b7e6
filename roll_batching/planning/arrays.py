"""Integer and boolean arrays of plans: checks, rounding, sums over parts; checks of single arguments."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roll_batching.checked_fields import LARGEST
from roll_batching.errors import PlanError, RollBatchingError

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def as_lengths(lengths: ArrayLike) -> Ints:
    """`lengths` as int64[n]; raises `PlanError` unless it is a one-dimensional array of integers."""
    array = _array_of(lengths, "lengths")
    if array.ndim != 1 or len(array) == 0:
        raise PlanError(f"lengths has shape {array.shape}: pass a one-dimensional array of at least one sample")
    sizes = as_ints(array, "lengths", len(array))
    if len(sizes) * int(sizes.max()) > 1 << 50:
        raise PlanError(
            f"lengths: {len(sizes)} of up to {sizes.max()} tokens may exceed 2^50 together: plan fewer at once"
        )
    return sizes


def as_ints(values: ArrayLike, name: str, count: int) -> Ints:
    """`values` as int64[count]; raises `PlanError` with `name` for another shape or values that are not integers."""
    array = _array_of(values, name)
    if array.shape != (count,):
        raise PlanError(f"{name} has shape {array.shape}, expected ({count},), one value per sample")
    if array.dtype.kind not in "iu":
        if array.dtype.kind != "f" or not np.all(np.isfinite(array)) or np.any(array != np.floor(array)):
            raise PlanError(f"{name} must be integers, got dtype {array.dtype}: convert them with astype(np.int64)")
    for end in (array.min(), array.max()) if len(array) else ():
        if not -(2**63) <= int(end) < 2**63:
            raise PlanError(f"{name} must fit into 64 bits with a sign, got {end}")
    return np.array(array, dtype=np.int64)


def _array_of(values: ArrayLike, name: str) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except Exception as error:  # ragged lists, tensors with a gradient or on a device raise various errors
        raise PlanError(f"{name} cannot be read as an array of integers: {error}") from error


def round_up(values: Ints, multiple: int) -> Ints:
    """Each value rounded up to a multiple."""
    if multiple == 1:
        return values
    return (values + (multiple - 1)) // multiple * multiple


def offsets_of(counts: Ints) -> Ints:
    """Offsets of consecutive parts, int64[n + 1], from their sizes, int64[n]."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def sums_of(values: Ints, offsets: Ints) -> Ints:
    """Sum of each part `values[offsets[i]:offsets[i + 1]]`, int64[n]; 0 for an empty part."""
    return _reduce_parts(np.add, values, offsets)


def largest_of(values: Ints, offsets: Ints) -> Ints:
    """Largest value of each part, as `sums_of`, int64[n]; 0 for an empty part. Values are at least 0."""
    return _reduce_parts(np.maximum, values, offsets)


def _reduce_parts(operation: np.ufunc, values: Ints, offsets: Ints) -> Ints:
    if len(offsets) - 1 == len(values) and offsets[-1] == len(values) and np.all(np.diff(offsets) == 1):
        return values.copy()
    # `reduceat` returns a value of the next part for an empty one.
    result = np.zeros(len(offsets) - 1, dtype=np.int64)
    filled = np.diff(offsets) > 0
    if len(values):
        result[filled] = operation.reduceat(values, offsets[:-1][filled])
    return result


# ---- arguments


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
