"""Numeric fields of dataclasses: type, bounds and unit stand in the annotation and are checked at construction.

Pydantic reads the same bounds (`settings.fields.section_of`), so that YAML, Python and the command line have one limit.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import operator
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from numbers import Real
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, Unit

from roll_batching.errors import ConfigError, RollBatchingError

LARGEST = 1 << 40
"""Largest size, token count or seed. Values that plans compute from them fit into 64 bits."""

Count = Annotated[int, Ge(1), Le(LARGEST)]
"""A size or a number of tokens, at least 1."""
Seed = Annotated[int, Ge(0), Le(LARGEST)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
OptionalPositive = Annotated[float | None, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
"""A part of a whole, from 0 to 1."""
PositiveShare = Annotated[float, Gt(0), Le(1)]

_WORDS: Mapping[type, str] = {Gt: "above", Ge: "at least", Lt: "below", Le: "at most"}
_HOLDS = {Gt: operator.gt, Ge: operator.ge, Lt: operator.lt, Le: operator.le}
_MISTAKEN: Mapping[str, tuple[tuple[float, str], ...]] = {
    "seconds": ((1e-6, "microseconds"), (1e-3, "milliseconds")),
    "FLOP/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")),
    "bytes/s": ((1e9, "GB/s"), (1e6, "MB/s")),
}
"""Other units in which values of a unit are often written, with the factors that convert them."""


class CheckedFields:
    """Base of dataclasses whose numbers, switches and choices (`Literal`) are checked at construction.

    Numbers are finite, within the bounds of their annotation, and neither booleans nor texts; numpy's become Python's.
    Raises the `error` of the class, which names class, field, value and bounds. A subclass with a `__post_init__` calls
    that of its base first.
    """

    _error: ClassVar[type[RollBatchingError]] = ConfigError

    def __init_subclass__(cls, *, error: type[RollBatchingError] | None = None, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if error is not None:
            cls._error = error

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():  # type: ignore[arg-type]  # a class is hashable
            value = getattr(self, name)
            try:
                checked = kind.read(value)
            except ValueError as error:
                raise self._error(f"{type(self).__name__}.{name} {error}") from None
            if checked is not value:
                object.__setattr__(self, name, checked)


@dataclass(frozen=True)
class FieldKind:
    """Values that a field may hold."""

    number: type | None
    """Kind of number that the field holds: bool, int or float; None: no number."""
    choices: tuple[Any, ...]
    takes_none: bool
    takes_functions: bool
    metadata: tuple[Any, ...]
    """Bounds and unit."""
    default: Any = None

    @classmethod
    def of(cls, annotation: Any) -> FieldKind | None:
        """The kind of a field with numbers, switches or choices; None for other fields."""
        metadata: list[Any] = []
        choices: list[Any] = []
        plain: list[Any] = []
        members = [annotation]
        while members:
            member = members.pop(0)
            origin, inside = typing.get_origin(member), typing.get_args(member)
            if origin is Annotated:
                members.append(inside[0])
                metadata += inside[1:]
            elif origin in (typing.Union, types.UnionType):
                members += inside
            elif origin is Literal:
                choices += inside
            else:
                plain.append(collections.abc.Callable if origin is collections.abc.Callable else member)
        numbers = [kind for kind in (float, int, bool) if kind in plain]
        others = set(plain) - {*numbers, types.NoneType, collections.abc.Callable}
        if others or not (numbers or choices):
            return None
        takes_none, takes_functions = types.NoneType in plain, collections.abc.Callable in plain
        return cls(next(iter(numbers), None), tuple(choices), takes_none, takes_functions, tuple(metadata))

    def read(self, value: Any) -> Any:
        """`value` as a plain Python value. Raises ValueError that shows it and says what to give instead."""
        if value is None and self.takes_none or self.takes_functions and callable(value):
            return value
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return value
        number = self._number(value)
        if number is None or any(not _holds(bound, number) for bound in self.metadata):
            raise ValueError(
                f"is {value!r}; it must be {self._wanted()}{unit_hint(number, self.metadata, self.default)}"
            )
        return number

    def _number(self, value: Any) -> bool | int | float | None:
        """`value` as the field's kind of number, or None if it is not a number."""
        if isinstance(value, bool | np.bool_):
            return bool(value) if self.number is bool else None
        try:
            if self.number is int:
                return operator.index(value)
            if self.number is float and isinstance(value, Real) and math.isfinite(number := float(value)):
                return number
        except (TypeError, OverflowError):
            pass
        return None

    def _wanted(self) -> str:
        names = [str(choice) for choice in self.choices]
        parts = [f"one of {', '.join(names)}"] if len(names) > 1 else names
        if self.number is not None:
            text = {bool: "True or False", int: "an integer", float: "a finite number"}[self.number]
            unit = unit_of(self.metadata)
            bounds = " and ".join(bounds_of(self.metadata))
            text += f" of {unit}" if unit else ""
            parts.append(f"{text}, {bounds}" if bounds else text)
        parts += ["a function"] * self.takes_functions + ["None"] * self.takes_none
        last = ", or " if any("," in part for part in parts) else " or "
        return last.join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def bounds_of(metadata: Iterable[Any]) -> list[str]:
    """The bounds in an annotation's metadata, in words: "at least 0", "below 0.5"."""
    bounds = [(_WORDS[type(item)], _limit(item)) for item in metadata if type(item) in _WORDS]
    return [f"{word} {limit if isinstance(limit, int) else f'{limit:g}'}" for word, limit in bounds]


def unit_of(metadata: Iterable[Any]) -> str | None:
    """The unit in an annotation's metadata."""
    return next((item.unit for item in metadata if isinstance(item, Unit)), None)


def unit_hint(value: float | None, metadata: Iterable[Any], default: Any = None) -> str:
    """The end of an error about `value`: the value in another unit, within the bounds; often empty.

    Of several units the one that comes nearest to the `default`.
    """
    metadata = tuple(metadata)
    units = [
        (value * factor, unit)
        for factor, unit in _MISTAKEN.get(unit_of(metadata) or "", ())
        if value and all(_holds(bound, value * factor) for bound in metadata)
    ]
    if not units:
        return ""
    is_known = isinstance(default, float) and default > 0
    number, unit = min(units, key=lambda one: abs(math.log(one[0] / default)) if is_known and one[0] > 0 else 0.0)
    return f"; did you mean {number:g} ({value:g} {unit})?"


def _holds(bound: Any, number: float) -> bool:
    """Whether `number` is within `bound`; metadata of other kinds bound nothing."""
    kind = type(bound)
    return kind not in _HOLDS or bool(_HOLDS[kind](number, _limit(bound)))


def _limit(bound: Any) -> Any:
    return getattr(bound, type(bound).__name__.lower())


@cache
def _kinds(cls: type[Any]) -> dict[str, FieldKind]:
    if not hasattr(cls, "__dataclass_fields__"):
        return {}
    annotations = {
        name: (owner, annotation)
        for owner in reversed(cls.__mro__)
        if "__dataclass_fields__" in vars(owner)  # other classes declare no fields
        for name, annotation in inspect.get_annotations(owner).items()
    }
    kinds = {field: FieldKind.of(_resolve(*annotations[field.name])) for field in fields(cls)}
    return {field.name: replace(kind, default=field.default) for field, kind in kinds.items() if kind is not None}


def _resolve(owner: type[Any], annotation: Any) -> Any:
    """The type that an annotation of the class `owner` names; `Any` if only a type checker can resolve it."""
    holder = types.SimpleNamespace(__annotations__={"field": annotation})
    try:
        # One field at a time: a user's class with an unresolvable type is checked in its other fields.
        names = vars(sys.modules[owner.__module__])
        return typing.get_type_hints(holder, names, dict(vars(owner)), include_extras=True)["field"]
    except Exception:  # the annotation is any expression
        return Any
