"""Placement of formed micro-batches: raise their number, assign them to ranks and indices, order them.

A micro-batch is a list of unit indices here; an empty list is a filler.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.pipeline.num_micro_batches import group_size_of
from roll_batching.planning.pipeline.ordering import order_for_pipeline
from roll_batching.planning.problem import PlanProblem, Units

Bin = list[int]
B = TypeVar("B", bound=Sized)


@dataclass(frozen=True)
class Placement:
    """Units of each micro-batch, for `assemble`."""

    units: Ints
    """Unit indices, micro-batch by micro-batch, rank-major, each in pack order."""
    offsets: Ints
    """int64[dp*K + 1]: micro-batch m holds `units[offsets[m]:offsets[m + 1]]`."""
    count: int
    """Micro-batches per rank (K)."""
    row_length: Ints | None = None
    """int64[dp*K] or None: smallest row length of each rectangle, such as that of a cut before it was split."""

    @classmethod
    def of_bins(cls, bins: Sequence[Bin], count: int, row_length: Ints | None = None) -> Placement:
        """Placement of rank-major `bins`."""
        units = np.array([unit for members in bins for unit in members], dtype=np.int64)
        return cls(units, offsets_of(np.array([len(members) for members in bins], dtype=np.int64)), count, row_length)


def bin_cost(units: Units, members: Bin) -> int:
    """Cost of the units of one micro-batch."""
    return int(units.costs[members].sum()) if members else 0


def split_by_cost(units: Units, members: Bin) -> tuple[Bin, Bin]:
    """Split into halves of similar cost (longest processing time first), each in the given order."""
    order = sorted(members, key=lambda unit: (-int(units.costs[unit]), unit))
    halves: tuple[Bin, Bin] = ([], [])
    loads = [0, 0]
    for unit in order:
        side = 0 if loads[0] <= loads[1] else 1
        halves[side].append(unit)
        loads[side] += int(units.costs[unit])
    position = {unit: i for i, unit in enumerate(members)}
    return sorted(halves[0], key=position.__getitem__), sorted(halves[1], key=position.__getitem__)


def split_in_order(units: Units, members: Bin) -> tuple[Bin, Bin]:
    """Split in the given order, where the costlier half costs least."""
    running = np.cumsum(units.costs[members])
    larger = np.maximum(running[:-1], running[-1] - running[:-1])
    cut = int(np.argmin(larger)) + 1
    return members[:cut], members[cut:]


def raise_count(
    bins: list[B], target: int, weight: Callable[[B], int], split: Callable[[B], tuple[B, B]], filler: Callable[[], B]
) -> list[B]:
    """Split the micro-batch of largest `weight`, the first of equals, until there are `target`.

    The halves take the place of the split one. Where only single items are left, fillers follow at the end.
    """
    # The place of a half is that of its parent with one more digit, so that places sort in the order of the bins.
    placed: list[tuple[tuple[int, ...], B]] = []
    divisible: list[tuple[int, tuple[int, ...], B]] = []

    def put(place: tuple[int, ...], members: B) -> None:
        if len(members) > 1:
            heapq.heappush(divisible, (-weight(members), place, members))
        else:
            placed.append((place, members))

    for position, members in enumerate(bins):
        put((position,), members)
    while divisible and len(placed) + len(divisible) < target:
        _, place, members = heapq.heappop(divisible)
        for digit, half in enumerate(split(members)):
            put((*place, digit), half)
    placed += [(place, members) for _, place, members in divisible]
    result = [members for _, members in sorted(placed, key=lambda entry: entry[0])]
    return result + [filler() for _ in range(target - len(result))]


def spread_fillers(bins: list[Bin], dp_size: int) -> list[Bin]:
    """Rank-major bins in the given order, with fillers at the end of each rank, not all on the last ranks."""
    filled = [members for members in bins if members]
    if len(filled) == len(bins):
        return bins
    count = len(bins) // dp_size
    result: list[Bin] = []
    for block in np.array_split(np.arange(len(filled)), dp_size):
        result.extend(filled[i] for i in block)
        result.extend([] for _ in range(count - len(block)))
    return result


def align_costs(bins: list[Bin], units: Units, constraints: PlanConstraints, *, has_home_ranks: bool) -> list[Bin]:
    """Rank-major bins with similar costs at each index, by falling cost.

    `has_home_ranks`: the bins are rank-major and stay on their rank.
    """
    costs = np.array([bin_cost(units, members) for members in bins], dtype=np.int64)
    table = (sort_on_home_ranks if has_home_ranks else group_by_cost)(costs, constraints.dp_size)
    return [bins[i] for i in table.reshape(-1)]


def order_in_pipeline(bins: list[Bin], problem: PlanProblem) -> list[Bin]:
    """Rank-major `bins` with their indices in an order of small makespan, the same on all ranks."""
    units, constraints = problem.units, problem.constraints
    table = np.arange(len(bins)).reshape(constraints.dp_size, -1)
    costs = np.array([bin_cost(units, members) for members in bins], dtype=np.int64)
    order = order_for_pipeline(
        costs[table].max(axis=0) + problem.fixed_cost,
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=group_size_of(table.shape[1], constraints),
        seed=constraints.seed,
        shares=problem.chunk_shares,
    )
    return [bins[i] for i in table[:, order].reshape(-1)]


def group_by_cost(costs: Ints, dp_size: int) -> Ints:
    """Bin of each rank and index, int64[dp, K], similar costs at one index; `costs` is int64[dp*K].

    Bins are sorted by falling cost and divided into groups of dp_size. In a group the costliest goes to the rank with
    the smallest total.
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


def sort_on_home_ranks(costs: Ints, dp_size: int) -> Ints:
    """As `group_by_cost`, for rank-major bins that stay on their rank."""
    per_rank = costs.reshape(dp_size, -1)
    count = per_rank.shape[1]
    return np.argsort(-per_rank, axis=1, kind="stable") + np.arange(dp_size)[:, None] * count
