"""Pools of units that may share micro-batches, and the bins that an algorithm forms of each pool.

A pool holds all units, or those of one rank where units have home ranks. Algorithms that cut all ranks at the same
positions work on one pool of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.packers.items import Items, Packer, check_bins
from roll_batching.planning.packers.sorted_buckets import Limits, cut_positions
from roll_batching.planning.placement import Bin, Placement, bin_cost, split_by_cost, split_in_order
from roll_batching.planning.problem import PlanProblem
from roll_batching.registry import describe_error


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
