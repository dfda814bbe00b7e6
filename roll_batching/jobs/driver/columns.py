"""Holds samples as flat numpy columns without padding, which Ray's object store shares without a copy; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints


@dataclass(frozen=True, kw_only=True)
class Column:
    """One field of a set of samples; `samples.fields.FieldSpec` has the kinds."""

    values: Any
    """numpy `[tokens, ...]` or `[samples, ...]`, by the kind; any object for a static field."""
    kind: Literal["token", "next_token", "sample", "static"]
    pad: int | float | bool
    dtype: str
    """Name of the torch dtype. Where numpy lacks it (bfloat16), `values` holds the bits."""

    @property
    def per_token(self) -> bool:
        """Whether `values` has one row per token."""
        return self.kind in ("token", "next_token")

    @property
    def nbytes(self) -> int:
        """Bytes of `values`; 0 for a static field that is not an array."""
        return int(getattr(self.values, "nbytes", 0))


Columns = Mapping[str, Column]


def replica_samples(plan: Plan, dp_rank: int) -> tuple[Ints, Ints]:
    """Returns ids and lengths of the samples that `plan` gives to a replica, in the order of its columns."""
    samples = plan.rank_samples(dp_rank)
    return plan.ids[samples], plan.lengths[samples]


def take_samples(columns: Columns, offsets: Ints, indices: Ints) -> dict[str, Column]:
    """Copies the samples at `indices`, in that order; `offsets` [n + 1] has each sample's first token.

    Copied sample by sample: an index over all tokens would take more memory and time than the tokens.
    """
    starts, ends = offsets[indices].tolist(), offsets[np.asarray(indices) + 1].tolist()

    def take(column: Column) -> Any:
        values = column.values
        if column.kind == "static":
            return values
        if column.kind == "sample":
            return values[indices]
        pieces = [values[start:end] for start, end in zip(starts, ends, strict=True)]
        return np.concatenate(pieces) if pieces else values[:0].copy()

    return {name: replace(column, values=take(column)) for name, column in columns.items()}


def merge_shards(shards: Sequence[tuple[Columns, Ints]], lengths: Ints) -> dict[str, Column]:
    """Merges shards into columns of all samples: the inverse of `take_samples`.

    A shard is (its columns, the indices of its samples). Samples in no shard get the pad value. `lengths` (int64 [n])
    has the tokens of every sample.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    merged = {}
    for name, column in shards[0][0].items():
        if column.kind == "static":
            merged[name] = column
            continue
        size = int(offsets[-1]) if column.per_token else len(lengths)
        values = np.full((size, *column.values.shape[1:]), column.pad, dtype=column.values.dtype)
        for columns, indices in shards:
            _copy(columns[name], values, offsets, indices)
        merged[name] = replace(column, values=values)
    return merged


def _copy(column: Column, values: Any, offsets: Ints, indices: Ints) -> None:
    """Copies the samples of a shard's `column` to their places in `values`."""
    if not column.per_token:
        values[indices] = column.values
        return
    begin = 0
    for start, end in zip(offsets[indices].tolist(), offsets[np.asarray(indices) + 1].tolist(), strict=True):
        values[start:end] = column.values[begin : begin + end - start]
        begin += end - start


def nbytes(columns: Iterable[Column]) -> int:
    """Bytes of all values."""
    return sum(column.nbytes for column in columns)
