"""Lower the lockstep cost: the sum over indices k of the largest cost among the ranks at k.

The costliest pack of an index exchanges units with the others, while no rank's total rises above a bound.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled, draw, next_random, seed_state
from roll_batching.planning.load_balance.search_state import (
    SearchState,
    exchange,
    falling_threshold,
    keep,
    neighbour,
    restore,
)

THRESHOLD_DIVISOR = 64
THRESHOLD_PER_INDEX = 8
"""The first accepted loss is the part 1 / (64 + 8 K) of what the lockstep cost is above the floor."""
STRETCH = 64
"""Steps with one threshold,"""
PACK_STEPS = 4
"""of them exchanges of whole packs."""


def lower_columns(search: SearchState, bound: int, cap: int, floor: int, iterations: int, seed: int) -> None:
    """Brings `search` to the least lockstep cost found.

    A rank's total rises above `bound` in exchange with a costlier rank only. Units with a home stay there. The
    search ends where the lockstep cost is at most `floor`, or after `iterations` steps.
    """
    best_packs, best_table = search.pack_of.copy(), search.table.copy()
    at_home = bool(search.home[0] >= 0)
    if not _lower_columns(search, bound, cap, floor, iterations, seed, at_home, best_packs, best_table):
        restore(search, best_packs, best_table)


@compiled
def _lower_columns(
    search: SearchState,
    bound: int,
    cap: int,
    floor: int,
    iterations: int,
    seed: int,
    at_home: bool,
    best_packs: Ints,
    best_table: Ints,
) -> bool:
    """Whether the search ends at its best; otherwise that is in `best_packs` and `best_table`."""
    count = search.table.shape[1]
    top = np.empty(count, dtype=np.int64)
    second = np.empty(count, dtype=np.int64)
    current = 0
    for index in range(count):
        current += _order_column(search.table, search.load, top, second, index)
    best = kept = current
    divisor = THRESHOLD_DIVISOR + THRESHOLD_PER_INDEX * count
    state = seed_state(seed)
    unkept = 0
    for done in range(0, iterations, STRETCH):
        if current <= floor:
            break
        accepted = falling_threshold(best - floor, divisor, done, iterations)
        state, longer = _exchange_units(search, top, second, bound, cap, accepted, state)
        current += longer
        best = min(best, current)
        if not at_home:
            state = _exchange_packs(search, bound, state)
        unkept += STRETCH
        if current < kept and unkept >= len(best_packs):
            kept = current
            unkept = 0
            keep(best_packs, search.pack_of, best_table, search.table)
    return bool(current <= kept)


@compiled
def _exchange_units(
    search: SearchState, top: Ints, second: Ints, bound: int, cap: int, accepted: int, state: int
) -> tuple[int, int]:
    """Steps that exchange units; the generator's state and by how much the lockstep cost has grown."""
    # What every step reads is unpacked once, and a step calls nothing that takes many arrays: both cost more than it.
    pack_of, size, cost, seat = search.pack_of, search.size, search.cost, search.seat
    first, members, by_size, position = search.first, search.members, search.by_size, search.position
    load, tokens, totals, table = search.load, search.tokens, search.totals, search.table
    rank_of, index_of, home = search.rank_of, search.index_of, search.home
    grown = 0
    for _ in range(STRETCH - PACK_STEPS):
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
        more = size[other] - size[unit]
        if other_pack == pack or tokens[pack] + more > cap and more > 0:
            continue
        if tokens[other_pack] - more > cap and more < 0 or home[unit] != home[other]:
            continue
        change = cost[unit] - cost[other]
        rank, other_rank = rank_of[pack], rank_of[other_pack]
        if rank != other_rank and _rises(totals, rank, other_rank, change, bound):
            continue
        other_index = index_of[other_pack]
        longer = _longer(table, load, top, second, index, other_index, pack, other_pack, change)
        if longer > accepted:
            continue
        exchange(pack_of, size, cost, members, seat, load, tokens, unit, other)
        totals[rank] -= change
        totals[other_rank] += change
        if _changes_order(load, top, second, index, pack, load[pack] + change):
            _order_column(table, load, top, second, index)
        if _changes_order(load, top, second, other_index, other_pack, load[other_pack] - change):
            _order_column(table, load, top, second, other_index)
        grown += longer
    return state, grown


@compiled
def _exchange_packs(search: SearchState, bound: int, state: int) -> int:
    """Steps in which two ranks exchange their packs at one index: totals change alone; the generator's state."""
    load, totals, table, rank_of = search.load, search.totals, search.table, search.rank_of
    for _ in range(PACK_STEPS):
        state = next_random(state)
        index = draw(state, table.shape[1])
        state = next_random(state)
        rank = draw(state, len(totals))
        state = next_random(state)
        other_rank = draw(state, len(totals))
        pack, other = table[rank, index], table[other_rank, index]
        change = load[pack] - load[other]
        if rank == other_rank or _rises(totals, rank, other_rank, change, bound):
            continue
        table[rank, index], table[other_rank, index] = other, pack
        rank_of[pack], rank_of[other] = other_rank, rank
        totals[rank] -= change
        totals[other_rank] += change
    return state


@compiled
def _order_column(table: Ints, load: Ints, top: Ints, second: Ints, index: int) -> int:
    """Writes the costliest pack at `index` to `top` and the cost of the next to `second`; returns the largest cost."""
    most, next_most = -1, 0
    for rank in range(table.shape[0]):
        cost = load[table[rank, index]]
        if cost > most:
            next_most = max(most, 0)
            most = cost
            top[index] = table[rank, index]
        elif cost > next_most:
            next_most = cost
    second[index] = next_most
    return most


@compiled
def _changes_order(load: Ints, top: Ints, second: Ints, index: int, pack: int, before: int) -> bool:
    """Whether the costliest or the next may be others at `index`, after `pack` has cost `before`."""
    if pack == top[index]:
        return bool(load[pack] < second[index])
    return bool(before == second[index] or load[pack] > second[index])


@compiled
def _longer(
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
    """How much the lockstep cost grows when `change` goes from one pack to the other."""
    less, more = load[pack] - change, load[other_pack] + change
    if index == other_index:
        return int(max(_longest_but(table, load, index, pack, other_pack), less, more) - load[top[index]])
    longest = max(second[index] if top[index] == pack else load[top[index]], less)
    other_longest = max(second[other_index] if top[other_index] == other_pack else load[top[other_index]], more)
    return int(longest - load[top[index]] + other_longest - load[top[other_index]])


@compiled
def _longest_but(table: Ints, load: Ints, index: int, first: int, second: int) -> int:
    """The largest cost at `index` apart from two packs."""
    most = 0
    for rank in range(table.shape[0]):
        pack = table[rank, index]
        if pack != first and pack != second and load[pack] > most:
            most = load[pack]
    return most


@compiled
def _rises(totals: Ints, rank: int, other_rank: int, change: int, bound: int) -> bool:
    """Whether a total gets above `bound`, and above both as they are, when `change` goes to the other rank."""
    most = max(totals[rank] - change, totals[other_rank] + change)
    return bool(most > bound and most > max(totals[rank], totals[other_rank]))
