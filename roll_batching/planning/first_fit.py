"""First fit through a tree of free space: each placement costs O(log bins)."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.compiled import compiled
from roll_batching.planning.inputs import Ints


@compiled
def first_fit(sizes: Ints, order: Ints, capacity: int) -> Ints:
    """Bin of every item (int64[n]) when items are placed in `order` into the first bin with room.

    Items above the capacity get a bin of their own that takes nothing else.
    """
    count = len(sizes)
    leaves = 1
    while leaves < count:
        leaves *= 2
    # tree[1] is the root; a leaf is a bin's free space, an inner node the largest below it.
    tree = np.full(2 * leaves, capacity, dtype=np.int64)
    bins = np.empty(count, dtype=np.int64)
    overflow = 0
    opened = 0
    for position in range(count):
        item = order[position]
        size = sizes[item]
        if size > capacity:
            bins[item] = -1
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
    for position in range(count):
        item = order[position]
        if bins[item] < 0:
            bins[item] = opened
            opened += 1
    return bins


def descending(values: Ints) -> Ints:
    """Indices by falling value, equal values in the given order."""
    return np.argsort(-values, kind="stable").astype(np.int64)
