"""First-fit with a tree of free space: O(log bins) per item."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled


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
