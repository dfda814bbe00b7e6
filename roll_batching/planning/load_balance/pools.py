"""Units that share packs, and their first placements for a given number of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.load_balance.initial_placement import cheapest_first, mend_overflow, reserved_costs
from roll_batching.planning.packers.first_fit import descending, first_fit
from roll_batching.planning.problem import PlanProblem

MEND_ITERATIONS = 200_000


@dataclass(frozen=True)
class Packing:
    """Packs, and which of them meet at one index."""

    place: Ints
    """int64[n]: the pack of every unit."""
    table: Ints
    """int64[dp, K]: the pack of every rank and index, before the order of indices in time is known."""


def pools_of(problem: PlanProblem) -> list[Pool]:
    """One pool of all units, or one per rank where units have a home."""
    units, dp_size = problem.units, problem.constraints.dp_size
    if not problem.at_home:
        return [Pool(problem, np.arange(len(units)), dp_size)]
    return [Pool(problem, np.flatnonzero(units.home == rank), 1) for rank in range(dp_size)]


class Pool:
    """Units that share packs: all of them, or those of one rank."""

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
        """No placement needs fewer micro-batches per rank: by tokens, and by units above half the cap."""
        alone = self.slots > self.cap
        inside = self.slots[~alone]
        halves = int((2 * inside > self.cap).sum())
        packs = int(alone.sum()) + max(halves, -(-int(inside.sum()) // self.cap))
        return -(-packs // self.ranks)

    def try_place(self, count: int) -> Ints | None:
        """Packs (int64[n], 0 to ranks * count - 1) for `count` micro-batches per rank, or None."""
        if count not in self._placed:
            self._placed[count] = self._try_place(count)
        return self._placed[count]

    def _try_place(self, count: int) -> Ints | None:
        packs = count * self.ranks
        if not len(self.units):
            return np.empty(0, dtype=np.int64)
        place, homeless = cheapest_first(self.slots, self.costs, self.order, np.zeros(packs, np.int64), self.cap)
        if not homeless:
            return place
        if count >= self.first_fit_count:
            return self.first_fit
        if np.any(self.slots > self.cap):
            return None
        place, overflow = mend_overflow(place, self.slots, self.order, packs, self.cap, MEND_ITERATIONS, self.seed)
        return None if overflow else place

    def first_fit_leveled(self, count: int) -> Ints:
        """First-fit-decreasing's packs, where they are fewer than there is room for: the cheapest spread over the rest.

        All but the last indices stay full, and the last ones are level, so that none waits there for a full pack.
        """
        spare = count * self.ranks - (int(self.first_fit.max(initial=-1)) + 1)
        if spare <= 0:
            return self.first_fit
        last = (spare // self.ranks + 1) * self.ranks
        kept = count * self.ranks - last
        load = np.bincount(self.first_fit, weights=self.costs, minlength=count * self.ranks)
        position = np.empty(count * self.ranks, dtype=np.int64)
        position[np.argsort(-load, kind="stable")] = np.arange(count * self.ranks)
        place = position[self.first_fit]
        spread = self.order[place[self.order] >= kept]
        empty = np.zeros(last, dtype=np.int64)
        moved, homeless = cheapest_first(
            self.slots[spread], self.costs[spread], np.arange(len(spread)), empty, self.cap
        )
        if homeless:
            return self.first_fit
        place[spread] = kept + moved
        return place

    def place_beside_giants(self, count: int, *, level_totals: bool) -> Packing | None:
        """By cost, with full packs beside the costliest units; None where units find no room."""
        reserved, places = reserved_costs(
            self.costs, self.slots, self.ranks, count, self.cap, level_totals=level_totals
        )
        place, homeless = cheapest_first(self.slots, self.costs, self.order, reserved, self.cap)
        packs = np.empty(len(places), dtype=np.int64)
        packs[places] = np.arange(len(places))
        return None if homeless else Packing(place, packs.reshape(count, self.ranks).T)

    def place(self, count: int) -> Ints:
        """As `try_place`, for a count that is known to work."""
        place = self.try_place(count)
        assert place is not None
        return place
