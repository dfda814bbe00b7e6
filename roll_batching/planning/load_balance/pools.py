"""Pools of units that may share packs, and initial placements for a given number of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.load_balance.initial_placement import cheapest_first, repair_overflow, reserved_costs
from roll_batching.planning.packers.first_fit import descending, first_fit
from roll_batching.planning.partition import karmarkar_karp
from roll_batching.planning.problem import PlanProblem
from roll_batching.planning.search_budget import SEARCH_BUDGET


@dataclass(frozen=True)
class Packing:
    """Pack of every unit, and rank and index of every pack."""

    place: Ints
    """int64[n]: pack of each unit, 0 to dp*K - 1."""
    table: Ints
    """int64[dp, K]: pack of each rank and index. The order of indices is not yet that of execution."""


def has_empty_packs(packing: Packing) -> bool:
    """Whether a pack has no unit."""
    return bool(np.bincount(packing.place, minlength=packing.table.size).min() == 0)


def fill_empty_packs(problem: PlanProblem, packing: Packing) -> Packing:
    """The packing with a unit in every pack, as far as there are packs with two: for hosts without fillers.

    An empty pack takes the cheapest unit of the costliest pack on its rank; of another rank where that rank has no pack
    with two units and units may move.
    """
    place, costs = packing.place.copy(), problem.units.costs
    rank_of = np.empty(packing.table.size, dtype=np.int64)
    rank_of[packing.table] = np.arange(len(packing.table))[:, None]
    for empty in np.flatnonzero(np.bincount(place, minlength=packing.table.size) == 0):
        several = np.flatnonzero(np.bincount(place, minlength=packing.table.size) > 1)
        near = several[rank_of[several] == rank_of[empty]]
        donors = near if len(near) or problem.has_home_ranks else several
        if len(donors):
            load = np.bincount(place, weights=costs, minlength=packing.table.size)
            units = np.flatnonzero(place == donors[np.argmax(load[donors])])
            place[units[np.argmin(costs[units])]] = empty
    return Packing(place, packing.table)


def pools_of(problem: PlanProblem) -> list[Pool]:
    """One pool of all units, or one per rank where units have a home."""
    units, dp_size = problem.units, problem.constraints.dp_size
    if not problem.has_home_ranks:
        return [Pool(problem, np.arange(len(units)), dp_size)]
    return [Pool(problem, np.flatnonzero(units.home == rank), 1) for rank in range(dp_size)]


class Pool:
    """Units that may share packs: all units, or those of one rank."""

    def __init__(self, problem: PlanProblem, units: Ints, ranks: int) -> None:
        self.units = units
        self.ranks = ranks
        self.cap = problem.constraints.usable_tokens
        self.seed = problem.constraints.seed
        self.slots = problem.units.slots[units]
        self.costs = problem.units.costs[units]
        self.order = descending(self.slots)
        self.first_fit = first_fit(self.slots, self.order, self.cap)
        self.first_fit_count = -(-(int(self.first_fit.max(initial=-1)) + 1) // ranks)
        self._placed: dict[int, Ints | None] = {}

    def least_count(self) -> int:
        """Lower bound of micro-batches per rank, by tokens and by units above half the cap."""
        oversize = self.slots > self.cap
        fitting = self.slots[~oversize]
        above_half = int((2 * fitting > self.cap).sum())  # no two of them share a pack
        packs = int(oversize.sum()) + max(above_half, -(-int(fitting.sum()) // self.cap))
        return -(-packs // self.ranks)

    def try_place(self, count: int) -> Ints | None:
        """Pack of each unit (int64[n], 0 to ranks * count - 1); None if no placement was found."""
        if count not in self._placed:
            self._placed[count] = self._try_place(count)
        return self._placed[count]

    def _try_place(self, count: int) -> Ints | None:
        packs = count * self.ranks
        if not len(self.units):
            return np.empty(0, dtype=np.int64)
        place, unplaced = cheapest_first(self.slots, self.costs, self.order, np.zeros(packs, np.int64), self.cap)
        if not unplaced:
            return place
        if count >= self.first_fit_count:
            return self.first_fit
        if np.any(self.slots > self.cap):
            return None
        place, overflow = repair_overflow(
            place, self.slots, self.order, packs, self.cap, SEARCH_BUDGET.overflow_steps, self.seed
        )
        return None if overflow else place

    def first_fit_leveled(self, count: int) -> Ints:
        """Packs of first-fit-decreasing, the cheapest of them spread over the packs that it leaves empty.

        All but the last indices stay full. The last ones are level, so that no rank waits there for a full pack.
        """
        spare = count * self.ranks - (int(self.first_fit.max(initial=-1)) + 1)
        if spare <= 0:
            return self.first_fit
        leveled = (spare // self.ranks + 1) * self.ranks
        full = count * self.ranks - leveled
        load = np.bincount(self.first_fit, weights=self.costs, minlength=count * self.ranks)
        position = np.empty(count * self.ranks, dtype=np.int64)
        position[np.argsort(-load, kind="stable")] = np.arange(count * self.ranks)
        place = position[self.first_fit]
        spread = self.order[place[self.order] >= full]
        empty = np.zeros(leveled, dtype=np.int64)
        packs, unplaced = cheapest_first(
            self.slots[spread], self.costs[spread], np.arange(len(spread)), empty, self.cap
        )
        if unplaced:
            return self.first_fit
        place[spread] = full + packs
        return place

    def place_beside_giants(self, count: int, *, level_totals: bool) -> Packing | None:
        """Placement by cost, with full packs beside the costliest units; None if units do not fit."""
        reserved, cells = reserved_costs(self.costs, self.slots, self.ranks, count, self.cap, level_totals=level_totals)
        place, unplaced = cheapest_first(self.slots, self.costs, self.order, reserved, self.cap)
        packs = np.empty(len(cells), dtype=np.int64)
        packs[cells] = np.arange(len(cells))
        return None if unplaced else Packing(place, packs.reshape(count, self.ranks).T)

    def place_by_differencing(self, count: int) -> Ints | None:
        """Pack of each unit, packs of nearly equal cost by largest differencing; None if one is above the cap."""
        place = np.empty(len(self.units), dtype=np.int64)
        for pack, members in enumerate(karmarkar_karp(self.costs, count * self.ranks)):
            place[members] = pack
        tokens = np.bincount(place, weights=self.slots, minlength=count * self.ranks)
        return None if tokens.max(initial=0) > self.cap else place

    def place(self, count: int) -> Ints:
        """As `try_place`, for a count with a placement."""
        place = self.try_place(count)
        assert place is not None
        return place
