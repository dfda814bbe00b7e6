"""Threshold-accepting searches: lower the largest rank total, or the lockstep cost.

Both draw exchanges of units and of whole packs from the costliest rank, or the costliest pack of an index, and accept
them by what the exchange does to their objective.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled, draw, next_random, seed_state
from roll_batching.planning.load_balance.search_state import (
    SearchState,
    copy_packs,
    excess,
    exchange_packs,
    exchange_units,
    falling_threshold,
    fits,
    neighbour,
    restore,
)
from roll_batching.planning.search_budget import SEARCH_BUDGET

# Compiled functions get budgets as arguments: numba compiles module values in as constants, and its cache on disk does
# not see that a value in another file has changed.


def level_totals(search: SearchState, ceilings: Ints, cap: int, floor: int, iterations: int, seed: int) -> None:
    """Bring `search` to the smallest largest rank total found.

    No pack at index k gets above `ceilings[k]` (int64[K]), which bounds the lockstep cost; none gets above `cap`
    tokens. Stops where no total is above `floor`, or after `iterations` steps.
    """
    budget = SEARCH_BUDGET
    divisor = budget.totals_threshold_divisors[seed % len(budget.totals_threshold_divisors)]
    unit_steps = budget.steps_per_threshold - budget.totals_pack_steps
    steps = (iterations, unit_steps, budget.totals_pack_steps)
    best_packs, best_table = search.pack_of.copy(), search.table.copy()
    if not _level_totals(search, ceilings, cap, floor, steps, divisor, seed, best_packs, best_table):
        restore(search, best_packs, best_table)


def lower_lockstep(search: SearchState, bound: int, cap: int, floor: int, iterations: int, seed: int) -> None:
    """Bring `search` to the smallest lockstep cost found.

    `cap` is the most tokens of a pack. `bound` is the largest rank total wanted: a total may stay or get above it only
    where the exchange does not raise the larger total of its two ranks. Units with a home stay on that rank. Stops
    where the lockstep cost is at most `floor`, or after `iterations` steps.
    """
    budget = SEARCH_BUDGET
    divisor = budget.lockstep_threshold_divisor + budget.lockstep_threshold_per_index * search.table.shape[1]
    unit_steps = budget.steps_per_threshold - budget.lockstep_pack_steps
    has_home_ranks = bool(search.home[0] >= 0)  # a problem gives all units a home, or none
    steps = (iterations, unit_steps, budget.lockstep_pack_steps)
    best_packs, best_table = search.pack_of.copy(), search.table.copy()
    if not _lower_lockstep(search, bound, cap, floor, steps, divisor, seed, has_home_ranks, best_packs, best_table):
        restore(search, best_packs, best_table)


@compiled
def _level_totals(
    search: SearchState,
    ceilings: Ints,
    cap: int,
    floor: int,
    steps: tuple[int, int, int],
    divisor: int,
    seed: int,
    best_packs: Ints,
    best_table: Ints,
) -> bool:
    """Whether the search ends at its best result; if not, that is in `best_packs` and `best_table`.

    `steps` are those of the whole search and, with one threshold, exchanges of units and of packs.
    """
    iterations, unit_steps, pack_steps = steps
    totals = search.totals
    best = saved = current = totals[_costliest(totals)]
    state = seed_state(seed)
    steps_since_save = 0
    for done in range(0, iterations, unit_steps + pack_steps):
        threshold = falling_threshold(best - floor, divisor, done, iterations)
        state, lowest = _level_by_units(search, ceilings, cap, floor, threshold, unit_steps, state)
        state = _level_by_packs(search, ceilings, floor, threshold, pack_steps, state)
        current = totals[_costliest(totals)]
        best = min(best, lowest, current)
        # A copy costs as much as a step per unit, so it is made after as many steps as there are units at least.
        steps_since_save += unit_steps + pack_steps
        if current < saved and steps_since_save >= len(best_packs):
            saved = current
            steps_since_save = 0
            copy_packs(best_packs, search.pack_of, best_table, search.table)
        if current <= floor:
            break
    return bool(current <= saved)


@compiled
def _level_by_units(
    search: SearchState, ceilings: Ints, cap: int, floor: int, threshold: int, steps: int, state: int
) -> tuple[int, int]:
    """Exchange units between the costliest rank and others; returns state and the smallest largest total on the way."""
    # Unpacked once: reading an array from the state takes as long as a step.
    pack_of, size, cost, seat = search.pack_of, search.size, search.cost, search.seat
    first, members, by_size, position = search.first, search.members, search.by_size, search.position
    load, tokens, totals, table = search.load, search.tokens, search.totals, search.table
    rank_of, index_of = search.rank_of, search.index_of
    top = _costliest(totals)
    lowest = totals[top]
    for _ in range(steps):
        state = next_random(state)
        rank = draw(state, len(totals)) if state % 4 == 0 else top
        state = next_random(state)
        index = draw(state, table.shape[1])
        pack = table[rank, index]
        state = next_random(state)
        unit = members[first[pack] + draw(state, first[pack + 1] - first[pack])]
        choice = state % 32
        state = next_random(state)
        if choice < 4:
            other = draw(state, len(by_size))
        else:
            place = neighbour(position[unit], choice, state)
            if place < 0 or place >= len(by_size):
                continue
            other = by_size[place]
        other_pack = pack_of[other]
        if other_pack == pack or not fits(tokens[pack], tokens[other_pack], size[other] - size[unit], cap):
            continue
        change = cost[unit] - cost[other]
        if load[pack] - change > ceilings[index] or load[other_pack] + change > ceilings[index_of[other_pack]]:
            continue
        other_rank = rank_of[other_pack]
        if other_rank != rank and excess(totals, rank, other_rank, change, floor) > threshold:
            continue
        exchange_units(pack_of, size, cost, members, seat, load, tokens, unit, other)
        totals[rank] -= change
        totals[other_rank] += change
        if other_rank != rank:
            top = _costliest_after(totals, top, rank, other_rank)
            lowest = min(lowest, totals[top])
            if lowest <= floor:
                break
    return state, lowest


@compiled
def _level_by_packs(search: SearchState, ceilings: Ints, floor: int, threshold: int, steps: int, state: int) -> int:
    """Exchange whole packs of the costliest rank, half of them at one index; returns the generator's state."""
    load, totals, table = search.load, search.totals, search.table
    rank_of, index_of = search.rank_of, search.index_of
    top = _costliest(totals)
    for _ in range(steps):
        state = next_random(state)
        index = other_index = draw(state, table.shape[1])
        state = next_random(state)
        other_rank = draw(state, len(totals))
        if state % 2:
            state = next_random(state)
            other_index = draw(state, table.shape[1])
        pack, other = table[top, index], table[other_rank, other_index]
        if other_rank == top or load[pack] > ceilings[other_index] or load[other] > ceilings[index]:
            continue
        if excess(totals, top, other_rank, load[pack] - load[other], floor) > threshold:
            continue
        exchange_packs(table, rank_of, index_of, load, totals, pack, other)
        top = _costliest(totals)
    return state


@compiled
def _costliest(totals: Ints) -> int:
    """Rank with the largest total, the first of equals."""
    top = 0
    for rank in range(len(totals)):
        if totals[rank] > totals[top]:
            top = rank
    return top


@compiled
def _costliest_after(totals: Ints, top: int, rank: int, other: int) -> int:
    """Rank with the largest total after `rank` and `other` have changed, given `top` before."""
    if rank == top or other == top:
        return _costliest(totals)
    costlier = rank if totals[rank] > totals[other] else other
    return costlier if totals[costlier] > totals[top] else top


@compiled
def _lower_lockstep(
    search: SearchState,
    bound: int,
    cap: int,
    floor: int,
    steps: tuple[int, int, int],
    divisor: int,
    seed: int,
    has_home_ranks: bool,
    best_packs: Ints,
    best_table: Ints,
) -> bool:
    """Lowers the lockstep cost by exchanges; see `_level_totals`."""
    iterations, unit_steps, pack_steps = steps
    count = search.table.shape[1]
    top = np.empty(count, dtype=np.int64)
    second = np.empty(count, dtype=np.int64)
    current = 0
    for index in range(count):
        current += _order_index(search.table, search.load, top, second, index)
    best = saved = current
    state = seed_state(seed)
    steps_since_save = 0
    for done in range(0, iterations, unit_steps + pack_steps):
        if current <= floor:
            break
        threshold = falling_threshold(best - floor, divisor, done, iterations)
        state, growth = _lower_by_units(search, top, second, bound, cap, threshold, unit_steps, state)
        current += growth
        best = min(best, current)
        if not has_home_ranks:
            state = _shuffle_packs(search, bound, pack_steps, state)
        steps_since_save += unit_steps + pack_steps
        if current < saved and steps_since_save >= len(best_packs):
            saved = current
            steps_since_save = 0
            copy_packs(best_packs, search.pack_of, best_table, search.table)
    return bool(current <= saved)


@compiled
def _lower_by_units(
    search: SearchState, top: Ints, second: Ints, bound: int, cap: int, threshold: int, steps: int, state: int
) -> tuple[int, int]:
    """Exchange units between the costliest pack of an index and others; returns state and growth of the cost.

    `top` (int64[K]) is the costliest pack of each index, `second` (int64[K]) the second largest cost.
    """
    # Unpacked once: reading an array from the state takes as long as a step.
    pack_of, size, cost, home, seat = search.pack_of, search.size, search.cost, search.home, search.seat
    first, members, by_size, position = search.first, search.members, search.by_size, search.position
    load, tokens, totals, table = search.load, search.tokens, search.totals, search.table
    rank_of, index_of = search.rank_of, search.index_of
    total_growth = 0
    for _ in range(steps):
        state = next_random(state)
        index = draw(state, table.shape[1])
        pack = top[index]
        if state % 4 == 0:
            state = next_random(state)
            pack = table[draw(state, len(totals)), index]
        state = next_random(state)
        unit = members[first[pack] + draw(state, first[pack + 1] - first[pack])]
        choice = state % 32
        state = next_random(state)
        if choice < 4:
            other = draw(state, len(by_size))
        else:
            place = neighbour(position[unit], choice, state)
            if place < 0 or place >= len(by_size):
                continue
            other = by_size[place]
        other_pack = pack_of[other]
        if other_pack == pack or not fits(tokens[pack], tokens[other_pack], size[other] - size[unit], cap):
            continue
        if home[unit] != home[other]:
            continue
        change = cost[unit] - cost[other]
        rank, other_rank = rank_of[pack], rank_of[other_pack]
        if rank != other_rank and excess(totals, rank, other_rank, change, bound) > 0:
            continue
        other_index = index_of[other_pack]
        growth = _growth(table, load, top, second, index, other_index, pack, other_pack, change)
        if growth > threshold:
            continue
        exchange_units(pack_of, size, cost, members, seat, load, tokens, unit, other)
        totals[rank] -= change
        totals[other_rank] += change
        if _changes_order(load, top, second, index, pack, load[pack] + change):
            _order_index(table, load, top, second, index)
        if _changes_order(load, top, second, other_index, other_pack, load[other_pack] - change):
            _order_index(table, load, top, second, other_index)
        total_growth += growth
    return state, total_growth


@compiled
def _shuffle_packs(search: SearchState, bound: int, steps: int, state: int) -> int:
    """Exchange packs of two ranks at one index, which changes rank totals only; returns the generator's state."""
    load, totals, table = search.load, search.totals, search.table
    rank_of, index_of = search.rank_of, search.index_of
    for _ in range(steps):
        state = next_random(state)
        index = draw(state, table.shape[1])
        state = next_random(state)
        rank = draw(state, len(totals))
        state = next_random(state)
        other_rank = draw(state, len(totals))
        pack, other = table[rank, index], table[other_rank, index]
        change = load[pack] - load[other]
        if rank == other_rank or excess(totals, rank, other_rank, change, bound) > 0:
            continue
        exchange_packs(table, rank_of, index_of, load, totals, pack, other)
    return state


@compiled
def _order_index(table: Ints, load: Ints, top: Ints, second: Ints, index: int) -> int:
    """Update `top` and `second` at `index`; returns the largest cost there."""
    largest, next_largest = -1, 0
    for rank in range(table.shape[0]):
        cost = load[table[rank, index]]
        if cost > largest:
            next_largest = max(largest, 0)
            largest = cost
            top[index] = table[rank, index]
        elif cost > next_largest:
            next_largest = cost
    second[index] = next_largest
    return largest


@compiled
def _changes_order(load: Ints, top: Ints, second: Ints, index: int, pack: int, before: int) -> bool:
    """Whether `top` or `second` may be outdated at `index`, where `pack` had the cost `before`."""
    if pack == top[index]:
        return bool(load[pack] < second[index])
    return bool(before == second[index] or load[pack] > second[index])


@compiled
def _growth(
    table: Ints,
    load: Ints,
    top: Ints,
    second: Ints,
    index: int,
    other_index: int,
    pack: int,
    other_pack: int,
    change: int,
) -> int:
    """Growth of the lockstep cost if cost `change` goes from one pack to the other."""
    less, more = load[pack] - change, load[other_pack] + change
    if index == other_index:
        return int(max(_largest_except(table, load, index, pack, other_pack), less, more) - load[top[index]])
    largest = max(second[index] if top[index] == pack else load[top[index]], less)
    other_largest = max(second[other_index] if top[other_index] == other_pack else load[top[other_index]], more)
    return int(largest - load[top[index]] + other_largest - load[top[other_index]])


@compiled
def _largest_except(table: Ints, load: Ints, index: int, first: int, second: int) -> int:
    """Largest cost at `index` without two packs."""
    largest = 0
    for rank in range(table.shape[0]):
        pack = table[rank, index]
        if pack != first and pack != second and load[pack] > largest:
            largest = load[pack]
    return largest
