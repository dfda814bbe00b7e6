"""Micro-batches on ranks: pools form them, their number is raised, ranks and indices assigned, indices ordered.

A micro-batch is a list of unit indices here; an empty list is a filler.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Flags, Ints, offsets_of
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.packers.items import Items, Packer, check_bins
from roll_batching.planning.packers.rectangles import Limits, cut_positions
from roll_batching.planning.pipeline.ordering import order_of_indices
from roll_batching.planning.problem import PlanProblem, Units
from roll_batching.registry import describe_error

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
    entries: list[tuple[tuple[int, ...], B]] = []
    divisible: list[tuple[int, tuple[int, ...], B]] = []

    def put(place: tuple[int, ...], members: B) -> None:
        if len(members) > 1:
            heapq.heappush(divisible, (-weight(members), place, members))
        else:
            entries.append((place, members))

    for position, members in enumerate(bins):
        put((position,), members)
    while divisible and len(entries) + len(divisible) < target:
        _, place, members = heapq.heappop(divisible)
        for digit, half in enumerate(split(members)):
            put((*place, digit), half)
    entries += [(place, members) for _, place, members in divisible]
    result = [members for _, members in sorted(entries, key=lambda entry: entry[0])]
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
    """Reorders the indices of rank-major `bins`, alike on all ranks, for a small makespan."""
    units, constraints = problem.units, problem.constraints
    table = np.arange(len(bins)).reshape(constraints.dp_size, -1)
    costs = np.array([bin_cost(units, members) for members in bins], dtype=np.int64)
    order = order_of_indices(costs[table].max(axis=0) + problem.fixed_cost, constraints, problem.chunk_shares)
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
    """Sorts rank-major bins that stay on their rank; see `group_by_cost`."""
    per_rank = costs.reshape(dp_size, -1)
    count = per_rank.shape[1]
    return np.argsort(-per_rank, axis=1, kind="stable") + np.arange(dp_size)[:, None] * count


# ---- pools that form micro-batches
#
# A pool holds all units, or those of one rank where units have home ranks. Algorithms that cut all ranks at the same
# positions work on one pool of positions.


@dataclass(frozen=True)
class UnitPool:
    """Units that may share micro-batches on `ranks` ranks."""

    problem: PlanProblem
    units: Ints
    ranks: int
    packer: Packer
    keeps_order: bool

    def form(self) -> list[Bin]:
        """Checked bins of the packer; each unit above the cap gets a bin by itself, without the packer."""
        alone = self.problem.units.alone[self.units]
        if not alone.any():
            return self._pack(self.units)
        if not self.keeps_order:
            return self._pack(self.units[~alone]) + [[int(unit)] for unit in self.units[alone]]
        bins: list[Bin] = []
        for run in np.split(self.units, np.flatnonzero(np.diff(alone.astype(np.int64))) + 1):
            bins += [[int(unit)] for unit in run] if self.problem.units.alone[run[0]] else self._pack(run)
        return bins

    def _pack(self, units: Ints) -> list[Bin]:
        """Bins of `units` by the packer. Raises `PlanError` if the packer fails or its bins are invalid."""
        if not len(units):
            return []
        constraints, all_units = self.problem.constraints, self.problem.units
        items = Items(
            slots=all_units.slots[units],
            longest=all_units.longest[units],
            rows=all_units.rows[units],
            capacity=constraints.usable_tokens,
            seed=constraints.seed,
        )
        try:
            packed = self.packer(items)
        except (Exception, SystemExit) as error:  # a user's packer may raise anything, and call sys.exit
            raise PlanError(f"algorithm={constraints.algorithm!r} raised {describe_error(error)}") from error
        bins = check_bins(packed, items, constraints.algorithm, rectangles=constraints.mode != "packed")
        return [units[members].tolist() for members in bins]

    def weight(self, members: Bin) -> int:
        """Cost of a micro-batch: the costliest is split first."""
        return bin_cost(self.problem.units, members)

    def split(self, members: Bin) -> tuple[Bin, Bin]:
        """Split a micro-batch in two."""
        return (split_in_order if self.keeps_order else split_by_cost)(self.problem.units, members)

    def filler(self) -> Bin:
        """Micro-batch without units."""
        return []


def pools_of_units(problem: PlanProblem, packer: Packer, *, keeps_order: bool) -> list[UnitPool]:
    """One pool of all units, or one per rank where units have home ranks."""
    dp_size = problem.constraints.dp_size
    if not problem.has_home_ranks:
        return [UnitPool(problem, np.arange(len(problem.units)), dp_size, packer, keeps_order)]
    homes = [np.flatnonzero(problem.units.home == rank) for rank in range(dp_size)]
    return [UnitPool(problem, units, 1, packer, keeps_order) for units in homes]


@dataclass(frozen=True)
class Cut:
    """One micro-batch on all ranks: the positions that it holds."""

    positions: list[int]
    length: int
    """Row length of its rectangles, aligned."""

    def __len__(self) -> int:
        return len(self.positions)


class PositionPool:
    """Units in one order on all ranks, to be cut at the same positions.

    A position is one place in the queues of all ranks.
    """

    ranks = 1
    """A cut is one micro-batch of every rank."""

    def __init__(self, problem: PlanProblem, order: Callable[[Ints], Ints], *, in_blocks: bool) -> None:
        self.problem = problem
        self.constraints = constraints = problem.constraints
        alignment = constraints.rectangle_alignment
        self.limits = Limits(
            tokens=constraints.usable_tokens if constraints.max_tokens is not None else None,
            rows=constraints.rows,
            width=-(-(constraints.row_limit or 0) // alignment) * alignment,
        )
        table, alone = self._split_oversize(_distribute(problem, order, in_blocks))
        self.table, self.alone = table, alone
        """int64[P, dp]: unit of each position and rank, or -1; bool[P]: positions with a micro-batch of their own."""
        occupied = table >= 0
        self.rows = np.where(occupied, problem.units.rows[table], 0)
        self.longest = np.where(occupied, problem.units.longest[table], 0).max(axis=1)

    def _split_oversize(self, table: Ints) -> tuple[Ints, Flags]:
        """`table` with one position per rank where the shared rectangle is above the cap, and which positions are.

        With groups of different sizes, or one unit above the cap, the most rows times the largest length can exceed the
        cap although no unit does by itself.
        """
        units, occupied = self.problem.units, table >= 0
        area = np.where(occupied, units.rows[table], 0).max(axis=1) * np.maximum(
            np.where(occupied, units.longest[table], 0).max(axis=1), self.limits.width
        )
        oversize = np.any(occupied & units.alone[table], axis=1)
        if self.limits.tokens is not None:
            oversize |= area > self.limits.tokens
        split = oversize & (occupied.sum(axis=1) > 1)
        if not split.any():
            return table, oversize
        positions: list[Ints] = []
        flags: list[bool] = []
        for position, is_split in enumerate(split):
            if not is_split:
                positions.append(table[position])
                flags.append(bool(oversize[position]))
                continue
            for rank in np.flatnonzero(occupied[position]):
                single = np.full(table.shape[1], -1, dtype=np.int64)
                single[rank] = table[position, rank]
                positions.append(single)
                flags.append(True)
        return np.array(positions), np.array(flags)

    def form(self) -> list[Cut]:
        """Cuts in order."""
        return [self._cut(part) for part in cut_positions(self.longest, self.rows, self.alone, self.limits)]

    def _cut(self, positions: list[int]) -> Cut:
        return Cut(positions, max(int(self.longest[positions].max()), self.limits.width))

    def weight(self, cut: Cut) -> int:
        """Tokens of the shared rectangle."""
        return int(self.rows[cut.positions].sum(axis=0).max()) * cut.length

    def split(self, cut: Cut) -> tuple[Cut, Cut]:
        """Two halves in order. With shared shapes they keep the row length of the cut, as in ROLL."""
        half = (len(cut) + 1) // 2
        parts = cut.positions[:half], cut.positions[half:]
        if self.constraints.shared_shapes:
            return Cut(parts[0], cut.length), Cut(parts[1], cut.length)
        return self._cut(parts[0]), self._cut(parts[1])

    def filler(self) -> Cut:
        """Cut without positions."""
        return Cut([], 0)

    def place(self, cuts: list[Cut]) -> Placement:
        """Placement of the units of all cuts."""
        bins = [
            [int(unit) for unit in self.table[cut.positions, rank] if unit >= 0] if len(cut) else []
            for rank in range(self.constraints.dp_size)
            for cut in cuts
        ]
        lengths = np.tile(np.array([cut.length for cut in cuts], dtype=np.int64), self.constraints.dp_size)
        return Placement.of_bins(bins, len(cuts), lengths if self.constraints.shared_shapes else None)


def _distribute(problem: PlanProblem, order: Callable[[Ints], Ints], in_blocks: bool) -> Ints:
    """Unit of each position and rank (int64[P, dp]), -1 where the queue of a rank has ended."""
    units, dp_size = problem.units, problem.constraints.dp_size
    first = np.maximum.reduceat(problem.used[units.samples], units.offsets[:-1])
    ordered = np.asarray(order(first), dtype=np.int64)
    if problem.has_home_ranks:
        queues = [ordered[units.home[ordered] == rank] for rank in range(dp_size)]
    elif in_blocks:
        queues = np.array_split(ordered, dp_size)
    else:
        queues = [ordered[rank::dp_size] for rank in range(dp_size)]
    table = np.full((max(map(len, queues)), dp_size), -1, dtype=np.int64)
    for rank, queue in enumerate(queues):
        table[: len(queue), rank] = queue
    return table
