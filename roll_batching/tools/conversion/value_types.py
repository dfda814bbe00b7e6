"""Type checks of the values in a file that its conversion computes with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from roll_batching.jobs.config.diagnostics import shortened


def wrong_types(
    data: Mapping[str, Any], sections: Iterable[str], counts: Iterable[str], numbers: Iterable[str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Path and message of each value of a wrong type, by dotted keys that must be sections, counts or numbers."""
    for key in sections:
        value = value_at(data, key)
        if value is not None and not isinstance(value, Mapping):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}, but it is a section of keys and values"
    for key in counts:
        value = value_at(data, key)
        if value is not None and not (_is_whole(value) and value >= 1):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}: write a whole number of at least 1"
    for key in numbers:
        value = value_at(data, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}: write a number"


def _is_whole(value: Any) -> bool:
    """Whether `value` is a whole number; a float counts, as the result of a division."""
    if isinstance(value, float):
        return math.isfinite(value) and value % 1 == 0
    return isinstance(value, int) and not isinstance(value, bool)


def value_at(data: Any, key: str) -> Any:
    """The value of a dotted key; None if absent."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def number_of(value: Any) -> Any:
    """The number that a text is, if it is one."""
    if isinstance(value, str):
        for kind in (int, float):
            with suppress(ValueError):
                return kind(value)
    return value
