"""Local search over packs: swaps that lower lockstep cost and rank excess, never above the cap.

The lockstep cost is the sum over indices k of the largest cost among the ranks at k. The rank excess is
what ranks have above a level, in sum. The search lowers a weighted sum of both.

A swap exchanges two units of different packs; each pack also holds some empty units, so that a swap with
one of them is a move. Most candidates are neighbours in the order of sizes: in nearly full packs only units
of like size can change places; one in eight is a unit of any other pack. A loss is accepted up to a
threshold that falls to zero (threshold accepting), so that the search needs integers only and gives the
same result on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.compiled import compiled, draw, next_random, seed_state
from roll_batching.planning.load_balance.columns import (
    assign_ranks,
    column_tops,
    costliest_but,
    excess_above,
    excess_gain,
    sort_columns,
    top_after,
)

EMPTY_UNITS = 2
"""Empty units per pack: how many moves into a pack can follow each other."""


class Aim(NamedTuple):
    """What the search lowers: lockstep cost and rank excess, weighted."""

    column_weight: int
    rank_weight: int
    level: int
    """Cost of a rank from which on it has excess."""


class Limits(NamedTuple):
    """How far the search may go."""

    cap: int
    """Tokens of a pack."""
    iterations: int
    threshold: int
    """The first accepted loss, in weighted cost."""


class _Search(NamedTuple):
    """The state of a search: int64 arrays that its steps change in place."""

    pack_of: Ints
    """The pack of every unit; the empty units come last."""
    size: Ints
    cost: Ints
    home: Ints
    """The rank where a unit must stay, or -1."""
    first: Ints
    """Units of pack p stand in `members[first[p]:first[p + 1]]`."""
    members: Ints
    seat: Ints
    """Where a unit stands in `members`."""
    by_size: Ints
    position: Ints
    """Where a unit stands in `by_size`."""
    load: Ints
    """The cost of every pack."""
    tokens: Ints
    columns: Ints
    """[K, dp]: packs that share an index."""
    column_of: Ints
    rank_of: Ints
    """The rank of every pack."""
    top: Ints
    """The costliest pack of every column."""
    totals: Ints
    """The cost of every rank."""


def swap_units(
    pack_of: Ints,
    columns: Ints,
    rank_of_pack: Ints,
    slots: Ints,
    costs: Ints,
    home: Ints,
    limits: Limits,
    aim: Aim,
    seed: int,
) -> tuple[Ints, Ints, Ints]:
    """Improved packs of all units (int64[n]), the columns (int64[K, dp]) and the ranks of packs (int64[dp*K]).

    `pack_of` (values 0 to dp*K - 1) must be within the cap, apart from packs with a single unit above it; `columns`
    (int64[K, dp]) and `rank_of_pack` are where the search starts. `home` holds each unit's rank or -1 (all or none).
    """
    search = _begin(pack_of, columns, rank_of_pack, slots, costs, home)
    at_home = bool(home[0] >= 0)
    best_energy = _energy(search, aim)
    best, best_columns, best_ranks = pack_of.copy(), columns.copy(), rank_of_pack.copy()
    state = seed_state(seed)
    period = max(4096, 8 * columns.size)
    done = 0
    while done < limits.iterations:
        until = min((done // period + 1) * period, limits.iterations)
        state = _exchange(search, aim, limits, at_home, done, until, state)
        done = until
        energy = _cut_anew(search, aim, at_home)
        if energy < best_energy:
            best_energy = energy
            best[:] = search.pack_of[: len(best)]
            best_columns[:] = search.columns
            best_ranks[:] = search.rank_of
    return best, best_columns, best_ranks


@compiled
def _exchange(search: _Search, aim: Aim, limits: Limits, at_home: bool, begin: int, end: int, state: int) -> int:
    """Steps `begin` to `end - 1` of the search; returns the generator's state."""
    # What every step reads is unpacked once: handing over the whole state would cost more than the step.
    pack_of, size, cost, home = search.pack_of, search.size, search.cost, search.home
    first, members, by_size, position = search.first, search.members, search.by_size, search.position
    load, tokens, totals, rank_of = search.load, search.tokens, search.totals, search.rank_of
    columns, column_of, top = search.columns, search.column_of, search.top
    accepted = limits.threshold * (limits.iterations - begin // 64 * 64) // limits.iterations
    for iteration in range(max(begin, 1), end):
        if iteration % 64 == 0:
            accepted = limits.threshold * (limits.iterations - iteration) // limits.iterations
        state = next_random(state)
        k = draw(state, len(columns))
        kind = state % 16
        if kind == 0 and not at_home:
            state = _exchange_packs(columns, load, totals, rank_of, aim, k, accepted, state)
            continue
        pack = top[k]
        if kind < 5:
            state = next_random(state)
            pack = columns[k, draw(state, len(totals))]
        unit, other, state = _propose(first, members, by_size, position, pack, state)
        if other < 0:
            continue
        other_pack = pack_of[other]
        moved = size[unit] - size[other]
        change = cost[unit] - cost[other]
        if other_pack == pack or change == 0 or home[unit] != home[other]:
            continue
        if moved < 0 and tokens[pack] - moved > limits.cap or moved > 0 and tokens[other_pack] + moved > limits.cap:
            continue
        shorter, top_a, top_b = _evaluate(columns, load, top, column_of, pack, other_pack, change)
        less = excess_gain(totals, aim.level, rank_of[pack], rank_of[other_pack], change)
        if aim.column_weight * shorter + aim.rank_weight * less >= -accepted:
            _commit(search, unit, other, top_a, top_b)
    return state


def _begin(pack_of: Ints, columns: Ints, rank_of_pack: Ints, slots: Ints, costs: Ints, home: Ints) -> _Search:
    count, dp_size = columns.shape
    packs = columns.size
    empty = np.repeat(np.arange(packs), EMPTY_UNITS)
    place = np.concatenate([pack_of, empty])
    nothing = np.zeros(len(empty), dtype=np.int64)
    size, cost = np.concatenate([slots, nothing]), np.concatenate([costs, nothing])
    home_of = np.concatenate([home, empty // count if home[0] >= 0 else nothing - 1])
    load = np.bincount(place, weights=cost, minlength=packs).astype(np.int64)
    tokens = np.bincount(place, weights=size, minlength=packs).astype(np.int64)
    members = np.argsort(place, kind="stable")
    by_size = np.argsort((home_of + 1) * (size.max() + 1) + size, kind="stable")
    columns, rank_of = columns.copy(), rank_of_pack.copy()
    column_of = np.empty(packs, dtype=np.int64)
    column_of[columns] = np.arange(count)[:, None]
    totals = np.bincount(rank_of, weights=load, minlength=dp_size).astype(np.int64)
    return _Search(
        pack_of=place,
        size=size,
        cost=cost,
        home=home_of,
        first=offsets_of(np.bincount(place, minlength=packs)),
        members=members,
        seat=_inverse(members),
        by_size=by_size,
        position=_inverse(by_size),
        load=load,
        tokens=tokens,
        columns=columns,
        column_of=column_of,
        rank_of=rank_of,
        top=column_tops(columns, load),
        totals=totals,
    )


def _inverse(order: Ints) -> Ints:
    """Where each index stands in a permutation."""
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position


def _energy(search: _Search, aim: Aim) -> int:
    lockstep = int(search.load[search.top].sum())
    return aim.column_weight * lockstep + aim.rank_weight * excess_above(search.totals, aim.level)


def _cut_anew(search: _Search, aim: Aim, at_home: bool) -> int:
    """Cuts the packs, whose costs have changed, into columns anew where that is no worse; returns the energy."""
    energy = _energy(search, aim)
    columns, column_of = sort_columns(search.load, len(search.totals), len(search.columns), at_home)
    ranks, totals = assign_ranks(columns, search.load, at_home)
    top = column_tops(columns, search.load)
    lockstep = int(search.load[top].sum())
    new_energy = aim.column_weight * lockstep + aim.rank_weight * excess_above(totals, aim.level)
    if new_energy > energy:
        return energy
    search.columns[:] = columns
    search.column_of[:] = column_of
    search.rank_of[:] = ranks
    search.totals[:] = totals
    search.top[:] = top
    return new_energy


@compiled
def _exchange_packs(
    columns: Ints, load: Ints, totals: Ints, rank_of: Ints, aim: Aim, k: int, accepted: int, state: int
) -> int:
    """Two ranks exchange their packs of column k, which changes totals alone; returns the generator's state."""
    ranks = len(totals)
    state = next_random(state)
    pack_a = columns[k, draw(state, ranks)]
    state = next_random(state)
    pack_b = columns[k, draw(state, ranks)]
    rank_a = rank_of[pack_a]
    rank_b = rank_of[pack_b]
    change = load[pack_a] - load[pack_b]
    if aim.rank_weight * excess_gain(totals, aim.level, rank_a, rank_b, change) >= -accepted:
        totals[rank_a] -= change
        totals[rank_b] += change
        rank_of[pack_a] = rank_b
        rank_of[pack_b] = rank_a
    return state


@compiled
def _propose(first: Ints, members: Ints, by_size: Ints, position: Ints, pack: int, state: int) -> tuple[int, int, int]:
    """A unit of `pack`, one to exchange it with (-1: none), and the generator's state."""
    state = next_random(state)
    unit = members[first[pack] + draw(state, first[pack + 1] - first[pack])]
    choice = state % 32
    state = next_random(state)
    if choice < 4:
        other_pack = draw(state, len(first) - 1)
        state = next_random(state)
        other = members[first[other_pack] + draw(state, first[other_pack + 1] - first[other_pack])]
        return unit, other, state
    reach = 4 << (choice % 4 * 2)  # 4, 16, 64 or 256 neighbours to either side
    p = position[unit] + draw(state, 2 * reach + 1) - reach
    if p < 0 or p >= len(by_size):
        return unit, -1, state
    return unit, by_size[p], state


@compiled
def _evaluate(
    columns: Ints, load: Ints, top: Ints, column_of: Ints, pack_a: int, pack_b: int, change: int
) -> tuple[int, int, int]:
    """How much lockstep cost vanishes when `change` goes from one pack to another, and both columns' tops then."""
    column_a, column_b = column_of[pack_a], column_of[pack_b]
    after_a = load[pack_a] - change
    after_b = load[pack_b] + change
    if column_a != column_b:
        top_a, largest_a = top_after(columns, load, top[column_a], column_a, pack_a, after_a)
        top_b, largest_b = top_after(columns, load, top[column_b], column_b, pack_b, after_b)
        return int(load[top[column_a]] + load[top[column_b]] - largest_a - largest_b), top_a, top_b
    top_a = costliest_but(columns, load, column_a, pack_a, pack_b)
    largest = -1 if top_a < 0 else load[top_a]
    if after_a > largest:
        largest = after_a
        top_a = pack_a
    if after_b > largest:
        largest = after_b
        top_a = pack_b
    return int(load[top[column_a]] - largest), top_a, top_a


@compiled
def _commit(search: _Search, unit: int, other: int, top_a: int, top_b: int) -> None:
    """Makes the exchange."""
    pack_a, pack_b = search.pack_of[unit], search.pack_of[other]
    moved = search.size[unit] - search.size[other]
    change = search.cost[unit] - search.cost[other]
    search.top[search.column_of[pack_a]] = top_a
    search.top[search.column_of[pack_b]] = top_b
    search.totals[search.rank_of[pack_a]] -= change
    search.totals[search.rank_of[pack_b]] += change
    search.load[pack_a] -= change
    search.load[pack_b] += change
    search.tokens[pack_a] -= moved
    search.tokens[pack_b] += moved
    search.pack_of[unit] = pack_b
    search.pack_of[other] = pack_a
    seat_a, seat_b = search.seat[unit], search.seat[other]
    search.members[seat_a] = other
    search.members[seat_b] = unit
    search.seat[unit] = seat_b
    search.seat[other] = seat_a
