"""Algorithm "load_balance": few packs under the hard cap, balanced for what the layout waits for.

Count first, then a placement by cost, then swaps of units that lower rank totals and lockstep, then columns
dealt to ranks and brought in order. Blocks of `lockstep_ranks` neighbours wait for each other at every index,
all ranks at the step's end: the time of a step is that of its slowest block. Where ranks meet only there, their
totals come first. In a pipeline more micro-batches can be faster than fewer: several counts are balanced in
part, the most promising ones in full, and the one with the smallest makespan is taken.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.load_balance.columns import assign_ranks, sort_columns
from roll_batching.planning.load_balance.dealing import LEVEL_BUDGET, block_tops, deal_columns, level_table
from roll_batching.planning.load_balance.pools import Packing, Pool, pools_of
from roll_batching.planning.load_balance.swap_search import Aim, Limits, swap_units
from roll_batching.planning.pipeline.num_micro_batches import group_size_of, legal_count, legal_counts
from roll_batching.planning.pipeline.ordering import MOST_ORDERS, order_for_pipeline, slowest_makespan
from roll_batching.planning.placement import Placement
from roll_batching.planning.problem import PlanProblem

SEARCH_ITERATIONS = 300_000
LARGE_ITERATIONS = 200_000
MANY_UNITS = 512
ITERATIONS_PER_UNIT = 1_200
WIDE_COLUMN = 192
THRESHOLD_DIVISOR = 50

RANK_TOLERANCE = 2_000
"""Rank totals are level when none is above the mean by more than this part of it."""
RANK_MARGIN = 20_000
"""The search aims lower by this part of the mean: what it weighs against lockstep may end a little high."""
RANKS_FIRST = 8
"""Weight of the rank excess beside the lockstep cost where ranks meet once per step."""
PIPELINE_ALLOWANCE = 8
"""In a pipeline ranks may be above their mean by this part of what lockstep loses, less where ranks are many."""

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


def balance(problem: PlanProblem, *, count: int | None = None) -> Placement:
    """All units, their number of micro-batches and their order.

    `count` prescribes K (it must be legal and large enough); None chooses it.
    """
    constraints = problem.constraints
    pools = pools_of(problem)
    if count is not None:
        counts = [count]
    elif constraints.pp_size > 1:
        counts = _promising_counts(problem, pools)
    else:
        counts = [legal_count(_fewest(problem, pools), constraints)]
    packings = [packing for one in counts for packing in _candidates(problem, pools, one)]
    packing = min(packings, key=lambda packing: _time(problem, packing)) if len(packings) > 1 else packings[0]
    table = _table(problem, packing)
    if constraints.pp_size > 1:
        table = _in_pipeline_order(problem, table, _pack_costs(problem, packing.place, len(packing.columns)))
    where = np.empty(table.size, dtype=np.int64)
    where[table.reshape(-1)] = np.arange(table.size)
    final = where[packing.place]
    order = np.argsort(final, kind="stable").astype(np.int64)
    return Placement(order, offsets_of(np.bincount(final, minlength=table.size)), table.shape[1])


def _candidates(problem: PlanProblem, pools: list[Pool], count: int, share: int = 1) -> list[Packing]:
    """Packings of which the fastest is taken; `share` divides the search's iterations."""
    constraints = problem.constraints
    if constraints.pp_size > 1:
        return _pipeline_candidates(problem, pools, count, share)
    if constraints.objective == "rank_total":
        return [_totals_alone(problem, pools, count)]
    if constraints.lockstep_ranks == 1:
        return [_ranks_first(problem, pools, count)]
    lockstep = Aim(column_weight=1, rank_weight=0, level=0)
    packings = [_search(problem, _start(problem, pools, count, lockstep), count, lockstep)]
    if constraints.lockstep_ranks < constraints.dp_size:  # blocks of like packs may gain more from level totals
        packings.append(_ranks_first(problem, pools, count))
    return packings


def _pipeline_candidates(problem: PlanProblem, pools: list[Pool], count: int, share: int) -> list[Packing]:
    """The searched packs, those the search started from, and packs as alike as a placement by cost makes them.

    The search levels ranks inside columns and does not see that a pipeline gains from columns that are alike.
    """
    column_weight, rank_weight = {"lockstep": (1, 0), "rank_total": (0, 1)}.get(problem.constraints.objective, (1, 1))
    dp_size = problem.constraints.dp_size
    mean = _mean_total(problem)
    start = _start(problem, pools, count, Aim(column_weight=column_weight, rank_weight=rank_weight, level=mean))
    lost = int(_pack_costs(problem, start.place, count)[start.columns].max(axis=1).sum()) - mean
    allowed = max(0, lost) // (PIPELINE_ALLOWANCE + dp_size // 8) if column_weight else 0
    aim = Aim(column_weight=column_weight, rank_weight=rank_weight, level=mean + allowed)
    alike = _arranged(problem, pools, [pool.place(count) for pool in pools], count)
    starts = [start] if np.array_equal(start.place, alike.place) else [start, alike]
    searched = starts if share == 1 else starts[:1]  # counts are compared by one search each
    return [*(_search(problem, one, count, aim, share) for one in searched), *starts]


def _totals_alone(problem: PlanProblem, pools: list[Pool], count: int) -> Packing:
    aim = Aim(column_weight=0, rank_weight=1, level=_mean_total(problem))
    return _search(problem, _start(problem, pools, count, aim), count, aim)


def _ranks_first(problem: PlanProblem, pools: list[Pool], count: int) -> Packing:
    """Rank totals within the tolerance, or as near to it as packs allow; then the least lockstep cost."""
    mean = _mean_total(problem)
    margin = mean // RANK_MARGIN
    bound = max(mean + mean // RANK_TOLERANCE, int(problem.units.costs.max()))

    def aim(level: int) -> Aim:
        return Aim(column_weight=1, rank_weight=RANKS_FIRST, level=level)

    within = aim(bound - margin)
    found = _search(problem, _start(problem, pools, count, within), count, within)
    if problem.at_home or _largest_total(problem, found) <= bound:
        return found
    level = _totals_alone(problem, pools, count)
    bound = max(bound, _largest_total(problem, level))
    if _largest_total(problem, found) <= bound:
        return found
    lower = _search(problem, level, count, aim(max(bound - margin, _largest_total(problem, level))))
    return lower if _largest_total(problem, lower) <= bound else level


def _mean_total(problem: PlanProblem) -> int:
    return int(problem.units.costs.sum()) // problem.constraints.dp_size


def _largest_total(problem: PlanProblem, packing: Packing) -> int:
    load = _pack_costs(problem, packing.place, len(packing.columns))
    return int(load[_table(problem, packing)].sum(axis=1).max())


def _time(problem: PlanProblem, packing: Packing) -> int:
    """Time of the slowest block; in a pipeline after a short search for an order."""
    constraints = problem.constraints
    load = _pack_costs(problem, packing.place, len(packing.columns))
    costs = load[_table(problem, packing, budget=0)] + problem.fixed_cost
    tops = block_tops(costs, constraints.lockstep_ranks)
    if constraints.pp_size == 1:
        return int(tops.sum(axis=1).max())
    order = _pipeline_order(problem, tops.max(axis=0), ESTIMATE_ORDERS)
    return slowest_makespan(
        tops[:, order],
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=group_size_of(len(order), constraints),
    )


def _in_pipeline_order(problem: PlanProblem, table: Ints, load: Ints) -> Ints:
    """`table` with its columns in one good order, from which every block goes on to its own."""
    width = problem.constraints.lockstep_ranks
    costs = load[table] + problem.fixed_cost
    order = _pipeline_order(problem, costs.max(axis=0), MOST_ORDERS)
    table, costs = table[:, order], costs[:, order]
    blocks = block_tops(costs, width)
    if len(blocks) == 1:
        return table
    for block, tops in enumerate(blocks):
        own = _pipeline_order(problem, tops, MOST_ORDERS // len(blocks), start=np.arange(len(tops)))
        rows = slice(block * width, (block + 1) * width)
        table[rows] = table[rows][:, own]
    return table


def _pipeline_order(problem: PlanProblem, tops: Ints, tries: int, start: Ints | None = None) -> Ints:
    """An order of columns, given the largest cost in each."""
    constraints = problem.constraints
    return order_for_pipeline(
        tops,
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=group_size_of(len(tops), constraints),
        seed=constraints.seed,
        tries=tries,
        start=start,
    )


def _fewest(problem: PlanProblem, pools: list[Pool]) -> int:
    """The fewest micro-batches per rank found."""
    constraints = problem.constraints
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


def _promising_counts(problem: PlanProblem, pools: list[Pool]) -> list[int]:
    """The counts with the smallest makespans after a part of the search; of equals the smaller."""
    constraints = problem.constraints
    needed = _fewest(problem, pools)
    most = max(-(-len(pool.units) // pool.ranks) for pool in pools)
    times: dict[int, int] = {}

    def time(count: int) -> int:
        if count not in times:
            tried = _candidates(problem, pools, count, ESTIMATE_SHARE)
            times[count] = min(_time(problem, packing) for packing in tried)
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


def _start(problem: PlanProblem, pools: list[Pool], count: int, aim: Aim) -> Packing:
    """The best balanced packs: by cost, by cost beside giants, or first-fit-decreasing's own."""

    def energy(packing: Packing) -> int:
        load = _pack_costs(problem, packing.place, count)
        totals = np.bincount(packing.rank_of_pack, weights=load).astype(np.int64)
        above = int(np.maximum(totals - aim.level, 0).sum())
        return aim.column_weight * int(load[packing.columns].max(axis=1).sum()) + aim.rank_weight * above

    starts = [_arranged(problem, pools, [pool.place(count) for pool in pools], count)]
    if all(pool.first_fit_count <= count for pool in pools):
        starts.append(_arranged(problem, pools, [pool.first_fit for pool in pools], count))
    if not problem.at_home:
        beside = pools[0].place_beside_giants(count, level_totals=aim.rank_weight > 0)
        if beside is not None:
            starts += [beside, _arranged(problem, pools, [beside.place], count)]
    return min(starts, key=energy)


def _arranged(problem: PlanProblem, pools: list[Pool], placed: list[Ints], count: int) -> Packing:
    """Packs of every pool, cut into columns by cost and given to ranks."""
    place = np.empty(len(problem.units), dtype=np.int64)
    for index, (pool, packs) in enumerate(zip(pools, placed, strict=True)):
        place[pool.units] = packs + index * count * pool.ranks
    load = _pack_costs(problem, place, count)
    columns, _ = sort_columns(load, problem.constraints.dp_size, count, problem.at_home)
    ranks, _ = assign_ranks(columns, load, problem.at_home)
    return Packing(place, columns, ranks)


def _search(problem: PlanProblem, start: Packing, count: int, aim: Aim, share: int = 1) -> Packing:
    """Swap units for the aim, with one part in `share` of the iterations."""
    constraints = problem.constraints
    units = problem.units
    dp_size = constraints.dp_size
    # The first accepted loss: a share of a mean pack.
    threshold = int(units.costs.sum()) // (THRESHOLD_DIVISOR * dp_size * count)
    place, columns, rank_of_pack = swap_units(
        start.place,
        start.columns,
        start.rank_of_pack,
        units.slots,
        units.costs,
        units.home,
        Limits(constraints.usable_tokens, _iterations(len(units), dp_size) // share, threshold),
        aim,
        constraints.seed,
    )
    return Packing(place, columns, rank_of_pack)


def _table(problem: PlanProblem, packing: Packing, budget: int = LEVEL_BUDGET) -> Ints:
    """The pack of every rank and index (int64[dp, K]), columns by falling cost, the blocks' times level."""
    constraints = problem.constraints
    count = len(packing.columns)
    load = _pack_costs(problem, packing.place, count)
    columns = packing.columns[np.argsort(-load[packing.columns].max(axis=1), kind="stable")]
    searched = np.empty((constraints.dp_size, count), dtype=np.int64)
    searched[packing.rank_of_pack[columns], np.arange(count)[:, None]] = columns
    if problem.at_home:
        return searched
    dealt = deal_columns(columns, load, constraints.lockstep_ranks, budget=budget)
    if constraints.lockstep_ranks > 1:
        return dealt
    # The search has ranks of its own; leveled, they may be the better ones.
    searched = level_table(searched, load, budget=budget)
    return min(dealt, searched, key=lambda table: int(load[table].sum(axis=1).max()))


def _pack_costs(problem: PlanProblem, place: Ints, count: int) -> Ints:
    """Cost of every pack; the float sums are exact, since all costs together stay below 2^53."""
    packs = problem.constraints.dp_size * count
    return np.bincount(place, weights=problem.units.costs, minlength=packs).astype(np.int64)
