"""Samples as they lie in Ray's object store: flat columns, no padding, read where they lie. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints


@dataclass(frozen=True, kw_only=True)
class Column:
    """One field of some samples; see `data.fields.FieldSpec` for its kinds."""

    values: Any
    """numpy `[tokens, ...]` or `[samples, ...]`, by the kind; of a static field anything."""
    kind: Literal["token", "next_token", "sample", "static"]
    pad: int | float | bool
    dtype: str
    """torch's word for it: where numpy has no such dtype, `values` has the bits."""

    @property
    def per_token(self) -> bool:
        """Whether there is one row per token."""
        return self.kind in ("token", "next_token")

    @property
    def nbytes(self) -> int:
        """Bytes of its values; 0 for a static field that is no array."""
        return int(getattr(self.values, "nbytes", 0))


Columns = Mapping[str, Column]


def share_of(plan: Plan, dp_rank: int) -> tuple[Ints, Ints]:
    """Ids and lengths of a replica's samples, in the order in which their columns are handed out."""
    samples = plan.rank_samples(dp_rank)
    return plan.ids[samples], plan.lengths[samples]


def cut(columns: Columns, offsets: Ints, rows: Ints) -> dict[str, Column]:
    """The samples at `rows`, in that order; `offsets` [n + 1] say where each sample begins. Copies what it takes.

    Sample by sample: an index over all tokens would take more memory, and time, than the tokens.
    """
    starts, ends = offsets[rows].tolist(), offsets[np.asarray(rows) + 1].tolist()

    def taken(column: Column) -> Any:
        values = column.values
        if column.kind == "static":
            return values
        if column.kind == "sample":
            return values[rows]
        pieces = [values[start:end] for start, end in zip(starts, ends, strict=True)]
        return np.concatenate(pieces) if pieces else values[:0].copy()

    return {name: replace(column, values=taken(column)) for name, column in columns.items()}


def join(parts: Sequence[tuple[Columns, Ints]], lengths: Ints) -> dict[str, Column]:
    """Undoes `cut`: columns of all samples, given those of each part and its samples' rows. The others read pad."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    first = parts[0][0]
    joined = {}
    for name, column in first.items():
        if column.kind == "static":
            joined[name] = column
            continue
        size = int(offsets[-1]) if column.per_token else len(lengths)
        values = np.full((size, *column.values.shape[1:]), column.pad, dtype=column.values.dtype)
        for columns, rows in parts:
            _put(values, columns[name], offsets, rows)
        joined[name] = replace(column, values=values)
    return joined


def _put(values: Any, column: Column, offsets: Ints, rows: Ints) -> None:
    if not column.per_token:
        values[rows] = column.values
        return
    begin = 0
    for start, end in zip(offsets[rows].tolist(), offsets[np.asarray(rows) + 1].tolist(), strict=True):
        values[start:end] = column.values[begin : begin + end - start]
        begin += end - start


def nbytes(columns: Iterable[Column]) -> int:
    """Bytes of the values of all of them."""
    return sum(column.nbytes for column in columns)
