"""Level rank totals: for ranks that meet once per step, whose costliest decides its time.

The costliest rank exchanges units and whole packs with the others.
"""

from __future__ import annotations

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

THRESHOLD_DIVISORS = (16, 4)
"""The first accepted loss is this part of what the costliest rank has above the floor; by turns, from seed to seed."""
STRETCH = 64
"""Steps with one threshold,"""
PACK_STEPS = 8
"""of them exchanges of whole packs."""


def level_totals(search: SearchState, ceilings: Ints, cap: int, floor: int, iterations: int, seed: int) -> None:
    """Brings `search` to the lowest largest total found.

    No pack at index k rises above `ceilings[k]` (int64[K]), so that these bound the lockstep cost; none rises
    above `cap` tokens. The search ends where no total is above `floor`, or after `iterations` steps.
    """
    best_packs, best_table = search.pack_of.copy(), search.table.copy()
    if not _level_totals(search, ceilings, cap, floor, iterations, seed, best_packs, best_table):
        restore(search, best_packs, best_table)


@compiled
def _level_totals(
    search: SearchState,
    ceilings: Ints,
    cap: int,
    floor: int,
    iterations: int,
    seed: int,
    best_packs: Ints,
    best_table: Ints,
) -> bool:
    """Whether the search ends at its best; otherwise that is in `best_packs` and `best_table`."""
    totals = search.totals
    best = kept = current = totals[_costliest(totals)]
    state = seed_state(seed)
    divisor = THRESHOLD_DIVISORS[seed % len(THRESHOLD_DIVISORS)]
    unkept = 0
    for done in range(0, iterations, STRETCH):
        accepted = falling_threshold(best - floor, divisor, done, iterations)
        state, lowest = _exchange_units(search, ceilings, cap, floor, accepted, state)
        state = _exchange_packs(search, ceilings, floor, accepted, state)
        current = totals[_costliest(totals)]
        best = min(best, lowest, current)
        unkept += STRETCH
        if current < kept and unkept >= len(best_packs):
            kept = current
            unkept = 0
            keep(best_packs, search.pack_of, best_table, search.table)
        if current <= floor:
            break
    return bool(current <= kept)


@compiled
def _exchange_units(
    search: SearchState, ceilings: Ints, cap: int, floor: int, accepted: int, state: int
) -> tuple[int, int]:
    """Steps that exchange units; the generator's state and the lowest largest total on the way."""
    # What every step reads is unpacked once, and a step calls nothing that takes many arrays: both cost more than it.
    pack_of, size, cost, seat = search.pack_of, search.size, search.cost, search.seat
    first, members, by_size, position = search.first, search.members, search.by_size, search.position
    load, tokens, totals, table = search.load, search.tokens, search.totals, search.table
    rank_of, index_of = search.rank_of, search.index_of
    top = _costliest(totals)
    lowest = totals[top]
    for _ in range(STRETCH - PACK_STEPS):
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
        more = size[other] - size[unit]
        if other_pack == pack or tokens[pack] + more > cap and more > 0:
            continue
        if tokens[other_pack] - more > cap and more < 0:
            continue
        change = cost[unit] - cost[other]
        if load[pack] - change > ceilings[index] or load[other_pack] + change > ceilings[index_of[other_pack]]:
            continue
        other_rank = rank_of[other_pack]
        if other_rank != rank and _rise(totals, rank, other_rank, change, floor) > accepted:
            continue
        exchange(pack_of, size, cost, members, seat, load, tokens, unit, other)
        totals[rank] -= change
        totals[other_rank] += change
        if other_rank != rank:
            top = _top_after(totals, top, rank, other_rank)
            lowest = min(lowest, totals[top])
            if lowest <= floor:
                break
    return state, lowest


@compiled
def _exchange_packs(search: SearchState, ceilings: Ints, floor: int, accepted: int, state: int) -> int:
    """Steps that exchange whole packs of the costliest rank; the generator's state."""
    load, totals, table = search.load, search.totals, search.table
    rank_of, index_of = search.rank_of, search.index_of
    top = _costliest(totals)
    for _ in range(PACK_STEPS):
        state = next_random(state)
        index = other_index = draw(state, table.shape[1])
        state = next_random(state)
        other_rank = draw(state, len(totals))
        if state % 2:
            state = next_random(state)
            other_index = draw(state, table.shape[1])
        pack, other = table[top, index], table[other_rank, other_index]
        change = load[pack] - load[other]
        if other_rank == top or load[pack] > ceilings[other_index] or load[other] > ceilings[index]:
            continue
        if _rise(totals, top, other_rank, change, floor) > accepted:
            continue
        table[top, index], table[other_rank, other_index] = other, pack
        rank_of[pack], index_of[pack] = other_rank, other_index
        rank_of[other], index_of[other] = top, index
        totals[top] -= change
        totals[other_rank] += change
        top = _costliest(totals)
    return state


@compiled
def _rise(totals: Ints, rank: int, other: int, change: int, floor: int) -> int:
    """By how much the larger of two totals, or the floor, is exceeded when `change` goes to the other rank."""
    before = max(totals[rank], totals[other], floor)
    return int(max(totals[rank] - change, totals[other] + change) - before)


@compiled
def _costliest(totals: Ints) -> int:
    top = 0
    for rank in range(len(totals)):
        if totals[rank] > totals[top]:
            top = rank
    return top


@compiled
def _top_after(totals: Ints, top: int, rank: int, other: int) -> int:
    """The costliest rank after two have changed, given the one before."""
    if rank == top or other == top:
        return _costliest(totals)
    costlier = rank if totals[rank] > totals[other] else other
    return costlier if totals[costlier] > totals[top] else top
