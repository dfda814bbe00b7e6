"""Balance a problem with a given number of micro-batches: initial placements, searches and lower bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.load_balance.exchange_search import level_totals, lower_lockstep
from roll_batching.planning.load_balance.pools import Packing, Pool, fill_empty_packs
from roll_batching.planning.load_balance.search_state import (
    SearchState,
    begin_search,
    lockstep_cost,
    pack_costs,
    refine_lockstep,
    refine_totals,
)
from roll_batching.planning.partition import lockstep_bound, rank_total_bound
from roll_batching.planning.placement import group_by_cost, sort_on_home_ranks
from roll_batching.planning.problem import PlanProblem
from roll_batching.planning.search_budget import SEARCH_BUDGET

UNBOUNDED = 1 << 62
"""A bound above every rank total."""


@dataclass(frozen=True)
class _Start:
    """An initial placement and its costs."""

    packing: Packing
    lockstep: int
    """Lockstep cost."""
    excess: int
    """Sum of what rank totals have above their mean."""


@dataclass(frozen=True)
class Balancer:
    """Searches for one problem and one number of micro-batches.

    A search changes a `SearchState` in place and leaves the best result in it. `share` divides its number of steps.
    Units with a home stay on their rank, so that rank totals are constant and only lockstep cost is searched.
    """

    problem: PlanProblem
    pools: list[Pool]
    count: int
    """Micro-batches per rank."""
    may_empty: bool = True
    """Whether a search may leave a pack without units; False: it fills all packs, exchanges units and moves none.

    Then there must be as many units as packs, with homes on every rank: a search draws from each pack.
    """

    @cached_property
    def mean_total(self) -> int:
        """Mean cost of a rank."""
        return int(self.problem.units.costs.sum()) // self.problem.constraints.dp_size

    @cached_property
    def rank_bound(self) -> int:
        """Lower bound of the largest rank total."""
        units, constraints = self.problem.units, self.problem.constraints
        if self.problem.has_home_ranks:
            return int(np.bincount(units.home, weights=units.costs).max())
        room = None if units.alone.any() else self.count * constraints.usable_tokens
        return rank_total_bound(units.costs, units.slots, constraints.dp_size, room)

    @cached_property
    def lockstep_bound(self) -> int:
        """Lower bound of the lockstep cost."""
        if self.problem.has_home_ranks:
            return self.rank_bound
        units, constraints = self.problem.units, self.problem.constraints
        bound = lockstep_bound(units.costs, units.slots, constraints.dp_size, constraints.usable_tokens)
        return max(self.rank_bound, bound)

    def pack_costs(self, packing: Packing) -> Ints:
        """Cost of each pack, int64[packs]."""
        return pack_costs(packing.place, self.problem.units, packing.table.size)

    def starts(self, *, lockstep_weight: int, rank_weight: int) -> list[Packing]:
        """Initial placements, the best first.

        Units are placed by cost, by cost beside giants, and by first-fit-decreasing. The best placement has the
        smallest weighted sum of lockstep cost and rank cost above the mean.
        """
        starts = self._starts_for_totals if rank_weight else self._starts_for_lockstep
        ordered = sorted(starts, key=lambda start: lockstep_weight * start.lockstep + rank_weight * start.excess)
        return [start.packing for start in ordered]

    @cached_property
    def _starts_for_totals(self) -> list[_Start]:
        return self._starts(level_totals=True)

    @cached_property
    def _starts_for_lockstep(self) -> list[_Start]:
        return self._starts(level_totals=False)

    def _starts(self, *, level_totals: bool) -> list[_Start]:
        """All initial placements with their costs; with `level_totals` they suit searches that level rank totals."""
        packings = [self.place_by_cost()]
        if all(pool.first_fit_count <= self.count for pool in self.pools):
            # Lockstep gains from level packs at the last indices; levelling rank totals works better without.
            by_pool = [pool.first_fit if level_totals else pool.first_fit_leveled(self.count) for pool in self.pools]
            packings.append(self._arrange(by_pool))
        if self.problem.has_home_ranks:
            differenced = [pool.place_by_differencing(self.count) for pool in self.pools]
            if all(packs is not None for packs in differenced):
                packings.append(self._arrange([packs for packs in differenced if packs is not None]))
        else:
            beside = self.pools[0].place_beside_giants(self.count, level_totals=level_totals)
            if beside is not None:
                packings += [beside, self._arrange([beside.place])]
        if not self.may_empty:
            packings = [fill_empty_packs(self.problem, packing) for packing in packings]
        starts = []
        for packing in packings:
            costs = self.pack_costs(packing)[packing.table]
            excess = np.maximum(costs.sum(axis=1) - self.mean_total, 0)
            starts.append(_Start(packing, int(costs.max(axis=0).sum()), int(excess.sum())))
        return starts

    def place_by_cost(self) -> Packing:
        """Packs of nearly equal cost, from a placement by cost."""
        return self._arrange([pool.place(self.count) for pool in self.pools])

    def _arrange(self, placed: list[Ints]) -> Packing:
        """Give the packs of all pools to ranks, packs of similar cost at one index."""
        place = np.empty(len(self.problem.units), dtype=np.int64)
        for number, (pool, packs) in enumerate(zip(self.pools, placed, strict=True)):
            place[pool.units] = packs + number * self.count * pool.ranks
        dp_size = self.problem.constraints.dp_size
        costs = pack_costs(place, self.problem.units, dp_size * self.count)
        return Packing(place, (sort_on_home_ranks if self.problem.has_home_ranks else group_by_cost)(costs, dp_size))

    def begin_search(self, packing: Packing) -> SearchState:
        """Search state of an initial placement."""
        empty_units = SEARCH_BUDGET.empty_units_per_pack if self.may_empty else 0
        return begin_search(packing.place, packing.table, self.problem.units, empty_units)

    def packing_of(self, search: SearchState) -> Packing:
        """Result of a search, without its empty units."""
        return Packing(search.pack_of[: len(self.problem.units)], search.table)

    def level_within_ceilings(
        self, search: SearchState, floor: int, share: int = 1, margin: int = SEARCH_BUDGET.ceiling_margin
    ) -> None:
        """Lower rank totals to `floor`, or as far as possible, with lockstep cost at most 1/`margin` higher."""
        if self.problem.has_home_ranks:
            return
        ceilings = search.load[search.table].max(axis=0)
        ceilings += ceilings // margin
        self._level(search, ceilings, floor, self._steps(share, 0), refine=floor == self.rank_bound)

    def level_totals(self, search: SearchState, share: int = 1) -> None:
        """Lower the largest rank total, whatever the lockstep cost."""
        if self.problem.has_home_ranks:
            return
        ceilings = np.full(self.count, UNBOUNDED, dtype=np.int64)
        # Otherwise `level_within_ceilings` refines, at the end.
        refine = self._is_small or self.problem.constraints.objective == "rank_total"

        def run(seed: int) -> int:
            self._level(search, ceilings, self.rank_bound, self._steps(share), refine=refine, seed=seed)
            return int(search.totals.max())

        self._repeat(run, self.rank_bound, SEARCH_BUDGET.totals_gap, share)
        order = np.argsort(-search.load[search.table], axis=1, kind="stable")
        search.table[:] = np.take_along_axis(search.table, order, axis=1)
        search.index_of[search.table] = np.arange(self.count)

    def _level(
        self, search: SearchState, ceilings: Ints, floor: int, steps: int, *, refine: bool, seed: int = 0
    ) -> None:
        constraints = self.problem.constraints
        cap = constraints.usable_tokens
        refine_ceilings = ceilings + ceilings // SEARCH_BUDGET.refine_ceiling_margin
        for attempt in range(SEARCH_BUDGET.refine_attempts if refine and self._is_small else 1):
            level_totals(search, ceilings, cap, floor, steps, constraints.seed + seed + attempt)
            if not refine or refine_totals(search, refine_ceilings, cap, floor):
                return

    def lower_lockstep(
        self, search: SearchState, bound: int = UNBOUNDED, share: int = 1, *, is_final: bool = True
    ) -> None:
        """Lower the lockstep cost, with rank totals of at most `bound`, or no higher than before.

        `is_final`: without a bound, a search of very many units takes the long budget.
        """
        constraints = self.problem.constraints
        cap, floor = constraints.usable_tokens, self.lockstep_bound
        only_lockstep = bound == UNBOUNDED
        steps = self._steps(share, SEARCH_BUDGET.lockstep_factor if only_lockstep and is_final else 0)

        def run(seed: int) -> int:
            lower_lockstep(search, bound, cap, floor, steps, constraints.seed + seed)
            return lockstep_cost(search)

        if not only_lockstep or self.problem.has_home_ranks:
            run(0)
            return
        self._repeat(run, floor, SEARCH_BUDGET.lockstep_gap, share)
        for attempt in range(1, SEARCH_BUDGET.refine_attempts if self._is_small else 1):
            if refine_lockstep(search, cap, floor):
                return
            run(attempt)
        refine_lockstep(search, cap, floor)

    @property
    def _is_small(self) -> bool:
        """Whether the problem is searched again after refinement: so small that this takes little time."""
        few_units = len(self.problem.units) <= SEARCH_BUDGET.few_units
        return few_units and self.problem.constraints.dp_size <= SEARCH_BUDGET.refine_attempts_ranks

    def _repeat(self, run: Callable[[int], int], floor: int, gap: int, share: int) -> None:
        """Run a search, and again with other seeds while it is more than 1/`gap` above `floor` and makes progress."""
        value = run(0)
        rounds = min(SEARCH_BUDGET.max_rounds, SEARCH_BUDGET.max_steps_of_rounds // self._steps(share))
        idle = 0
        for seed in range(1, 1 if share > 1 else rounds):
            if value - floor <= floor // gap or idle == SEARCH_BUDGET.patience:
                return
            before, value = value, run(seed)
            idle = 0 if before - value > (before - floor) // SEARCH_BUDGET.progress else idle + 1

    def is_close(self, value: int, floor: int) -> bool:
        """Whether another start is not worth a search. Small problems are searched from all starts."""
        return value <= floor or (not self._is_small and value - floor <= floor // SEARCH_BUDGET.start_gap)

    def _steps(self, share: int, long_factor: int = 1) -> int:
        """Steps of one search; `long_factor` 0 leaves out the budget for very many units."""
        budget, units = SEARCH_BUDGET, len(self.problem.units)
        in_proportion = budget.steps_per_unit * units * min(units, budget.few_units) // budget.few_units
        long = long_factor * min(budget.long_steps_per_unit * units, budget.long_max_steps)
        steps = max(min(in_proportion, budget.max_steps), long) // share
        ranks = max(budget.full_budget_ranks, self.problem.constraints.dp_size)
        return max(1, steps * budget.full_budget_ranks // ranks)
