"""Bin packing by length under NeMo-RL's names, "best", and packing metrics.

All packers are deterministic; `first_fit_shuffle` draws its order from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, as_lengths, round_up
from roll_batching.planning.compiled import compiled, next_random, seed_state
from roll_batching.planning.packers.items import Items, continue_first_fit, descending, first_fit, group_by_bin


def pack_bins(lengths: ArrayLike, capacity: int, algorithm: str = "best", *, seed: int = 0) -> list[list[int]]:
    """Pack items of `lengths` (int[n], at least 1 each) into bins of `capacity`.

    Algorithms: "concatenative" (next-fit in the given order), "first_fit_decreasing", "first_fit_shuffle",
    "modified_first_fit_decreasing", and "best" (the better of the two decreasing ones: never more bins than
    first-fit-decreasing). Returns bins in the order of opening, items in the order of placement. Raises `PlanError` for
    an item above the capacity.
    """
    sizes = as_lengths(lengths)
    packer = _PACKERS.get(algorithm)
    if packer is None:
        raise PlanError(f"algorithm={algorithm!r} is unknown; choose one of {', '.join(_PACKERS)}")
    wrong = np.flatnonzero((sizes > capacity) | (sizes < 1))
    if len(wrong):
        raise PlanError(
            f"item {wrong[0]} of length {sizes[wrong[0]]} cannot be packed into bins of {capacity}: "
            "lengths lie between 1 and the capacity"
        )
    return packer(Items(slots=sizes, longest=sizes, rows=np.ones_like(sizes), capacity=capacity, seed=seed))


def packing_metrics(
    lengths: ArrayLike, bins: Sequence[Sequence[int]], capacity: int, *, multiple: int = 1
) -> dict[str, float]:
    """Packing metrics of `bins` (lists of indices into `lengths`) under NeMo-RL's names.

    Lengths are rounded up to `multiple`. `bin_utilization` = tokens / (bins * capacity), `waste_ratio` =
    1 - utilization, `bin_balance` = 1 - standard deviation / mean of the bins' utilization (below 0 for very uneven
    bins), `packing_efficiency` = ceil(tokens / capacity) / bins. `alignment_waste`, which NeMo-RL does not have, is the
    share of the packed tokens that rounding added. Raises `PlanError` without a bin that holds items.
    """
    if not bins:
        raise PlanError("packing_metrics: bins is empty")
    sizes = as_lengths(lengths)
    aligned = round_up(sizes, multiple)
    loads = np.array([int(aligned[list(members)].sum()) if len(members) else 0 for members in bins])
    total = int(loads.sum())
    if total == 0:
        raise PlanError("packing_metrics: all bins are empty")
    used = np.concatenate([np.asarray(members, dtype=np.int64) for members in bins])
    utilization = loads / capacity
    return {
        "num_bins": float(len(bins)),
        "theoretical_min_bins": float(-(-total // capacity)),
        "bin_utilization": total / (len(bins) * capacity),
        "waste_ratio": 1 - total / (len(bins) * capacity),
        "bin_balance": float(1 - utilization.std() / utilization.mean()),
        "packing_efficiency": -(-total // capacity) / len(bins),
        "alignment_waste": 1 - int(sizes[used].sum()) / total,
    }


def concatenative(items: Items) -> list[list[int]]:
    """Next-fit: an item that does not fit closes the bin and opens the next."""
    return group_by_bin(_next_fit(items.slots, items.capacity), np.arange(len(items), dtype=np.int64))


def first_fit_decreasing(items: Items) -> list[list[int]]:
    """First-fit, largest items first."""
    order = descending(items.slots)
    return group_by_bin(first_fit(items.slots, order, items.capacity), order)


def first_fit_shuffle(items: Items) -> list[list[int]]:
    """First-fit in a random order, drawn from the seed."""
    order = _shuffled(len(items), items.seed)
    return group_by_bin(first_fit(items.slots, order, items.capacity), order)


def modified_first_fit_decreasing(items: Items) -> list[list[int]]:
    """Heuristic of Johnson and Garey (1985), with at most 71/60 of the fewest bins.

    1. Each large item (> C/2) opens a bin.
    2. Forward: each bin takes the largest medium item (> C/3) that fits.
    3. Backward: each bin without a medium item takes two small ones (> C/6): the smallest, and the largest that fits
       with it.
    4. Forward: each bin takes the largest remaining items that fit, greedily.
    5. The other items are packed by first-fit.
    """
    bins, placed = _modified(items.slots, descending(items.slots), items.capacity)
    return group_by_bin(bins, placed)


def best(items: Items) -> list[list[int]]:
    """First-fit-decreasing, or modified first-fit-decreasing if that needs fewer bins."""
    plain = first_fit_decreasing(items)
    if len(plain) > -(-int(items.slots.sum()) // items.capacity):
        modified = modified_first_fit_decreasing(items)
        if len(modified) < len(plain):
            return modified
    return plain


_PACKERS: dict[str, Callable[[Items], list[list[int]]]] = {
    packer.__name__: packer
    for packer in (best, concatenative, first_fit_decreasing, first_fit_shuffle, modified_first_fit_decreasing)
}


@compiled
def _next_fit(sizes: Ints, capacity: int) -> Ints:
    """Bin of every item (int64[n])."""
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
def _shuffled(count: int, seed: int) -> Ints:
    """A permutation of `count` items (Fisher-Yates)."""
    order = np.arange(count)
    state = seed_state(seed)
    for last in range(count - 1, 0, -1):
        state = next_random(state)
        other = state % (last + 1)
        order[last], order[other] = order[other], order[last]
    return order


@compiled
def _modified(sizes: Ints, order: Ints, capacity: int) -> tuple[Ints, Ints]:
    """Modified first-fit-decreasing; returns the bin of each item and the order of placement.

    `order` (int64[n]) sorts descending. Large items end at position `large_end` of it, medium
    ones at `medium_end`, small ones at `small_end`.
    """
    count = len(sizes)
    bin_of_item = np.full(count, -1, dtype=np.int64)
    placed = np.empty(count, dtype=np.int64)
    large_end = _first_not_above(sizes, order, 0, count, capacity // 2)
    medium_end = _first_not_above(sizes, order, large_end, count, capacity // 3)
    small_end = _first_not_above(sizes, order, medium_end, count, capacity // 6)
    free = np.empty(large_end, dtype=np.int64)
    for position in range(large_end):
        bin_of_item[order[position]] = position
        free[position] = capacity - sizes[order[position]]
        placed[position] = order[position]
    # `next_open[p]` leads from a position in `order` to the next one without a bin (path compression).
    next_open = np.arange(count + 1)
    num_placed, has_medium = _add_medium(sizes, order, medium_end, free, next_open, bin_of_item, placed)
    num_placed = _add_pairs(
        sizes, order, medium_end, small_end, free, next_open, bin_of_item, placed, num_placed, has_medium
    )
    num_placed = _add_greedily(sizes, order, free, next_open, bin_of_item, placed, num_placed)
    rest = np.empty(count - num_placed, dtype=np.int64)
    num_rest = 0
    for position in range(count):
        if bin_of_item[order[position]] < 0:
            rest[num_rest] = order[position]
            num_rest += 1
    continue_first_fit(sizes, rest, capacity, free, bin_of_item)
    placed[num_placed:] = rest
    return bin_of_item, placed


@compiled
def _add_medium(
    sizes: Ints, order: Ints, medium_end: int, free: Ints, next_open: Ints, bin_of_item: Ints, placed: Ints
) -> tuple[int, Ints]:
    """Step 2 of `modified_first_fit_decreasing`; returns the number of placed items, and which bins got one (0, 1)."""
    num_placed = large_end = len(free)
    has_medium = np.zeros(large_end, dtype=np.int64)
    # Free space grows from bin to bin, so one pointer through the items would miss items that it has passed. A binary
    # search with `next_open` finds them.
    for target in range(large_end):
        position = _find_open(next_open, _first_not_above(sizes, order, large_end, medium_end, free[target]))
        if position < medium_end:
            has_medium[target] = 1
            _put(sizes, order, position, target, free, next_open, bin_of_item)
            placed[num_placed] = order[position]
            num_placed += 1
    return num_placed, has_medium


@compiled
def _add_pairs(
    sizes: Ints,
    order: Ints,
    medium_end: int,
    small_end: int,
    free: Ints,
    next_open: Ints,
    bin_of_item: Ints,
    placed: Ints,
    num_placed: int,
    has_medium: Ints,
) -> int:
    """Step 3 of `modified_first_fit_decreasing`; returns the number of placed items.

    The smallest small item and the largest that still fits, for each bin without a medium item, last bin first.
    """
    last_small = small_end - 1
    for target in range(len(free) - 1, -1, -1):
        if has_medium[target]:
            continue
        while last_small >= medium_end and bin_of_item[order[last_small]] >= 0:
            last_small -= 1
        if last_small <= medium_end:
            break
        room = free[target] - sizes[order[last_small]]
        position = _find_open(next_open, _first_not_above(sizes, order, medium_end, small_end, room))
        if position >= last_small:
            continue
        for pair_position in (last_small, position):
            _put(sizes, order, pair_position, target, free, next_open, bin_of_item)
            placed[num_placed] = order[pair_position]
            num_placed += 1
    return num_placed


@compiled
def _add_greedily(
    sizes: Ints, order: Ints, free: Ints, next_open: Ints, bin_of_item: Ints, placed: Ints, num_placed: int
) -> int:
    """Step 4 of `modified_first_fit_decreasing`; returns the number of placed items."""
    count, large_end = len(order), len(free)
    for target in range(large_end):
        position = large_end
        while True:
            start = _first_not_above(sizes, order, max(position, large_end), count, free[target])
            position = _find_open(next_open, start)
            if position >= count:
                break
            _put(sizes, order, position, target, free, next_open, bin_of_item)
            placed[num_placed] = order[position]
            num_placed += 1
    return num_placed


@compiled
def _put(sizes: Ints, order: Ints, position: int, target: int, free: Ints, next_open: Ints, bin_of_item: Ints) -> None:
    """Put the item at `position` of `order` into the bin `target`."""
    item = order[position]
    bin_of_item[item] = target
    free[target] -= sizes[item]
    next_open[position] = position + 1


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
def _find_open(next_open: Ints, position: int) -> int:
    """First position from `position` on whose item has no bin."""
    root = position
    while next_open[root] != root:
        root = next_open[root]
    while next_open[position] != root and next_open[position] != position:
        following = next_open[position]
        next_open[position] = root
        position = following
    return root
