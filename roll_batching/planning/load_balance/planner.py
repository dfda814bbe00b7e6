"""Algorithm "load_balance": few packs under the hard cap, balanced for what the layout waits for.

Count first, then a placement by cost, then exchanges of units that level rank totals and lower lockstep, then
columns dealt to ranks and brought in order. Blocks of `lockstep_ranks` neighbours wait for each other at every
index, all ranks at the step's end: the time of a step is that of its slowest block. Where ranks meet only there,
their totals come first. In a pipeline more micro-batches can be faster than fewer: several counts are balanced in
part, the most promising ones in full, and the one with the smallest makespan is taken.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.cost_model import FIXED_TOKENS
from roll_batching.planning.load_balance.balancing import Balancing
from roll_batching.planning.load_balance.dealing import LEVEL_BUDGET, block_tops, deal_columns
from roll_batching.planning.load_balance.pools import Packing, Pool, pools_of
from roll_batching.planning.load_balance.search_state import SearchState, lockstep_cost, pack_costs
from roll_batching.planning.pipeline.num_micro_batches import group_size_of, legal_count, legal_counts
from roll_batching.planning.pipeline.ordering import MOST_ORDERS, order_for_pipeline, slowest_makespan
from roll_batching.planning.placement import Placement
from roll_batching.planning.problem import PlanProblem

logger = logging.getLogger(__name__)

RANK_TOLERANCE = 100_000
"""Rank totals are level when none is above the mean by more than this part of it."""
RANKS_FIRST = 8
"""Weight of the rank excess beside the lockstep cost where a start is chosen and ranks meet once per step."""
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
        unknown = not problem.fixed_cost
        counts = [_count_without_fixed_cost(problem, pools)] if unknown else _promising_counts(problem, pools)
    else:
        counts = [legal_count(_fewest(problem, pools), constraints)]
    packings = [packing for one in counts for packing in _candidates(Balancing(problem, pools, one))]
    packing = min(packings, key=lambda packing: _time(problem, packing)) if len(packings) > 1 else packings[0]
    table = _table(problem, packing)
    if constraints.pp_size > 1:
        table = _in_pipeline_order(problem, table, _loads(problem, packing))
    where = np.empty(table.size, dtype=np.int64)
    where[table.reshape(-1)] = np.arange(table.size)
    final = where[packing.place]
    order = np.argsort(final, kind="stable").astype(np.int64)
    return Placement(order, offsets_of(np.bincount(final, minlength=table.size)), table.shape[1])


def _candidates(case: Balancing, share: int = 1) -> list[Packing]:
    """Packings of which the fastest is taken; `share` divides the search's iterations."""
    constraints = case.problem.constraints
    if constraints.pp_size > 1:
        return _pipeline_candidates(case, share)
    if constraints.objective == "rank_total":
        return [case.packing(_level_alone(case, case.starts(column_weight=0, rank_weight=1)))]
    if constraints.lockstep_ranks == 1:
        return [_ranks_first(case)]
    packings = [case.packing(_lower_alone(case, case.starts(column_weight=1, rank_weight=0)))]
    if constraints.lockstep_ranks < constraints.dp_size:  # blocks of like packs may gain more from level totals
        packings.append(_ranks_first(case))
    return packings


def _pipeline_candidates(case: Balancing, share: int) -> list[Packing]:
    """The searched packs, those the search started from, and packs as alike as a placement by cost makes them.

    The search levels ranks inside columns and does not see that a pipeline gains from columns that are alike.
    """
    objective = case.problem.constraints.objective
    column_weight, rank_weight = {"lockstep": (1, 0), "rank_total": (0, 1)}.get(objective, (1, 1))
    search = {"lockstep": _lower_alone, "rank_total": _level_alone}.get(objective, _level_and_lower)
    start, alike = case.starts(column_weight=column_weight, rank_weight=rank_weight)[0], case.alike()
    starts = [start] if np.array_equal(start.place, alike.place) else [start, alike]
    searched = starts if share == 1 else starts[:1]  # counts are compared by one search each
    return [*(case.packing(search(case, [one], share)) for one in searched), *starts]


def _ranks_first(case: Balancing) -> Packing:
    """Rank totals within the tolerance, or as near to it as packs allow; then the least lockstep cost."""
    search = case.search(case.starts(column_weight=1, rank_weight=RANKS_FIRST)[0])
    bound = max(case.mean_total + case.mean_total // RANK_TOLERANCE, case.rank_bound)
    case.level(search, bound, share=2)
    if not case.problem.at_home and search.totals.max() > bound:
        search = _level_alone(case, case.starts(column_weight=0, rank_weight=1))
        bound = max(bound, int(search.totals.max()))
    case.lower(search, bound)
    case.level(search, case.rank_bound)
    return case.packing(search)


def _level_alone(case: Balancing, starts: list[Packing], share: int = 1) -> SearchState:
    """The lowest largest total found from any start; from the first alone where that comes near the bound."""
    found: list[SearchState] = []
    for start in starts:
        search = case.search(start)
        case.level_alone(search, share)
        found.append(search)
        if case.is_done(int(search.totals.max()), case.rank_bound):
            break
    return min(found, key=lambda search: int(search.totals.max()))


def _lower_alone(case: Balancing, starts: list[Packing], share: int = 1) -> SearchState:
    """The least lockstep cost found from any start; from the first alone where that comes near the bound."""
    found: list[SearchState] = []
    for start in starts:
        search = case.search(start)
        case.lower(search, share=share)
        found.append(search)
        if case.is_done(lockstep_cost(search), case.lockstep_bound):
            break
    return min(found, key=lockstep_cost)


def _level_and_lower(case: Balancing, starts: list[Packing], share: int) -> SearchState:
    """Lockstep and rank totals: ranks may be above their mean by a part of what lockstep loses."""
    search = case.search(starts[0])
    lost = lockstep_cost(search) - case.mean_total
    allowed = case.mean_total + max(0, lost) // (PIPELINE_ALLOWANCE + len(search.totals) // 8)
    case.level(search, allowed, share)
    case.lower(search, allowed, share)
    return search


def _loads(problem: PlanProblem, packing: Packing) -> Ints:
    return pack_costs(packing.place, problem.units, packing.table.size)


def _time(problem: PlanProblem, packing: Packing) -> int:
    """Time of the slowest block; in a pipeline after a short search for an order."""
    constraints = problem.constraints
    costs = _loads(problem, packing)[_table(problem, packing, budget=0)] + problem.fixed_cost
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


def _count_without_fixed_cost(problem: PlanProblem, pools: list[Pool]) -> int:
    """K for a cost without a fixed part, as if each micro-batch cost FIXED_TOKENS average tokens more.

    Without one, the makespan is smallest with about one sample per micro-batch, whatever the cap allows. Only the
    choice of K assumes it: placement and order follow the cost as given.
    """
    _warn_of_assumed_fixed_cost()
    total = int(problem.costs.sum())
    assumed = min(total, total * FIXED_TOKENS // int(problem.used.sum()))
    return _promising_counts(replace(problem, fixed_cost=assumed), pools)[0]


@functools.cache
def _warn_of_assumed_fixed_cost() -> None:
    logger.warning(
        "the cost has no fixed part per micro-batch (fixed=0), and the pipeline's number of micro-batches follows from "
        "it: each counts as %d average tokens more. Set fixed, which benchmarks/bench_fixed.py measures",
        FIXED_TOKENS,
    )


def _promising_counts(problem: PlanProblem, pools: list[Pool]) -> list[int]:
    """The counts with the smallest makespans after a part of the search; of equals the smaller."""
    constraints = problem.constraints
    needed = _fewest(problem, pools)
    most = max(-(-len(pool.units) // pool.ranks) for pool in pools)
    times: dict[int, int] = {}

    def time(count: int) -> int:
        if count not in times:
            tried = _candidates(Balancing(problem, pools, count), ESTIMATE_SHARE)
            times[count] = min(_time(problem, packing) for packing in tried)
        return times[count]

    best = min(legal_counts(needed, most, constraints, TRIED_COUNTS), key=lambda count: (time(count), count))
    least = legal_count(needed, constraints)
    for nearby in range(max(least, best - NEIGHBOURS), best + NEIGHBOURS + 1):
        if legal_count(nearby, constraints) == nearby:
            time(nearby)
    return sorted(times, key=lambda count: (times[count], count))[:FINALISTS]


def _table(problem: PlanProblem, packing: Packing, budget: int = LEVEL_BUDGET) -> Ints:
    """The pack of every rank and index (int64[dp, K]), columns by falling cost, the blocks' times level."""
    load = _loads(problem, packing)
    falling = np.argsort(-load[packing.table].max(axis=0), kind="stable")
    table = packing.table[:, falling]
    if problem.at_home or problem.constraints.lockstep_ranks == 1:
        return table
    return deal_columns(table.T, load, problem.constraints.lockstep_ranks, budget=budget)
