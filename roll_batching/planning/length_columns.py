"""Choice of the columns of a table that hold lengths, by name and values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roll_batching.errors import DataError
from roll_batching.planning.arrays import Ints

_LENGTH_ENDINGS = ("token", "tokens", "length", "lengths", "len", "lens")
_TOTAL_WORDS = {"total", "sum", "all", "overall", "sequence", "seq", "seqlen", "full"}
_OTHER_WORDS = {"max", "min", "limit", "per"}
_ID_WORDS = {
    *("id", "ids", "idx", "index", "uid", "uuid", "key", "hash", "row", "seed", "rank", "unnamed"),
    *("time", "timestamp", "timestamps", "ts", "date", "created", "arrived", "arrival"),
}


Column = Ints | str | None
"""Integers, or the fault of a column that begins with integers, or None for a column of other values."""


@dataclass(frozen=True)
class Choice:
    """Columns whose sum is the length, and why each other column is left out."""

    columns: tuple[str, ...]
    left_out: Mapping[str, str]


def choose_columns(table: Mapping[str, Column], wanted: Sequence[str] = ()) -> Choice:
    """Columns of `table` whose sum is the length of a sequence.

    Without `wanted`: the columns named like tokens or lengths; if there are none, the single column that remains
    without ids, counters, timestamps and constants. Raises `DataError` for a column that does not exist or has faulty
    values, and where several choices are possible.
    """
    known = ", ".join(repr(name) for name in table)
    for name in wanted:
        if name not in table:
            raise DataError(f"there is no column {name!r}; there are {known}")
        if table[name] is None:
            raise DataError(f"column {name!r} holds no integers: name a column of lengths")
    _check_columns(table, wanted)
    if wanted:
        return Choice(tuple(dict.fromkeys(wanted)), {})
    left_out = {name: "not integers" for name, values in table.items() if values is None or isinstance(values, str)}
    integers = {name: values for name, values in table.items() if isinstance(values, np.ndarray)}
    named = [
        name
        for name, values in table.items()
        if values is not None
        and not (_ID_WORDS | _OTHER_WORDS) & set(_words(name))
        and any(word.endswith(_LENGTH_ENDINGS) for word in _words(name))
    ]
    _check_columns(table, named or [name for name in table if not _named_like_an_id(name)])
    if not integers:
        raise DataError(f"there is no column of integers; there are {known}")
    if named:
        chosen, reasons = _without_repeats({name: integers[name] for name in named})
        reasons |= {name: "not named like a length" for name in integers if name not in named}
    else:
        chosen, reasons = _without_ids(integers)
    if len(chosen) == 1 or (named and _are_parts(chosen)):
        return Choice(tuple(chosen), left_out | reasons)
    known = ", ".join(
        repr(name)
        if values is None or isinstance(values, str)
        else f"{name!r} ({', '.join(map(str, values[:2]))}, ...)"
        for name, values in table.items()
    )
    raise DataError(
        f"which columns are lengths? There are {known}; pass --column NAME, once for each column of the sum"
    )


def _check_columns(table: Mapping[str, Column], names: Sequence[str]) -> None:
    for name in names:
        fault = table[name]
        if isinstance(fault, str):
            raise DataError(fault)


def _words(name: str) -> list[str]:
    """Words of a name: `ContextTokens` and `context_tokens` are `context`, `tokens`."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _are_parts(names: Sequence[str]) -> bool:
    """Whether all columns are parts of a sequence; in a sum with a total, a part would count twice.

    A column named `length` or `tokens` alone is a total too.
    """
    words = [_words(name) for name in names]
    return not any(_TOTAL_WORDS & set(name) or (len(name) == 1 and name[0] in _LENGTH_ENDINGS) for name in words)


def _without_repeats(columns: Mapping[str, Ints]) -> tuple[list[str], dict[str, str]]:
    """The column that is the sum of the others (prompt, response, total), or all columns."""
    may_overflow = any(max(abs(int(v.max())), abs(int(v.min()))) >= 2**56 for v in columns.values())
    total = np.sum(list(columns.values()), axis=0, dtype=object if may_overflow else None)
    for name, values in columns.items():
        if len(columns) > 1 and np.array_equal(total - values, values):
            return [name], {other: f"part of {name}" for other in columns if other != name}
    return list(columns), {}


def _without_ids(columns: Mapping[str, Ints]) -> tuple[list[str], dict[str, str]]:
    """Columns without ids, counters and constants; a single column always remains."""
    if len(columns) == 1 and not _named_like_an_id(next(iter(columns))):
        return list(columns), {}
    reasons: dict[str, str] = {}
    for name, values in columns.items():
        steps = np.diff(values)
        if _named_like_an_id(name):
            reasons[name] = "named like an id or a time"
        elif len(steps) and (steps == 1).all():
            reasons[name] = "counts the rows"
        elif len(steps) and not steps.any():
            reasons[name] = "constant"
    remaining = [name for name in columns if name not in reasons]
    rising = [name for name in remaining if len(columns[name]) > 2 and (np.diff(columns[name]) > 0).all()]
    if len(rising) < len(remaining):
        reasons |= dict.fromkeys(rising, "unique and rising, like an id or a time")
    return [name for name in columns if name not in reasons], reasons


def _named_like_an_id(name: str) -> bool:
    return not name or bool(_ID_WORDS & set(_words(name)))
