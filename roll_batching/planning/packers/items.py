"""Input and output of packers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, largest_of, offsets_of, sums_of

Bins = Sequence[Sequence[int]]
"""Item indices of each bin, in the order of computation."""


@dataclass(frozen=True)
class Items:
    """Items to put into bins: samples, or groups of samples that stay together.

    Each item fits into a bin by itself. In mode "packed" a bin computes the sum of `slots` of its items; a rectangle
    computes the sum of `rows` times the largest `longest`. Neither may exceed `capacity`.
    """

    slots: Ints
    """int64[n], at least 1: tokens of each item, aligned."""
    longest: Ints
    """int64[n]: aligned length of the longest row of each item."""
    rows: Ints
    """int64[n]: rows of each item, 1 for a single sample."""
    capacity: int
    seed: int
    """Seed of packers that draw random numbers."""

    def __len__(self) -> int:
        return len(self.slots)


class Packer(Protocol):
    """Function that forms bins."""

    def __call__(self, items: Items) -> Bins:
        """Bins of `items`: each index exactly once, no bin empty or above the capacity."""
        ...


def check_bins(bins: Bins, items: Items, name: str, *, rectangles: bool) -> list[list[int]]:
    """`bins` of the packer `name` as lists; raises `PlanError` for bins that are invalid for `items`."""
    try:
        arrays = [np.asarray(members if len(members) else np.zeros(0, dtype=np.int64)) for members in bins]
        sizes = np.array([len(members) for members in arrays], dtype=np.int64)
        flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise PlanError(f"algorithm={name!r} must return lists of item indices: {error}") from error
    if len(flat) and flat.dtype.kind not in "iu":
        raise PlanError(f"algorithm={name!r} returned bins of {flat.dtype}; return lists of item indices")
    times = np.bincount(flat[(flat >= 0) & (flat < len(items))], minlength=len(items))
    wrong = np.flatnonzero(times != 1)
    if len(flat) != len(items) or len(wrong):
        fault = f"item {wrong[0]} is in {times[wrong[0]]} bins" if len(wrong) else "an index is not one of an item"
        raise PlanError(f"algorithm={name!r} must put each of {len(items)} items into exactly one bin: {fault}")
    loads = _loads(items, flat, offsets_of(sizes), rectangles)
    if np.any(loads > items.capacity) or np.any(sizes == 0):
        over = int(np.argmax((loads > items.capacity) | (sizes == 0)))
        raise PlanError(
            f"algorithm={name!r} made bin {over} of {loads[over]} tokens, capacity {items.capacity}: no bin may be "
            "empty or above it"
        )
    return [members.tolist() for members in arrays]


def _loads(items: Items, flat: Ints, offsets: Ints, rectangles: bool) -> Ints:
    if not rectangles:
        return sums_of(items.slots[flat], offsets)
    return largest_of(items.longest[flat], offsets) * sums_of(items.rows[flat], offsets)


def group_by_bin(bins: Ints, order: Ints) -> list[list[int]]:
    """Items of each bin as lists, in the order of placement; `bins` (int64[n]) is the bin of each item."""
    by_bin = order[np.argsort(bins[order], kind="stable")]
    counts = np.bincount(bins, minlength=int(bins.max(initial=-1)) + 1)
    return [part.tolist() for part in np.split(by_bin, np.cumsum(counts)[:-1])]
