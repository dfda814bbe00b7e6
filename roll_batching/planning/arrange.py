"""From formed micro-batches to ranks and indices: raising the count, lockstep groups, order.

A micro-batch is a list of unit indices here; these helpers serve the algorithms that form micro-batches
first and place them afterwards.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from roll_batching.planning.inputs import Ints, Units

Bin = list[int]


def bin_cost(units: Units, members: Bin) -> int:
    """Cost of the units of one micro-batch."""
    return int(units.costs[members].sum()) if members else 0


def split_in_two(units: Units, members: Bin) -> tuple[Bin, Bin]:
    """Two halves of like cost (longest processing time first), each in the given order."""
    order = sorted(members, key=lambda unit: (-int(units.costs[unit]), unit))
    halves: tuple[Bin, Bin] = ([], [])
    loads = [0, 0]
    for unit in order:
        side = 0 if loads[0] <= loads[1] else 1
        halves[side].append(unit)
        loads[side] += int(units.costs[unit])
    position = {unit: i for i, unit in enumerate(members)}
    return sorted(halves[0], key=position.__getitem__), sorted(halves[1], key=position.__getitem__)


def cut_in_order(units: Units, members: Bin) -> tuple[Bin, Bin]:
    """Two halves that keep the order: the cut with the smaller larger cost."""
    running = np.cumsum(units.costs[members])
    larger = np.maximum(running[:-1], running[-1] - running[:-1])
    cut = int(np.argmin(larger)) + 1
    return members[:cut], members[cut:]


def raise_count(
    bins: list[Bin],
    target: int,
    key: Callable[[Bin], int],
    split: Callable[[Bin], tuple[Bin, Bin]],
) -> list[Bin]:
    """Split the largest micro-batch (by `key`, the first of equals) until there are `target`.

    The halves take their parent's place. Where only single units are left, empty micro-batches (fillers)
    follow at the end.
    """
    # A half's place is its parent's with one more digit, so that places sort as the bins stand.
    placed: list[tuple[tuple[int, ...], Bin]] = []
    divisible: list[tuple[int, tuple[int, ...], Bin]] = []

    def put(place: tuple[int, ...], members: Bin) -> None:
        if len(members) > 1:
            heapq.heappush(divisible, (-key(members), place, members))
        else:
            placed.append((place, members))

    for position, members in enumerate(bins):
        put((position,), members)
    while divisible and len(placed) + len(divisible) < target:
        _, place, members = heapq.heappop(divisible)
        for digit, half in enumerate(split(members)):
            put((*place, digit), half)
    placed += [(place, members) for _, place, members in divisible]
    result = [members for _, members in sorted(placed)]
    return result + [[] for _ in range(target - len(result))]


def lockstep_groups(costs: Ints, dp_size: int) -> Ints:
    """Rank of every micro-batch (int64[dp*K], any order) as `bins[dp_rank][k]` indices, int64[dp, K].

    Equal costs meet at equal k: micro-batches are sorted by falling cost and cut into groups of dp_size;
    inside a group the costliest goes to the rank with the least so far.
    """
    order = np.argsort(-costs, kind="stable")
    count = len(costs) // dp_size
    table = np.empty((dp_size, count), dtype=np.int64)
    totals = np.zeros(dp_size, dtype=np.int64)
    for k in range(count):
        group = order[k * dp_size : (k + 1) * dp_size]
        ranks = np.argsort(totals, kind="stable")
        table[ranks, k] = group
        totals[ranks] += costs[group]
    return table


def home_groups(costs: Ints, dp_size: int) -> Ints:
    """As `lockstep_groups` for rank-major micro-batches that may not change their rank."""
    per_rank = costs.reshape(dp_size, -1)
    count = per_rank.shape[1]
    order = np.argsort(-per_rank, axis=1, kind="stable")
    return order + np.arange(dp_size)[:, None] * count


def small_at_ends(costs: Ints) -> Ints:
    """Order of indices k for a pipeline: the small ones first and last, the large ones in the middle."""
    falling = np.argsort(-costs, kind="stable")
    return np.concatenate([falling[::2][::-1], falling[1::2]]).astype(np.int64)
