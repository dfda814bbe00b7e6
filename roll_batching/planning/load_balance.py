"""Algorithm "load_balance": few packs under the hard cap, balanced for the topology's objective.

Count first, then a placement by cost, then swaps that lower the lockstep cost, then exchanges inside a
column that level the rank totals, then the order of the columns. In a pipeline more micro-batches can be
faster than fewer: several counts are balanced in part, the most promising ones in full, and the one with
the smallest makespan is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.planning.counts import group_size_of, legal_count, legal_counts
from roll_batching.planning.first_fit import descending, first_fit
from roll_batching.planning.inputs import Ints, PlanInputs
from roll_batching.planning.order import MOST_ORDERS, order_for_pipeline, pipeline_makespan
from roll_batching.planning.search import assign_ranks, sort_columns, swap_units
from roll_batching.planning.spread import cheapest_first, handicaps, level_ranks, mend_overflow

SEARCH_ITERATIONS = 300_000
LARGE_ITERATIONS = 200_000
MANY_UNITS = 512
ITERATIONS_PER_UNIT = 1_200
WIDE_COLUMN = 192
MEND_ITERATIONS = 200_000
LEVEL_BUDGET = 4_000_000
THRESHOLD_DIVISOR = 50

TRIED_COUNTS = 12
"""Micro-batch counts, in equal ratios, that a pipeline tries first."""
NEIGHBOURS = 2
"""How far around the best of them it tries on."""
FINALISTS = 3
"""How many of all these are balanced in full."""
ESTIMATE_SHARE = 16
"""A count is tried with this part of the search's iterations."""
ESTIMATE_ORDERS = 3_000
"""Orders of micro-batches tried to compare counts."""

OBJECTIVE_WEIGHTS = {"balanced": (1, 1), "lockstep": (1, 0), "rank_total": (0, 1), "pipeline": (1, 1)}
"""Weights of the lockstep cost and of the rank excess."""


@dataclass(frozen=True)
class _Packing:
    """Packs, and which of them meet at one index."""

    place: Ints
    """int64[n]: the pack of every unit."""
    columns: Ints
    """int64[K, dp]: the packs of every index, before their order in time is known."""
    rank_of_pack: Ints
    """int64[dp*K]"""


def balance_units(inputs: PlanInputs, *, count: int | None = None) -> tuple[Ints, Ints, int]:
    """Units in micro-batch order, offsets (int64[dp*K + 1], rank-major) and K.

    `count` prescribes K (it must be legal and large enough); None chooses it.
    """
    constraints = inputs.constraints
    pools = _pools(inputs)
    if constraints.pp_size == 1:
        count = legal_count(_fewest(inputs, pools), constraints) if count is None else count
        packing = _search(inputs, _start(inputs, pools, count), count)
        table = _level(inputs, packing, count)
    else:
        counts = _promising_counts(inputs, pools) if count is None else [count]
        candidates = [packing for one in counts for packing in _candidates(inputs, pools, one)]
        packing = min(candidates, key=lambda packing: _makespan(inputs, packing))
        count = len(packing.columns)
        table = _level(inputs, packing, count)
        tops = _pack_costs(inputs, packing.place, count)[table].max(axis=0) + inputs.fixed_cost
        table = table[:, _pipeline_order(inputs, tops, MOST_ORDERS)]
    where = np.empty(table.size, dtype=np.int64)
    where[table.reshape(-1)] = np.arange(table.size)
    final = where[packing.place]
    order = np.argsort(final, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(final, minlength=table.size))])
    return order, offsets.astype(np.int64), count


def _candidates(inputs: PlanInputs, pools: list[_Pool], count: int, share: int = 1) -> list[_Packing]:
    """The searched packs and those the search started from.

    The search levels ranks inside columns; a pipeline also gains from columns that are alike, as the
    placement by cost makes them.
    """
    start = _start(inputs, pools, count)
    return [_search(inputs, start, count, share), start]


def _makespan(inputs: PlanInputs, packing: _Packing) -> int:
    """The pipeline's makespan after a short search for an order."""
    constraints = inputs.constraints
    load = _pack_costs(inputs, packing.place, len(packing.columns))
    tops = load[packing.columns].max(axis=1) + inputs.fixed_cost
    return pipeline_makespan(
        tops[_pipeline_order(inputs, tops, ESTIMATE_ORDERS)],
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=group_size_of(len(tops), constraints),
    )


def _pipeline_order(inputs: PlanInputs, tops: Ints, tries: int) -> Ints:
    """The order of columns, given the largest cost in each."""
    constraints = inputs.constraints
    return order_for_pipeline(
        tops,
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=group_size_of(len(tops), constraints),
        seed=constraints.seed,
        tries=tries,
    )


def _fewest(inputs: PlanInputs, pools: list[_Pool]) -> int:
    """The fewest micro-batches per rank found."""
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
    return needed


def _promising_counts(inputs: PlanInputs, pools: list[_Pool]) -> list[int]:
    """The counts with the smallest makespans after a part of the search; of equals the smaller."""
    constraints = inputs.constraints
    needed = _fewest(inputs, pools)
    most = max(-(-len(pool.units) // pool.ranks) for pool in pools)
    times: dict[int, int] = {}

    def time(count: int) -> int:
        if count not in times:
            tried = _candidates(inputs, pools, count, ESTIMATE_SHARE)
            times[count] = min(_makespan(inputs, packing) for packing in tried)
        return times[count]

    best = min(legal_counts(needed, most, constraints, TRIED_COUNTS), key=lambda count: (time(count), count))
    least = legal_count(needed, constraints)
    for nearby in range(max(least, best - NEIGHBOURS), best + NEIGHBOURS + 1):
        if legal_count(nearby, constraints) == nearby:
            time(nearby)
    return sorted(times, key=lambda count: (times[count], count))[:FINALISTS]


def _iterations(units: int, dp_size: int) -> int:
    """Steps of the swap search: fewer where many units level sooner, and where columns are wide and slow."""
    steps = min(SEARCH_ITERATIONS if units <= MANY_UNITS else LARGE_ITERATIONS, ITERATIONS_PER_UNIT * units)
    return steps * WIDE_COLUMN // max(WIDE_COLUMN, dp_size)


def _at_home(inputs: PlanInputs) -> bool:
    """Whether the units have ranks where they must stay (all have, or none)."""
    return bool(np.any(inputs.units.home >= 0))


def _pools(inputs: PlanInputs) -> list[_Pool]:
    units, dp_size = inputs.units, inputs.constraints.dp_size
    if not _at_home(inputs):
        return [_Pool(inputs, np.arange(len(units)), dp_size)]
    return [_Pool(inputs, np.flatnonzero(units.home == rank), 1) for rank in range(dp_size)]


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
        place, homeless = cheapest_first(self.slots, self.costs, self.order, np.zeros(packs, np.int64), self.cap)
        if not homeless:
            return place
        if count >= self.first_fit_count:
            return self.first_fit
        if np.any(self.slots > self.cap):
            return None
        place, overflow = mend_overflow(place, self.slots, self.order, packs, self.cap, MEND_ITERATIONS, self.seed)
        return None if overflow else place

    def place_beside_giants(self, count: int, *, level_totals: bool) -> _Packing | None:
        """By cost, with full packs beside the costliest units; None where units find no room."""
        handicap, places = handicaps(self.costs, self.slots, self.ranks, count, self.cap, level_totals=level_totals)
        place, homeless = cheapest_first(self.slots, self.costs, self.order, handicap, self.cap)
        columns = np.empty(len(places), dtype=np.int64)
        columns[places] = np.arange(len(places))
        return None if homeless else _Packing(place, columns.reshape(count, self.ranks), places % self.ranks)

    def place(self, count: int) -> Ints:
        """As `try_place`, for a count that is known to work."""
        place = self.try_place(count)
        assert place is not None
        return place


def _start(inputs: PlanInputs, pools: list[_Pool], count: int) -> _Packing:
    """The best balanced packs: by cost, by cost beside giants, or first-fit-decreasing's own."""
    column_weight, rank_weight = OBJECTIVE_WEIGHTS[inputs.constraints.resolved_objective]

    def energy(packing: _Packing) -> int:
        load = _pack_costs(inputs, packing.place, count)
        totals = np.bincount(packing.rank_of_pack, weights=load).astype(np.int64)
        above = int(np.maximum(totals - totals.sum() // len(totals), 0).sum())
        return column_weight * int(load[packing.columns].max(axis=1).sum()) + rank_weight * above

    starts = [_arranged(inputs, pools, [pool.place(count) for pool in pools], count)]
    if all(pool.first_fit_count <= count for pool in pools):
        starts.append(_arranged(inputs, pools, [pool.first_fit for pool in pools], count))
    if not _at_home(inputs):
        beside = pools[0].place_beside_giants(count, level_totals=rank_weight > 0)
        if beside is not None:
            starts += [beside, _arranged(inputs, pools, [beside.place], count)]
    return min(starts, key=energy)


def _arranged(inputs: PlanInputs, pools: list[_Pool], placed: list[Ints], count: int) -> _Packing:
    """Packs of every pool, cut into columns by cost and given to ranks."""
    place = np.empty(len(inputs.units), dtype=np.int64)
    for index, (pool, packs) in enumerate(zip(pools, placed, strict=True)):
        place[pool.units] = packs + index * count * pool.ranks
    load = _pack_costs(inputs, place, count)
    columns, _ = sort_columns(load, inputs.constraints.dp_size, count, _at_home(inputs))
    ranks, _ = assign_ranks(columns, load, _at_home(inputs))
    return _Packing(place, columns, ranks)


def _search(inputs: PlanInputs, start: _Packing, count: int, share: int = 1) -> _Packing:
    """Swap units for the objective, with one part in `share` of the iterations."""
    constraints = inputs.constraints
    units = inputs.units
    dp_size = constraints.dp_size
    column_weight, rank_weight = OBJECTIVE_WEIGHTS[constraints.resolved_objective]
    # The first accepted loss: a share of a mean pack.
    threshold = int(units.costs.sum()) // (THRESHOLD_DIVISOR * dp_size * count)
    place, columns, rank_of_pack = swap_units(
        start.place,
        start.columns,
        start.rank_of_pack,
        units.slots,
        units.costs,
        units.home,
        dp_size,
        count,
        constraints.usable_tokens,
        _iterations(len(units), dp_size) // share,
        threshold,
        column_weight,
        rank_weight,
        # With both aims, ranks may be above their mean by a fraction of what lockstep loses, a smaller one
        # where there are many of them.
        8 + dp_size // 8 if column_weight else 0,
        constraints.seed,
    )
    return _Packing(place, columns, rank_of_pack)


def _level(inputs: PlanInputs, packing: _Packing, count: int) -> Ints:
    """The pack at each place (int64[dp, K]), columns by falling cost, rank totals as level as packs allow."""
    dp_size = inputs.constraints.dp_size
    load = _pack_costs(inputs, packing.place, count)
    columns = packing.columns[np.argsort(-load[packing.columns].max(axis=1), kind="stable")]
    table = np.empty((dp_size, count), dtype=np.int64)
    table[packing.rank_of_pack[columns], np.arange(count)[:, None]] = columns
    if _at_home(inputs):
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
