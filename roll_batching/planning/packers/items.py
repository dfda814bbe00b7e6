"""Input and output of packers, and first-fit with a tree of free space, O(log bins) per item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, largest_of, offsets_of, sums_of
from roll_batching.planning.compiled import compiled

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
    offsets = offsets_of(sizes)
    if rectangles:
        loads = largest_of(items.longest[flat], offsets) * sums_of(items.rows[flat], offsets)
    else:
        loads = sums_of(items.slots[flat], offsets)
    if np.any(loads > items.capacity) or np.any(sizes == 0):
        over = int(np.argmax((loads > items.capacity) | (sizes == 0)))
        raise PlanError(
            f"algorithm={name!r} made bin {over} of {loads[over]} tokens, capacity {items.capacity}: no bin may be "
            "empty or above it"
        )
    return [members.tolist() for members in arrays]


def group_by_bin(bins: Ints, order: Ints) -> list[list[int]]:
    """Items of each bin as lists, in the order of placement; `bins` (int64[n]) is the bin of each item."""
    by_bin = order[np.argsort(bins[order], kind="stable")]
    counts = np.bincount(bins, minlength=int(bins.max(initial=-1)) + 1)
    return [part.tolist() for part in np.split(by_bin, np.cumsum(counts)[:-1])]


# ---- first-fit


def first_fit(sizes: Ints, order: Ints, capacity: int) -> Ints:
    """Bin of each item (int64[n]) when items are placed in `order` into the first bin with room.

    An item above the capacity gets a bin by itself.
    """
    bins = np.full(len(sizes), -1, dtype=np.int64)
    continue_first_fit(sizes, order, capacity, np.empty(0, dtype=np.int64), bins)
    return bins


@compiled
def continue_first_fit(sizes: Ints, order: Ints, capacity: int, free: Ints, bins: Ints) -> None:
    """Write the bins of the items in `order` into `bins`; bins with room `free` (int64[open]) are open already."""
    count = len(order)
    leaves = 1
    while leaves < len(free) + count:
        leaves *= 2
    # tree[1] is the root; a leaf is a bin's free space, an inner node the largest below it.
    tree = np.full(2 * leaves, capacity, dtype=np.int64)
    for bin_ in range(len(free)):  # a slice assignment takes numba a second to compile
        tree[leaves + bin_] = free[bin_]
    if len(free):
        for node in range(leaves - 1, 0, -1):
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    overflow = 0
    opened = len(free)
    for position in range(count):
        item = order[position]
        size = sizes[item]
        if size > capacity:
            overflow += 1
            continue
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < size:
                node += 1
        bins[item] = node - leaves
        opened = max(opened, node - leaves + 1)
        tree[node] -= size
        node //= 2
        while node >= 1:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node //= 2
    if overflow:
        for position in range(count):
            item = order[position]
            if sizes[item] > capacity:
                bins[item] = opened
                opened += 1


def descending(values: Ints) -> Ints:
    """Indices by falling value, equal values in the given order."""
    return np.argsort(-values, kind="stable").astype(np.int64)
