"""Algorithm "load_balance": few packs under the hard cap, balanced for the topology's objective.

Count first, then a placement by cost, then swaps that lower the lockstep cost, then exchanges inside a
column that level the rank totals, then the order of the columns.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.counts import group_size_of, legal_count, legal_counts
from roll_batching.planning.first_fit import descending, first_fit
from roll_batching.planning.inputs import Ints, PlanInputs
from roll_batching.planning.order import MOST_ORDERS, order_for_pipeline, pipeline_makespan
from roll_batching.planning.search import assign_ranks, sort_columns, swap_units
from roll_batching.planning.spread import cheapest_first, level_ranks, mend_overflow

SEARCH_ITERATIONS = 300_000
LARGE_ITERATIONS = 200_000
MANY_UNITS = 512
ITERATIONS_PER_UNIT = 1_200
WIDE_COLUMN = 192
MEND_ITERATIONS = 200_000
LEVEL_BUDGET = 4_000_000
TRIED_COUNTS = 12
NEIGHBOURS = 2
ESTIMATE_ORDERS = 3_000
"""Micro-batch counts whose makespan is simulated, how far around the best of them, and orders tried for it."""
THRESHOLD_DIVISOR = 50

OBJECTIVE_WEIGHTS = {"balanced": (1, 1), "lockstep": (1, 0), "rank_total": (0, 1), "pipeline": (1, 1)}
"""Weights of the lockstep cost and of the rank excess."""


def balance_units(inputs: PlanInputs, *, count: int | None = None) -> tuple[Ints, Ints, int]:
    """Units in micro-batch order, offsets (int64[dp*K + 1], rank-major) and K.

    `count` prescribes K (it must be legal and large enough); None chooses it.
    """
    constraints = inputs.constraints
    units = inputs.units
    dp_size = constraints.dp_size
    pooled = not np.any(units.home >= 0)
    if pooled:
        pools = [_Pool(inputs, np.arange(len(units)), dp_size)]
    else:
        pools = [_Pool(inputs, np.flatnonzero(units.home == rank), 1) for rank in range(dp_size)]
    if count is None:
        count = _choose_count(inputs, pools)
    start = _better_start(inputs, count, [pool.place(count) for pool in pools], pools)
    place, table = _balance(inputs, start, count)
    if constraints.pp_size > 1:
        place, table = _for_pipeline(inputs, start, place, table)
    where = np.empty(dp_size * count, dtype=np.int64)
    where[table.reshape(-1)] = np.arange(dp_size * count)
    final = where[place]
    order = np.argsort(final, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(final, minlength=dp_size * count))])
    return order, offsets.astype(np.int64), count


def _for_pipeline(inputs: PlanInputs, start: Ints, place: Ints, table: Ints) -> tuple[Ints, Ints]:
    """The better of the searched packs and those it started from, columns in the order of a pipeline.

    The search levels ranks inside columns; a pipeline also gains from columns that are alike, as the
    placement by cost makes them.
    """
    constraints = inputs.constraints
    count = table.shape[1]
    homes = bool(np.any(inputs.units.home >= 0))
    load = _pack_costs(inputs, start, count)
    columns, _ = sort_columns(load, constraints.dp_size, count, homes)
    ranks, _ = assign_ranks(columns, load, homes)
    candidates = [(place, table), (start, _level(inputs, start, count, columns, ranks))]
    best, best_time = candidates[0], -1
    for candidate in candidates:
        tops = _pack_costs(inputs, candidate[0], count)[candidate[1]].max(axis=0) + inputs.fixed_cost
        order, time = _pipeline_order(inputs, tops, MOST_ORDERS)
        if best_time < 0 or time < best_time:
            best, best_time = (candidate[0], candidate[1][:, order]), time
    return best


def _pipeline_order(inputs: PlanInputs, tops: Ints, tries: int) -> tuple[Ints, int]:
    """The order of columns, given the largest cost in each, and its makespan."""
    constraints = inputs.constraints
    stages, chunks = constraints.pp_size, constraints.vpp_size
    group_size = group_size_of(len(tops), constraints)
    order = order_for_pipeline(
        tops, stages=stages, chunks=chunks, group_size=group_size, seed=constraints.seed, tries=tries
    )
    return order, pipeline_makespan(tops[order], stages=stages, chunks=chunks, group_size=group_size)


def _iterations(units: int, dp_size: int) -> int:
    """Steps of the swap search: fewer where many units level sooner, and where columns are wide and slow."""
    steps = min(SEARCH_ITERATIONS if units <= MANY_UNITS else LARGE_ITERATIONS, ITERATIONS_PER_UNIT * units)
    return steps * WIDE_COLUMN // max(WIDE_COLUMN, dp_size)


class _Pool:
    """Units that share packs: all of them, or those of one rank."""

    def __init__(self, inputs: PlanInputs, units: Ints, ranks: int) -> None:
        self.units = units
        self.ranks = ranks
        self.cap = inputs.constraints.usable_tokens
        self.seed = inputs.constraints.seed
        self.slots = inputs.units.slots[units]
        self.costs = inputs.units.costs[units]
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
        place, homeless = cheapest_first(self.slots, self.costs, self.order, packs, self.cap)
        if not homeless:
            return place
        if count >= self.first_fit_count:
            return self.first_fit
        if np.any(self.slots > self.cap):
            return None
        place, overflow = mend_overflow(place, self.slots, self.order, packs, self.cap, MEND_ITERATIONS, self.seed)
        return None if overflow else place

    def place(self, count: int) -> Ints:
        """As `try_place`, for a count that is known to work."""
        place = self.try_place(count)
        assert place is not None
        return place


def _choose_count(inputs: PlanInputs, pools: list[_Pool]) -> int:
    """K: the fewest micro-batches found, or the count with the smallest predicted makespan."""
    constraints = inputs.constraints
    needed = 1
    for pool in pools:
        least, fewest = pool.least_count(), pool.first_fit_count
        while (
            fewest > max(least, needed)
            and legal_count(fewest - 1, constraints) < legal_count(fewest, constraints)
            and pool.try_place(fewest - 1) is not None
        ):
            fewest -= 1
        needed = max(needed, fewest)
    if constraints.pp_size == 1:
        return legal_count(needed, constraints)
    return _count_by_makespan(inputs, pools, needed)


def _count_by_makespan(inputs: PlanInputs, pools: list[_Pool], needed: int) -> int:
    """The count whose packs, placed by cost and ordered for the pipeline, have the smallest makespan.

    Counts in equal ratios are tried first, then the neighbours of the best; of equals the smaller is taken.
    """
    constraints = inputs.constraints
    most = max(-(-len(pool.units) // pool.ranks) for pool in pools)
    homes = bool(np.any(inputs.units.home >= 0))
    times: dict[int, int] = {}

    def time(count: int) -> int:
        if count not in times:
            place = np.empty(len(inputs.units), dtype=np.int64)
            for index, pool in enumerate(pools):
                place[pool.units] = pool.place(count) + index * count * pool.ranks
            load = _pack_costs(inputs, place, count)
            columns, _ = sort_columns(load, constraints.dp_size, count, homes)
            tops = load[columns].max(axis=1) + inputs.fixed_cost
            _, times[count] = _pipeline_order(inputs, tops, ESTIMATE_ORDERS)
        return times[count]

    best = min(legal_counts(needed, most, constraints, TRIED_COUNTS), key=lambda count: (time(count), count))
    least = legal_count(needed, constraints)
    for nearby in range(max(least, best - NEIGHBOURS), best + NEIGHBOURS + 1):
        if legal_count(nearby, constraints) == nearby:
            time(nearby)
    return min(times, key=lambda count: (times[count], count))


def _better_start(inputs: PlanInputs, count: int, placed: list[Ints], pools: list[_Pool]) -> Ints:
    """The placement by cost, or first-fit-decreasing's own packs where those are the better balanced."""
    dp_size = inputs.constraints.dp_size
    homes = bool(np.any(inputs.units.home >= 0))
    column_weight, rank_weight = OBJECTIVE_WEIGHTS[inputs.constraints.resolved_objective]
    starts = [placed]
    if all(pool.first_fit_count <= count for pool in pools):
        starts.append([pool.first_fit for pool in pools])
    best, best_energy = None, 0
    for start in starts:
        place = np.empty(len(inputs.units), dtype=np.int64)
        for index, (pool, packs) in enumerate(zip(pools, start, strict=True)):
            place[pool.units] = packs + index * count * pool.ranks
        load = _pack_costs(inputs, place, count)
        columns, _ = sort_columns(load, dp_size, count, homes)
        _, totals = assign_ranks(columns, load, homes)
        above = int(np.maximum(totals - totals.sum() // dp_size, 0).sum())
        energy = column_weight * int(load[columns].max(axis=1).sum()) + rank_weight * above
        if best is None or energy < best_energy:
            best, best_energy = place, energy
    assert best is not None
    return best


def _balance(inputs: PlanInputs, place: Ints, count: int) -> tuple[Ints, Ints]:
    """Swap units for the objective: packs of all units, and the pack at each place (int64[dp, K])."""
    constraints = inputs.constraints
    units = inputs.units
    dp_size = constraints.dp_size
    column_weight, rank_weight = OBJECTIVE_WEIGHTS[constraints.resolved_objective]
    # The first accepted loss: a share of a mean pack.
    threshold = int(units.costs.sum()) // (THRESHOLD_DIVISOR * dp_size * count)
    place, columns, rank_of_pack = swap_units(
        place,
        units.slots,
        units.costs,
        units.home,
        dp_size,
        count,
        constraints.usable_tokens,
        _iterations(len(units), dp_size),
        threshold,
        column_weight,
        rank_weight,
        # With both aims, ranks may be above their mean by a fraction of what lockstep loses, a smaller one
        # where there are many of them.
        6 + dp_size // 8 if column_weight else 0,
        constraints.seed,
    )
    return place, _level(inputs, place, count, columns, rank_of_pack)


def _level(inputs: PlanInputs, place: Ints, count: int, columns: Ints, rank_of_pack: Ints) -> Ints:
    """The pack at each place (int64[dp, K]), columns by falling cost, rank totals as level as packs allow."""
    dp_size = inputs.constraints.dp_size
    load = _pack_costs(inputs, place, count)
    columns = columns[np.argsort(-load[columns].max(axis=1), kind="stable")]
    table = np.empty((dp_size, count), dtype=np.int64)
    table[rank_of_pack[columns], np.arange(count)[:, None]] = columns
    if np.any(inputs.units.home >= 0):
        return table
    # The search stops at its level; a fresh assignment of its columns may be the better start.
    fresh, totals = assign_ranks(columns, load, False)
    if totals.max() < load[table].sum(axis=1).max():
        table[fresh[columns], np.arange(count)[:, None]] = columns
    return np.take_along_axis(table, level_ranks(load[table], LEVEL_BUDGET), axis=0)


def _pack_costs(inputs: PlanInputs, place: Ints, count: int) -> Ints:
    """Cost of every pack; the float sums are exact, since all costs together stay below 2^53."""
    packs = inputs.constraints.dp_size * count
    return np.bincount(place, weights=inputs.units.costs, minlength=packs).astype(np.int64)
