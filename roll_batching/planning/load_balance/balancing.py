"""One problem with one number of micro-batches: its starts, its searches and what they cannot beat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.bounds import lockstep_bound, rank_total_bound
from roll_batching.planning.load_balance.column_search import lower_columns
from roll_batching.planning.load_balance.pools import Packing, Pool
from roll_batching.planning.load_balance.rank_search import level_totals
from roll_batching.planning.load_balance.search_state import SearchState, begin_search, lockstep_cost, pack_costs
from roll_batching.planning.load_balance.settling import settle_columns, settle_totals
from roll_batching.planning.placement import home_columns, lockstep_columns
from roll_batching.planning.problem import PlanProblem

ITERATIONS_PER_UNIT, ITERATIONS = 300, 300_000
"""Steps of one search: so many per unit, up to this;"""
FEW_UNITS = 256
"""for fewer units in proportion to their number less;"""
MORE_PER_UNIT, MOST_ITERATIONS = 75, 600_000
"""for very many units so many per unit, up to this, for what is waited for;"""
MORE_FOR_LOCKSTEP = 2
"""for lockstep alone so many times that, since every index has a column of its own to lower;"""
WIDE = 192
"""and the fewer the more ranks above this one step compares."""
MOST_ROUNDS, MOST_STEPS = 8, 600_000
"""A search is repeated where that is worth it, so many times and steps at most:"""
LITTLE = {"totals": 500, "columns": 50}
"""while what it found is above its floor by more than this part,"""
MUCH = 50
"""(and from other starts while it is by more than this,)"""
WORTHWHILE, PATIENCE = 50, 2
"""and not so often in a row has won less than this part of that."""
CEILING_MARGIN = 4_000
"""Levelling totals may raise the costliest pack of an index by this part."""
UNBOUNDED = 1 << 62


SETTLING_ATTEMPTS, FEW_RANKS = 4, 4
"""Few units on few ranks are settled again after another search, and from other starts, until nothing is left."""
SETTLING_MARGIN = 256
"""The one or two exchanges that settle the last part in a million may do so by this part."""


@dataclass(frozen=True)
class _Start:
    packing: Packing
    lockstep: int
    above: int
    """What ranks have above their mean, in sum."""


@dataclass(frozen=True)
class Balancing:
    """Searches change a `SearchState` in place and leave the best that they found.

    `share` divides a search's steps. Units with a home have rank totals that nothing changes.
    """

    problem: PlanProblem
    pools: list[Pool]
    count: int
    """Micro-batches per rank."""

    @cached_property
    def mean_total(self) -> int:
        """Mean cost of a rank."""
        return int(self.problem.units.costs.sum()) // self.problem.constraints.dp_size

    @cached_property
    def rank_bound(self) -> int:
        """No plan's largest rank total is below."""
        units, constraints = self.problem.units, self.problem.constraints
        if self.problem.at_home:
            return int(np.bincount(units.home, weights=units.costs).max())
        room = None if units.alone.any() else self.count * constraints.usable_tokens
        return rank_total_bound(units.costs, units.slots, constraints.dp_size, room)

    @cached_property
    def lockstep_bound(self) -> int:
        """No plan's lockstep cost is below."""
        if self.problem.at_home:
            return self.rank_bound
        units, constraints = self.problem.units, self.problem.constraints
        alone = lockstep_bound(units.costs, units.slots, constraints.dp_size, constraints.usable_tokens)
        return max(self.rank_bound, alone)

    def load(self, packing: Packing) -> Ints:
        """Cost of every pack."""
        return pack_costs(packing.place, self.problem.units, packing.table.size)

    def starts(self, *, column_weight: int, rank_weight: int) -> list[Packing]:
        """Balanced packs, the best first: by cost, by cost beside giants, and first-fit-decreasing's own.

        Best is the least lockstep cost plus what ranks have above their mean, weighted.
        """
        starts = self._starts_for_totals if rank_weight else self._starts_for_columns
        ordered = sorted(starts, key=lambda start: column_weight * start.lockstep + rank_weight * start.above)
        return [start.packing for start in ordered]

    @cached_property
    def _starts_for_totals(self) -> list[_Start]:
        return self._starts(level_totals=True)

    @cached_property
    def _starts_for_columns(self) -> list[_Start]:
        return self._starts(level_totals=False)

    def _starts(self, *, level_totals: bool) -> list[_Start]:
        packings = [self.alike()]
        if all(pool.first_fit_count <= self.count for pool in self.pools):
            # Level last indices are what lockstep gains from; a search that levels totals does better without.
            fitted = [pool.first_fit if level_totals else pool.first_fit_leveled(self.count) for pool in self.pools]
            packings.append(self._arranged(fitted))
        if not self.problem.at_home:
            beside = self.pools[0].place_beside_giants(self.count, level_totals=level_totals)
            if beside is not None:
                packings += [beside, self._arranged([beside.place])]
        starts = []
        for packing in packings:
            costs = self.load(packing)[packing.table]
            above = np.maximum(costs.sum(axis=1) - self.mean_total, 0)
            starts.append(_Start(packing, int(costs.max(axis=0).sum()), int(above.sum())))
        return starts

    def alike(self) -> Packing:
        """Packs as alike as a placement by cost makes them."""
        return self._arranged([pool.place(self.count) for pool in self.pools])

    def _arranged(self, placed: list[Ints]) -> Packing:
        """Packs of every pool, those of like cost at one index, given to ranks."""
        place = np.empty(len(self.problem.units), dtype=np.int64)
        for index, (pool, packs) in enumerate(zip(self.pools, placed, strict=True)):
            place[pool.units] = packs + index * self.count * pool.ranks
        dp_size = self.problem.constraints.dp_size
        load = pack_costs(place, self.problem.units, dp_size * self.count)
        return Packing(place, (home_columns if self.problem.at_home else lockstep_columns)(load, dp_size))

    def search(self, packing: Packing) -> SearchState:
        """Where a search begins."""
        return begin_search(packing.place, packing.table, self.problem.units)

    def packing(self, search: SearchState) -> Packing:
        """What a search has come to."""
        return Packing(search.pack_of[: len(self.problem.units)], search.table)

    def level(self, search: SearchState, floor: int, share: int = 1) -> None:
        """Totals of at most `floor`, or as low as they get while the costliest pack of no index rises (by much)."""
        if self.problem.at_home:
            return
        ceilings = search.load[search.table].max(axis=0)
        ceilings += ceilings // CEILING_MARGIN
        self._level(search, ceilings, floor, self._iterations(share, 0), settle=floor == self.rank_bound)

    def level_alone(self, search: SearchState, share: int = 1) -> None:
        """The lowest largest total found, whatever that costs in lockstep."""
        if self.problem.at_home:
            return
        ceilings = np.full(self.count, UNBOUNDED, dtype=np.int64)
        settle = self._few or self.problem.constraints.objective == "rank_total"  # else `level` does, at the end

        def once(seed: int) -> int:
            self._level(search, ceilings, self.rank_bound, self._iterations(share), settle=settle, seed=seed)
            return int(search.totals.max())

        self._persist(once, self.rank_bound, LITTLE["totals"], share)
        order = np.argsort(-search.load[search.table], axis=1, kind="stable")
        search.table[:] = np.take_along_axis(search.table, order, axis=1)
        search.index_of[search.table] = np.arange(self.count)

    def _level(
        self, search: SearchState, ceilings: Ints, floor: int, iterations: int, *, settle: bool, seed: int = 0
    ) -> None:
        constraints = self.problem.constraints
        cap = constraints.usable_tokens
        for attempt in range(SETTLING_ATTEMPTS if settle and self._few else 1):
            level_totals(search, ceilings, cap, floor, iterations, constraints.seed + seed + attempt)
            if not settle or settle_totals(search, ceilings + ceilings // SETTLING_MARGIN, cap, floor):
                return

    def lower(self, search: SearchState, bound: int = UNBOUNDED, share: int = 1) -> None:
        """The least lockstep cost found with rank totals of at most `bound`, or no higher than they are."""
        constraints = self.problem.constraints
        cap, floor = constraints.usable_tokens, self.lockstep_bound
        alone = bound == UNBOUNDED
        iterations = self._iterations(share, MORE_FOR_LOCKSTEP if alone else 0)

        def once(seed: int) -> int:
            lower_columns(search, bound, cap, floor, iterations, constraints.seed + seed)
            return lockstep_cost(search)

        if not alone or self.problem.at_home:
            once(0)
            return
        self._persist(once, floor, LITTLE["columns"], share)
        for attempt in range(1, SETTLING_ATTEMPTS if self._few else 1):
            if settle_columns(search, cap, floor):
                return
            once(attempt)
        settle_columns(search, cap, floor)

    @property
    def _few(self) -> bool:
        return len(self.problem.units) <= FEW_UNITS and self.problem.constraints.dp_size <= FEW_RANKS

    def _persist(self, once: Callable[[int], int], floor: int, little: int, share: int) -> None:
        """Searches once, and again while much is left to win and one of two searches wins some of it."""
        found = once(0)
        rounds = 1 if share > 1 else min(MOST_ROUNDS, MOST_STEPS // self._iterations(share))
        idle = 0
        for seed in range(1, rounds):
            if found - floor <= floor // little or idle == PATIENCE:
                return
            before, found = found, once(seed)
            idle = 0 if before - found > (before - floor) // WORTHWHILE else idle + 1

    def is_done(self, found: int, floor: int) -> bool:
        """Whether too little is left to win for another start: of few units anything is worth it, so quick are they."""
        return found <= floor or (not self._few and found - floor <= floor // MUCH)

    def _iterations(self, share: int, more: int = 1) -> int:
        units = len(self.problem.units)
        usual = min(ITERATIONS_PER_UNIT * units * min(units, FEW_UNITS) // FEW_UNITS, ITERATIONS)
        steps = max(usual, more * min(MORE_PER_UNIT * units, MOST_ITERATIONS)) // share
        return max(1, steps * WIDE // max(WIDE, self.problem.constraints.dp_size))
