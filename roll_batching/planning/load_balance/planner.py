"""Algorithm "load_balance": few packs under the cap, with cost balanced for the parallel layout.

1. Choose the number of micro-batches per rank (K). Without a pipeline it is the smallest that the cap allows. In a
   pipeline more micro-batches can be faster: several values of K get a short search, the best of them the full search,
   and the smallest makespan wins.
2. Place units by cost, then exchange units and packs to level rank totals and lower the lockstep cost.
3. Give the packs of each index to ranks, and order the indices.

Blocks of `lockstep_ranks` consecutive ranks wait for each other at every index, and all ranks at the end of the step.
So the time of a step is that of its slowest block. Blocks of one rank level their totals first.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.compiled import compiled
from roll_batching.planning.cost_model import FIXED_TOKENS
from roll_batching.planning.load_balance.balancing import Balancer
from roll_batching.planning.load_balance.pools import Packing, Pool, fill_empty_packs, has_empty_packs, pools_of
from roll_batching.planning.load_balance.search_state import SearchState, lockstep_cost, pack_costs
from roll_batching.planning.pipeline.ordering import block_maxima, order_of_indices, step_cost
from roll_batching.planning.pipeline.schedule import legal_count, legal_counts
from roll_batching.planning.placement import Placement
from roll_batching.planning.problem import PlanProblem
from roll_batching.planning.search_budget import SEARCH_BUDGET

logger = logging.getLogger(__name__)


def balance(problem: PlanProblem, *, count: int | None = None) -> Placement:
    """Placement of all units, for the planner to assemble.

    `count` prescribes K, which must be legal and large enough; None chooses it.
    """
    constraints = problem.constraints
    pools = pools_of(problem)
    if count is not None:
        counts = [count]
    elif constraints.pp_size > 1:
        has_fixed_cost = bool(problem.fixed_cost)
        counts = _best_counts(problem, pools) if has_fixed_cost else [_count_without_fixed_cost(problem, pools)]
    else:
        counts = [legal_count(_fewest_micro_batches(problem, pools), constraints)]
    packing = _fastest(problem, [packing for k in counts for packing in _candidates(Balancer(problem, pools, k))])
    if not constraints.fillers and has_empty_packs(packing):
        packing = fill_empty_packs(problem, packing)
        if not has_empty_packs(packing):  # with too few units no search fills them, and the plan is refused
            exchanged = _candidates(Balancer(problem, pools, packing.table.shape[1], may_empty=False))
            packing = _fastest(problem, [packing, *exchanged])
    table = _assign_to_ranks(problem, packing)
    if constraints.pp_size > 1:
        table = _order_in_pipeline(problem, table, _pack_costs(problem, packing))
    cell_of = np.empty(table.size, dtype=np.int64)
    cell_of[table.reshape(-1)] = np.arange(table.size)
    cells = cell_of[packing.place]
    units = np.argsort(cells, kind="stable").astype(np.int64)
    return Placement(units, offsets_of(np.bincount(cells, minlength=table.size)), table.shape[1])


def _fastest(problem: PlanProblem, packings: list[Packing]) -> Packing:
    """The packing with the shortest step, the first of equals."""
    return min(packings, key=lambda packing: _step_time(problem, packing)) if len(packings) > 1 else packings[0]


def _candidates(balancer: Balancer, share: int = 1) -> list[Packing]:
    """Balanced packings, of which the fastest is taken; `share` divides the steps of searches."""
    constraints = balancer.problem.constraints
    if constraints.pp_size > 1:
        return _pipeline_candidates(balancer, share)
    if constraints.objective == "rank_total":
        return [balancer.packing_of(_level_totals(balancer, balancer.starts(lockstep_weight=0, rank_weight=1)))]
    if constraints.lockstep_ranks == 1:
        return [_totals_then_lockstep(balancer)]
    packings = [balancer.packing_of(_lower_lockstep(balancer, balancer.starts(lockstep_weight=1, rank_weight=0)))]
    if constraints.lockstep_ranks < constraints.dp_size:
        # Blocks of similar packs may gain more from level totals.
        packings.append(_totals_then_lockstep(balancer))
    return packings


def _pipeline_candidates(balancer: Balancer, share: int) -> list[Packing]:
    """Packings after the search, before it, and with packs of nearly equal cost.

    The search levels ranks within each index. It does not see that a pipeline is faster when all indices cost the same,
    so the result of the search is not always the best one.
    """
    objective = balancer.problem.constraints.objective
    lockstep_weight, rank_weight = {"lockstep": (1, 0), "rank_total": (0, 1)}.get(objective, (1, 1))
    search = {"lockstep": _lower_lockstep, "rank_total": _level_totals}.get(objective, _level_and_lower)
    best = balancer.starts(lockstep_weight=lockstep_weight, rank_weight=rank_weight)[0]
    by_cost = balancer.place_by_cost()
    starts = [best] if np.array_equal(best.place, by_cost.place) else [best, by_cost]
    searched = starts if share == 1 else starts[:1]  # one search is enough to compare values of K
    return [*(balancer.packing_of(search(balancer, [start], share)) for start in searched), *starts]


def _totals_then_lockstep(balancer: Balancer) -> Packing:
    """Level rank totals to the tolerance, or as far as packs allow; then lower the lockstep cost.

    Where that leaves a lockstep loss, a second search comes from the other side: see `_lockstep_then_totals`.
    """
    start = balancer.starts(lockstep_weight=1, rank_weight=SEARCH_BUDGET.rank_weight)[0]
    search = balancer.begin_search(start)
    level = max(balancer.mean_total + balancer.mean_total // SEARCH_BUDGET.rank_tolerance, balancer.rank_bound)
    balancer.level_within_ceilings(search, level, share=2)
    if not balancer.problem.has_home_ranks and search.totals.max() > level:
        search = _level_totals(balancer, balancer.starts(lockstep_weight=0, rank_weight=1))
    balancer.lower_lockstep(search, max(level, int(search.totals.max())))
    searches = [search]
    loss = lockstep_cost(search) - balancer.lockstep_bound
    if not balancer.problem.has_home_ranks and loss * SEARCH_BUDGET.lockstep_loss > balancer.lockstep_bound:
        searches += _lockstep_then_totals(balancer, start, level, loss)
    search = min(searches, key=lambda search: (max(level, int(search.totals.max())), lockstep_cost(search)))
    balancer.level_within_ceilings(search, balancer.rank_bound, share=4)  # what is left is within the tolerance
    return balancer.packing_of(search)


def _lockstep_then_totals(balancer: Balancer, start: Packing, level: int, loss: int) -> list[SearchState]:
    """A search that lowers the lockstep cost first, and raises it only as far as totals of `level` need.

    Returns [] where it cannot beat a search that ended with `loss`: `level` is out of reach, and the lockstep cost is
    not much lower before totals are levelled.
    """
    search = balancer.begin_search(start)
    balancer.lower_lockstep(search, share=2, is_final=False)
    smallest_loss = lockstep_cost(search) - balancer.lockstep_bound
    if search.totals.max() > level:
        balancer.level_within_ceilings(search, level, share=2, margin=SEARCH_BUDGET.falling_margin)
    if search.totals.max() > level:
        if smallest_loss * SEARCH_BUDGET.lockstep_prospect >= loss:
            return []
        balancer.level_totals(search, share=2)
    balancer.lower_lockstep(search, max(level, int(search.totals.max())))
    return [search]


def _level_totals(balancer: Balancer, starts: list[Packing], share: int = 1) -> SearchState:
    """Search with the smallest largest total, from all starts until one is close to the lower bound."""
    searches: list[SearchState] = []
    for start in starts:
        search = balancer.begin_search(start)
        balancer.level_totals(search, share)
        searches.append(search)
        if balancer.is_close(int(search.totals.max()), balancer.rank_bound):
            break
    return min(searches, key=lambda search: int(search.totals.max()))


def _lower_lockstep(balancer: Balancer, starts: list[Packing], share: int = 1) -> SearchState:
    """Search with the smallest lockstep cost, from all starts until one is close to the lower bound."""
    searches: list[SearchState] = []
    for start in starts:
        search = balancer.begin_search(start)
        balancer.lower_lockstep(search, share=share)
        searches.append(search)
        if balancer.is_close(lockstep_cost(search), balancer.lockstep_bound):
            break
    return min(searches, key=lockstep_cost)


def _level_and_lower(balancer: Balancer, starts: list[Packing], share: int) -> SearchState:
    """Search for both: rank totals may exceed their mean by a part of the lockstep loss."""
    search = balancer.begin_search(starts[0])
    loss = lockstep_cost(search) - balancer.mean_total
    allowance = max(0, loss) // (SEARCH_BUDGET.pipeline_allowance + len(search.totals) // 8)
    bound = balancer.mean_total + allowance
    balancer.level_within_ceilings(search, bound, share)
    balancer.lower_lockstep(search, bound, share)
    return search


def _pack_costs(problem: PlanProblem, packing: Packing) -> Ints:
    return pack_costs(packing.place, problem.units, packing.table.size)


def _step_time(problem: PlanProblem, packing: Packing) -> int:
    """Time of the slowest block of ranks; in a pipeline after a short search for an order."""
    constraints = problem.constraints
    table = _assign_to_ranks(problem, packing, comparisons=0)
    costs = _pack_costs(problem, packing)[table] + problem.fixed_cost
    if constraints.pp_size > 1:
        maxima = costs.max(axis=0)
        order = order_of_indices(maxima, constraints, problem.chunk_shares, tries=SEARCH_BUDGET.count_orders)
        costs = costs[:, order]
    return step_cost(costs, constraints, problem.chunk_shares)


def _order_in_pipeline(problem: PlanProblem, table: Ints, load: Ints) -> Ints:
    """`table` with its indices in an order of small makespan, improved for each block of ranks."""
    constraints, shares, width = problem.constraints, problem.chunk_shares, problem.constraints.lockstep_ranks
    costs = load[table] + problem.fixed_cost
    order = order_of_indices(costs.max(axis=0), constraints, shares)
    table, costs = table[:, order], costs[:, order]
    blocks = block_maxima(costs, width)
    if len(blocks) == 1:
        return table
    tries, as_ordered = SEARCH_BUDGET.max_orders // len(blocks), np.arange(table.shape[1])
    for block, maxima in enumerate(blocks):
        order = order_of_indices(maxima, constraints, shares, tries=tries, start=as_ordered)
        ranks = slice(block * width, (block + 1) * width)
        table[ranks] = table[ranks][:, order]
    return table


def _fewest_micro_batches(problem: PlanProblem, pools: list[Pool]) -> int:
    """Smallest K for which a placement below the cap is found."""
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
    """K for a cost model with `fixed=0`, as if each micro-batch cost `FIXED_TOKENS` average tokens more.

    Without a fixed cost, the makespan is smallest with about one sample per micro-batch. Only the choice of K assumes
    one: placement and order follow the cost model.
    """
    _warn_of_assumed_fixed_cost()
    total = int(problem.costs.sum())
    assumed = min(total, total * FIXED_TOKENS // int(problem.used.sum()))
    return _best_counts(replace(problem, fixed_cost=assumed), pools)[0]


@functools.cache
def _warn_of_assumed_fixed_cost() -> None:
    logger.warning(
        "the cost model has no fixed cost per micro-batch (fixed=0), which decides the number of micro-batches in a "
        "pipeline: a micro-batch is assumed to cost as much as %d average tokens. Set fixed to what "
        "benchmarks/bench_fixed.py measures",
        FIXED_TOKENS,
    )


def _best_counts(problem: PlanProblem, pools: list[Pool]) -> list[int]:
    """Values of K with the smallest makespans after a short search, the best first; of equals the smaller."""
    constraints, budget = problem.constraints, SEARCH_BUDGET
    needed = _fewest_micro_batches(problem, pools)
    most = max(-(-len(pool.units) // pool.ranks) for pool in pools)
    if not constraints.fillers:
        most = min(len(pool.units) // pool.ranks for pool in pools)
    times: dict[int, int] = {}

    def time(count: int) -> int:
        if count not in times:
            candidates = _candidates(Balancer(problem, pools, count), budget.count_steps_divisor)
            times[count] = min(_step_time(problem, packing) for packing in candidates)
        return times[count]

    best = min(legal_counts(needed, most, constraints, budget.counts_tried), key=lambda count: (time(count), count))
    least = legal_count(needed, constraints)
    highest = best + budget.counts_nearby
    if not constraints.fillers:
        highest = min(highest, max(most, least))
    for nearby in range(max(least, best - budget.counts_nearby), highest + 1):
        if legal_count(nearby, constraints) == nearby:
            time(nearby)
    return sorted(times, key=lambda count: (times[count], count))[: budget.counts_finalists]


def _assign_to_ranks(problem: PlanProblem, packing: Packing, comparisons: int | None = None) -> Ints:
    """Pack of each rank and index (int64[dp, K]), indices by falling cost, totals of blocks and ranks level.

    `comparisons` as in `assign_packs`.
    """
    load = _pack_costs(problem, packing)
    falling = np.argsort(-load[packing.table].max(axis=0), kind="stable")
    table = packing.table[:, falling]
    if problem.has_home_ranks or problem.constraints.lockstep_ranks == 1:
        return table
    return assign_packs(table.T, load, problem.constraints.lockstep_ranks, comparisons=comparisons)


# ---- assignment to ranks
#
# A block is `width` consecutive ranks that wait for each other at every index; it takes the largest cost of its packs
# there (`width` 1: every rank by itself; all ranks: lockstep). Packs of similar cost go to one block. Which block takes
# which of them levels the times of blocks; inside a block the same levels the totals of ranks.


def assign_packs(columns: Ints, load: Ints, width: int, *, comparisons: int | None = None) -> Ints:
    """Pack of each rank and index, int64[dp, K].

    `columns` (int64[K, dp]) are the packs of each index, `load` (int64[packs]) their costs. `comparisons` is the most
    made to level totals (None: `level_comparisons`); 0 keeps the first assignment.
    """
    most = SEARCH_BUDGET.level_comparisons if comparisons is None else comparisons
    count, ranks = columns.shape
    falling = np.take_along_axis(columns, np.argsort(-load[columns], axis=1, kind="stable"), axis=1)
    blocks = falling.reshape(count, ranks // width, width)
    chosen = _level(load[blocks[:, :, 0]], most)
    table = np.empty((ranks, count), dtype=np.int64)
    for block in range(ranks // width):
        packs = blocks[np.arange(count), chosen[block]]
        inside = _level(load[packs], most) if width > 1 else np.zeros((1, count), dtype=np.int64)
        table[block * width : (block + 1) * width] = np.take_along_axis(packs.T, inside, axis=0)
    return table


def _level(costs: Ints, comparisons: int) -> Ints:
    """Levels the sums of n places: which of the costs of an index (int64[K, n]) each place takes, int64[n, K]."""
    count, places = costs.shape
    if places == 1:
        return np.zeros((1, count), dtype=np.int64)
    table = np.empty((places, count), dtype=np.int64)
    totals = np.zeros(places, dtype=np.int64)
    # The costliest at an index goes to the place with the smallest total, indices by falling spread.
    for k in np.argsort(costs.min(axis=1) - costs.max(axis=1), kind="stable"):
        by_total, falling = np.argsort(totals, kind="stable"), np.argsort(-costs[k], kind="stable")
        table[by_total, k] = falling
        totals[by_total] += costs[k, falling]
    # Comparing the costliest rank with all others takes too long for many ranks or indices.
    all_ranks = costs.size <= SEARCH_BUDGET.level_all_ranks_cells
    exchanged = _level_ranks(np.take_along_axis(costs.T, table, axis=0), comparisons, all_ranks)
    return np.take_along_axis(table, exchanged, axis=0)


@compiled
def _level_ranks(table: Ints, comparisons: int, all_ranks: bool) -> Ints:
    """Exchange packs at one index between ranks until the rank totals are level.

    `table` is int64[dp, K], the cost of each rank's pack at each index; returns int64[dp, K], for each cell the rank
    whose pack goes there. An index keeps its packs, so the lockstep cost stays. The costliest rank exchanges with the
    rank where that helps most, or with the cheapest (`all_ranks` False), until nothing helps.
    """
    ranks, count = table.shape
    origin = np.empty((ranks, count), dtype=np.int64)
    total = np.zeros(ranks, dtype=np.int64)
    for rank in range(ranks):
        for k in range(count):
            origin[rank, k] = rank
            total[rank] += table[rank, k]
    while comparisons > 0:
        top = np.argmax(total)
        best_gain = 0
        best_rank = -1
        best_k = -1
        for rank in range(ranks) if all_ranks else range(np.argmin(total), np.argmin(total) + 1):
            comparisons -= count
            for k in range(count):
                change = table[origin[top, k], k] - table[origin[rank, k], k]
                if change > 0:
                    gain = total[top] - max(total[top] - change, total[rank] + change)
                    if gain > best_gain:
                        best_gain = gain
                        best_rank = rank
                        best_k = k
        if best_rank < 0:
            break
        change = table[origin[top, best_k], best_k] - table[origin[best_rank, best_k], best_k]
        total[top] -= change
        total[best_rank] += change
        swap = origin[top, best_k]
        origin[top, best_k] = origin[best_rank, best_k]
        origin[best_rank, best_k] = swap
    return origin
