"""Number partitioning by Karmarkar-Karp, balanced home ranks for a batch, and lower bounds of balanced costs."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, as_lengths, offsets_of
from roll_batching.planning.compiled import compiled
from roll_batching.planning.cost_model import DEFAULT_COST, sequence_costs
from roll_batching.planning.packers.items import descending

REFINEMENT_BUDGET = 10_000_000
"""Most pairs of items that the exchanges after the differencing compare."""


def karmarkar_karp(weights: ArrayLike, k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Partition items into `k` parts of nearly equal weight by largest differencing, then exchanges.

    `weights` is int[n], none negative. With `equal_size` each part holds n / k items, and n must be divisible by k.
    Returns parts in the order of their first items, items in the given order; parts may be empty when n < k.
    """
    array = np.asarray(weights)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or np.any(array < 0):
        raise PlanError(f"karmarkar_karp: weights is {array.dtype}{list(array.shape)}: pass 1-D integers of at least 0")
    if k < 1:
        raise PlanError(f"karmarkar_karp: k={k} must be at least 1")
    if (total := array.sum(dtype=object)) >= 1 << 62:
        raise PlanError(f"karmarkar_karp: the weights add up to {total}, at least 2^62: divide them by a power of two")
    if equal_size and len(array) % k:
        raise PlanError(f"karmarkar_karp: {len(array)} items cannot form {k} parts of equal size: change k")
    values = array.astype(np.int64)
    if len(values) == 0:
        return [[] for _ in range(k)]
    order = descending(values)
    part_of = _largest_differencing(values, order, k, k if equal_size else 1)
    part_of = _lower_largest(values, part_of, k, equal_size, REFINEMENT_BUDGET)
    by_part = np.argsort(part_of, kind="stable")
    counts = np.bincount(part_of, minlength=k)
    parts = [part.tolist() for part in np.split(by_part, np.cumsum(counts)[:-1])]
    return sorted(parts, key=lambda items: (not items, items[:1]))


@compiled
def _largest_differencing(values: Ints, order: Ints, k: int, width: int) -> Ints:
    """Part of every item (int64[n]) by k-way largest differencing.

    A state is a partial partition: its non-empty parts by falling sum; other parts are empty. The two states with the
    largest difference between their largest and smallest part are merged, largest part with smallest, until one state
    remains. At the start each state holds `width` items of `order`. Only non-empty parts are stored, so that the cost
    of a merge depends on the parts of the states, not on k.
    """
    count = len(values)
    states = (count + width - 1) // width
    # The parts of a state are consecutive columns: sum, and first and last item of each part's linked list.
    arena = np.empty((3, 4 * count + 4 * k), dtype=np.int64)
    start = np.arange(states) * width
    length = np.minimum(width, count - start)
    room = np.full(states, width, dtype=np.int64)
    used = states * width
    heap: list[tuple[int, int]] = [(int(start[i]), i) for i in range(0)]  # empty: tells numba the type, (spread, state)
    for state in range(states):
        for i in range(length[state]):
            item = order[start[state] + i]
            arena[0, start[state] + i] = values[item]
            arena[1:, start[state] + i] = item
        heap.append((_spread(arena, start[state], length[state], k), state))
    heapq.heapify(heap)
    following = np.full(count, -1, dtype=np.int64)
    merged = np.empty((3, k), dtype=np.int64)
    while len(heap) > 1:
        a = heapq.heappop(heap)[1]
        b = heapq.heappop(heap)[1]
        if length[a] < length[b]:
            a, b = b, a
        size = _merge(arena, start[a], length[a], start[b], length[b], k, following, merged)
        if size > room[a]:
            room[a] = min(k, 2 * size)
            if used + room[a] > arena.shape[1]:
                longer = np.empty((3, 2 * arena.shape[1] + room[a]), dtype=np.int64)
                longer[:, :used] = arena[:, :used]
                arena = longer
            start[a] = used
            used += room[a]
        length[a] = size
        arena[:, start[a] : start[a] + size] = merged[:, :size]
        heapq.heappush(heap, (_spread(arena, start[a], size, k), a))
    last = heap[0][1]
    part_of = np.empty(count, dtype=np.int64)
    for part in range(length[last]):
        item = arena[1, start[last] + part]
        while item >= 0:
            part_of[item] = part
            item = following[item]
    return part_of


@compiled
def _spread(arena: Ints, start: int, length: int, k: int) -> int:
    """Smallest part of a state less its largest, at most 0; the state with the lowest is merged first."""
    smallest = arena[0, start + k - 1] if length == k else 0
    return int(smallest - arena[0, start])


@compiled
def _merge(
    arena: Ints, start_a: int, length_a: int, start_b: int, length_b: int, k: int, following: Ints, merged: Ints
) -> int:
    """Merge two states, largest part with smallest, into `merged` by falling sum; returns the number of parts.

    State a has at least as many parts as b. `following` (int64[n]) links the items of a part.
    """
    alone_a = min(length_a, k - length_b)
    alone_b = min(length_b, k - length_a)
    both = length_a - alone_a
    # The i-th part of a is merged with the (k - 1 - i)-th of b.
    sums = np.empty(both, dtype=np.int64)
    for i in range(both):
        sums[i] = -(arena[0, start_a + alone_a + i] + arena[0, start_b + k - 1 - alone_a - i])
    order = np.argsort(sums, kind="mergesort")
    i = j = m = 0
    for out in range(alone_a + alone_b + both):
        value_a = arena[0, start_a + i] if i < alone_a else -1
        value_b = arena[0, start_b + j] if j < alone_b else -1
        value_m = -sums[order[m]] if m < both else -1
        if value_a >= value_b and value_a >= value_m:
            merged[:, out] = arena[:, start_a + i]
            i += 1
        elif value_b >= value_m:
            merged[:, out] = arena[:, start_b + j]
            j += 1
        else:
            left = start_a + alone_a + order[m]
            right = start_b + k - 1 - alone_a - order[m]
            following[arena[2, left]] = arena[1, right]
            merged[0, out] = value_m
            merged[1, out] = arena[1, left]
            merged[2, out] = arena[2, right]
            m += 1
    return alone_a + alone_b + both


@compiled
def _lower_largest(values: Ints, part_of: Ints, k: int, equal_size: bool, budget: int) -> Ints:
    """Exchange items of the largest part with others, or move one, while the largest sum falls.

    Each round compares all pairs of an item in the largest part and one outside, and all moves, and takes the one with
    the smallest larger sum of the two parts. This repairs ties of the differencing, which matter in small cases.
    """
    part_of = part_of.copy()
    count = len(values)
    sums = np.zeros(k, dtype=np.int64)
    for item in range(count):
        sums[part_of[item]] += values[item]
    least = -(-sums.sum() // k)
    inside = np.empty(count, dtype=np.int64)
    while budget > 0:
        top = int(np.argmax(sums))
        if sums[top] <= least:
            break
        num_inside = 0
        for item in range(count):
            if part_of[item] == top:
                inside[num_inside] = item
                num_inside += 1
        best = sums[top]
        best_item = -1
        best_other = -1
        best_part = -1
        budget -= num_inside * (count + k)
        if budget < 0:
            break
        for i in range(num_inside):
            item = inside[i]
            for other in range(count):
                part = part_of[other]
                change = values[item] - values[other]
                if part != top and change > 0:
                    after = max(sums[top] - change, sums[part] + change)
                    if after < best:
                        best, best_item, best_other, best_part = after, item, other, part
            if not equal_size:
                part = int(np.argmin(sums))
                after = max(sums[top] - values[item], sums[part] + values[item])
                if after < best:
                    best, best_item, best_other, best_part = after, item, -1, part
        if best_item < 0:
            break
        change = values[best_item]
        if best_other >= 0:
            change -= values[best_other]
            part_of[best_other] = top
        part_of[best_item] = best_part
        sums[top] -= change
        sums[best_part] += change
    return part_of


def batch_balance(lengths: ArrayLike, dp_size: int, *, cost: Any = None) -> Ints:
    """`home_rank` (int64[n]) with nearly equal cost per DP rank, as in ROLL.

    Karmarkar-Karp, with numbers of samples per rank that differ by at most one.
    """
    sizes = as_lengths(lengths)
    costs = sequence_costs(sizes, DEFAULT_COST if cost is None else cost).values
    missing = -len(sizes) % dp_size
    # Items of cost 0, at most one per rank, make n divisible by `dp_size`.
    padded = np.concatenate([costs + 1, np.zeros(missing, dtype=np.int64)])
    home = np.empty(len(padded), dtype=np.int64)
    for rank, items in enumerate(karmarkar_karp(padded, dp_size, equal_size=True)):
        home[items] = rank
    return home[: len(sizes)]


# ---- lower bounds


def rank_total_bound(costs: Ints, slots: Ints, ranks: int, room: int | None) -> int:
    """Lower bound of the largest rank total, for indivisible units with `costs` and `slots` (int64[n]).

    The largest of: the mean; for each j, the cheapest j + 1 of the j * ranks + 1 costliest units, since some rank has
    j + 1 of them; the costliest unit together with the cheapest slots that the other ranks have no room for. `room` is
    the number of tokens that one rank can hold in all its micro-batches; None: not limited.
    """
    mean = -(-int(costs.sum()) // ranks)
    running = offsets_of(np.sort(costs)[::-1])
    full = np.arange((len(costs) - 1) // ranks + 1)
    together = running[full * ranks + 1] - running[full * (ranks - 1)]
    giant = 0 if room is None else _giant_bound(costs, slots, (ranks - 1) * room)
    return max(mean, int(together.max()), giant)


def lockstep_bound(costs: Ints, slots: Ints, ranks: int, cap: int | None) -> int:
    """Lower bound of the lockstep cost: the sum over indices of the largest cost among the ranks.

    No two units above half the cap share a pack. By falling cost, an index holds at most `ranks` of them, so the sum of
    their costs 0, ranks, 2 * ranks, ... is a lower bound. `rank_total_bound` is another. 0 without a cap.
    """
    if cap is None:
        return 0
    alone = np.sort(costs[2 * slots > cap])[::-1]
    return int(alone[::ranks].sum())


def _giant_bound(costs: Ints, slots: Ints, elsewhere: int) -> int:
    """Cost of the costliest unit and of the cheapest slots that do not fit `elsewhere` (tokens of other ranks)."""
    giant = int(np.argmax(costs))
    more = int(slots.sum()) - elsewhere - int(slots[giant])
    if more <= 0:
        return int(costs[giant])
    cheapest = np.argsort(costs / slots, kind="stable")
    cheapest = cheapest[cheapest != giant]
    full = int(np.searchsorted(np.cumsum(slots[cheapest]), more, side="right"))
    cost = int(costs[cheapest[:full]].sum())
    if full < len(cheapest):
        part = more - int(slots[cheapest[:full]].sum())
        cost += int(costs[cheapest[full]]) * part // int(slots[cheapest[full]])
    return int(costs[giant]) + cost
