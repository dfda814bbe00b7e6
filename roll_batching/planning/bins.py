"""Bin packing under NeMo-RL's names, and "best".

`pack_bins(lengths, capacity, algorithm)` returns lists of item indices, each list at most `capacity` in
sum. All packers are deterministic; `first_fit_shuffle` takes a seed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.compiled import compiled, next_random, seed_state
from roll_batching.planning.first_fit import descending, first_fit
from roll_batching.planning.inputs import Ints, as_lengths


def pack_bins(lengths: ArrayLike, capacity: int, algorithm: str = "best", *, seed: int = 0) -> list[list[int]]:
    """Pack items of `lengths` (int[n], at least 1 each) into bins of `capacity`.

    Algorithms: "concatenative" (next-fit in the given order), "first_fit_decreasing", "first_fit_shuffle",
    "modified_first_fit_decreasing", and "best" (the better of the two decreasing ones: never more bins than
    first-fit-decreasing). Bins come in the order they are opened, items in the order they are placed.
    Raises `PlanError` naming an item above the capacity.
    """
    sizes = as_lengths(lengths)
    bins, order = assign_bins(sizes, capacity, algorithm, seed=seed)
    return group_by_bin(bins, order)


def assign_bins(sizes: Ints, capacity: int, algorithm: str, *, seed: int = 0) -> tuple[Ints, Ints]:
    """Bin of every item and the order of placement (both int64[n])."""
    packer = _PACKERS.get(algorithm)
    if packer is None:
        raise PlanError(f"algorithm={algorithm!r} is unknown; choose one of {', '.join(_PACKERS)}")
    wrong = np.flatnonzero((sizes > capacity) | (sizes < 1))
    if len(wrong):
        raise PlanError(
            f"item {wrong[0]} of length {sizes[wrong[0]]} cannot be packed into bins of {capacity}: "
            "lengths lie between 1 and the capacity"
        )
    return packer(sizes, capacity, seed)


def group_by_bin(bins: Ints, order: Ints) -> list[list[int]]:
    """Items of each bin as lists, in the order of placement."""
    by_bin = order[np.argsort(bins[order], kind="stable")]
    counts = np.bincount(bins, minlength=int(bins.max(initial=-1)) + 1)
    return [part.tolist() for part in np.split(by_bin, np.cumsum(counts)[:-1])]


@compiled
def next_fit(sizes: Ints, capacity: int) -> Ints:
    """Bin of every item when a bin is closed for good as soon as an item does not fit."""
    bins = np.empty(len(sizes), dtype=np.int64)
    current = 0
    used = 0
    for item in range(len(sizes)):
        if item > 0 and used + sizes[item] > capacity:
            current += 1
            used = 0
        bins[item] = current
        used += sizes[item]
    return bins


@compiled
def shuffled(count: int, seed: int) -> Ints:
    """A permutation of `count` items (Fisher-Yates)."""
    order = np.arange(count)
    state = seed_state(seed)
    for last in range(count - 1, 0, -1):
        state = next_random(state)
        other = state % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order


@compiled
def modified_first_fit_decreasing(sizes: Ints, order: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Johnson and Garey's heuristic: bin of every item and the order of placement.

    `order` sorts descending. Large items (> C/2) open a bin each; going forward, each takes the largest
    medium item (> C/3) that fits; going backward, bins without a medium one take a pair of small ones
    (> C/6): the smallest and the largest that then fits; going forward, each takes, greedily, the largest
    remaining items that fit; what is left is packed by first fit.
    """
    count = len(sizes)
    bins = np.full(count, -1, dtype=np.int64)
    placed = np.empty(count, dtype=np.int64)
    done = 0
    large = 0
    while large < count and 2 * sizes[order[large]] > capacity:
        large += 1
    medium = large
    while medium < count and 3 * sizes[order[medium]] > capacity:
        medium += 1
    small = medium
    while small < count and 6 * sizes[order[small]] > capacity:
        small += 1
    free = np.empty(large, dtype=np.int64)
    for position in range(large):
        bins[order[position]] = position
        free[position] = capacity - sizes[order[position]]
        placed[done] = order[position]
        done += 1
    has_medium = np.zeros(large, dtype=np.bool_)
    # `skip[p]` leads from a position in `order` to the next one that is not placed (path compression).
    skip = np.arange(count + 1)
    # Largest medium that fits: free space grows along the bins, so a pointer would miss items passed over;
    # a binary search for the first fitting position and `skip` finds it.
    for target in range(large):
        position = _first_not_above(sizes, order, large, medium, free[target])
        position = _next_open(skip, position)
        if position < medium:
            item = order[position]
            bins[item] = target
            free[target] -= sizes[item]
            has_medium[target] = True
            skip[position] = position + 1
            placed[done] = item
            done += 1
    last_small = small - 1
    for target in range(large - 1, -1, -1):
        if has_medium[target]:
            continue
        while last_small >= medium and bins[order[last_small]] >= 0:
            last_small -= 1
        if last_small <= medium:
            break
        smallest = order[last_small]
        room = free[target] - sizes[smallest]
        position = _next_open(skip, _first_not_above(sizes, order, medium, small, room))
        if position >= last_small:
            continue
        partner = order[position]
        for item, where in ((smallest, last_small), (partner, position)):
            bins[item] = target
            free[target] -= sizes[item]
            skip[where] = where + 1
            placed[done] = item
            done += 1
    for target in range(large):
        position = large
        while True:
            start = _first_not_above(sizes, order, max(position, large), count, free[target])
            position = _next_open(skip, start)
            if position >= count:
                break
            item = order[position]
            bins[item] = target
            free[target] -= sizes[item]
            skip[position] = position + 1
            placed[done] = item
            done += 1
    rest = np.empty(count - done, dtype=np.int64)
    left = 0
    for position in range(count):
        if bins[order[position]] < 0:
            rest[left] = order[position]
            left += 1
    # What is left fits in no bin so far except by first fit among all, which the tree does as well: the
    # opened bins' free space comes first.
    leaves = 1
    while leaves < large + left:
        leaves *= 2
    tree = np.full(2 * leaves, capacity, dtype=np.int64)
    for target in range(large):
        tree[leaves + target] = free[target]
    for node in range(leaves - 1, 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
    for i in range(left):
        item = rest[i]
        node = 1
        while node < leaves:
            node *= 2
            if tree[node] < sizes[item]:
                node += 1
        bins[item] = node - leaves
        tree[node] -= sizes[item]
        node //= 2
        while node >= 1:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node //= 2
        placed[done] = item
        done += 1
    return bins, placed


@compiled
def _first_not_above(sizes: Ints, order: Ints, start: int, end: int, limit: int) -> int:
    """First position in `order[start:end]` (descending) whose size is at most `limit`, or `end`."""
    low = start
    high = end
    while low < high:
        middle = (low + high) // 2
        if sizes[order[middle]] > limit:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _next_open(skip: Ints, position: int) -> int:
    root = position
    while skip[root] != root:
        root = skip[root]
    while skip[position] != root and skip[position] != position:
        following = skip[position]
        skip[position] = root
        position = following
    return root


def _concatenative(sizes: Ints, capacity: int, seed: int) -> tuple[Ints, Ints]:
    return next_fit(sizes, capacity), np.arange(len(sizes), dtype=np.int64)


def _decreasing(sizes: Ints, capacity: int, seed: int) -> tuple[Ints, Ints]:
    order = descending(sizes)
    return first_fit(sizes, order, capacity), order


def _shuffle(sizes: Ints, capacity: int, seed: int) -> tuple[Ints, Ints]:
    order = shuffled(len(sizes), seed)
    return first_fit(sizes, order, capacity), order


def _modified(sizes: Ints, capacity: int, seed: int) -> tuple[Ints, Ints]:
    return modified_first_fit_decreasing(sizes, descending(sizes), capacity)


def _best(sizes: Ints, capacity: int, seed: int) -> tuple[Ints, Ints]:
    best = _decreasing(sizes, capacity, seed)
    least = -(-int(sizes.sum()) // capacity)
    if int(best[0].max()) + 1 > least:
        other = _modified(sizes, capacity, seed)
        if int(other[0].max()) < int(best[0].max()):
            best = other
    return best


_PACKERS: dict[str, Callable[[Ints, int, int], tuple[Ints, Ints]]] = {
    "best": _best,
    "concatenative": _concatenative,
    "first_fit_decreasing": _decreasing,
    "first_fit_shuffle": _shuffle,
    "modified_first_fit_decreasing": _modified,
}
