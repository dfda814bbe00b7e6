"""What the searches change: which unit is in which pack, and which rank computes which pack when.

A step exchanges two units of different packs; each pack also holds some empty units, so that an exchange with
one of them is a move. Most candidates are neighbours in the order of sizes: in nearly full packs only units of
like size can change places.

A loss is accepted up to a threshold that falls to zero (threshold accepting: G. Dueck and T. Scheuer, Journal
of Computational Physics 90, 1990). It is a part of what is left to win, so that a search close to its bound is
careful, and needs integers only, so that the result is the same on every machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.compiled import compiled, draw
from roll_batching.planning.problem import Units

EMPTY_UNITS = 2
"""Empty units per pack: how many moves into a pack can follow each other."""


class SearchState(NamedTuple):
    """Units in packs, packs at their rank and index: int64 arrays that a search changes in place."""

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
    table: Ints
    """[dp, K]: the pack of every rank and index."""
    rank_of: Ints
    index_of: Ints
    """The rank and the index of every pack."""
    totals: Ints
    """The cost of every rank."""


def begin_search(place: Ints, table: Ints, units: Units) -> SearchState:
    """The state for units in packs (`place`, int64[n], values 0 to dp*K - 1) and packs in `table` (int64[dp, K])."""
    packs = table.size
    empty = np.repeat(np.arange(packs), EMPTY_UNITS)
    nothing = np.zeros(len(empty), dtype=np.int64)
    size, cost = np.concatenate([units.slots, nothing]), np.concatenate([units.costs, nothing])
    at_home = bool(units.home[0] >= 0)
    rank_of = _inverse(table.reshape(-1)) // table.shape[1]
    home = np.concatenate([units.home, rank_of[empty] if at_home else nothing - 1])
    return _state_of(np.concatenate([place, empty]), table.copy(), size, cost, home)


def restore(search: SearchState, pack_of: Ints, table: Ints) -> None:
    """Brings `search` to these packs of all units, the empty ones too, and this table."""
    state = _state_of(pack_of, table, search.size, search.cost, search.home)
    for mine, theirs in zip(search, state, strict=True):
        mine[...] = theirs


def _state_of(pack_of: Ints, table: Ints, size: Ints, cost: Ints, home: Ints) -> SearchState:
    packs = table.size
    where = _inverse(table.reshape(-1))
    members = np.argsort(pack_of, kind="stable")
    by_size = np.argsort((home + 1) * (size.max() + 1) + size, kind="stable")
    load = np.bincount(pack_of, weights=cost, minlength=packs).astype(np.int64)
    return SearchState(
        pack_of=pack_of,
        size=size,
        cost=cost,
        home=home,
        first=offsets_of(np.bincount(pack_of, minlength=packs)),
        members=members,
        seat=_inverse(members),
        by_size=by_size,
        position=_inverse(by_size),
        load=load,
        tokens=np.bincount(pack_of, weights=size, minlength=packs).astype(np.int64),
        table=table,
        rank_of=where // table.shape[1],
        index_of=where % table.shape[1],
        totals=load[table].sum(axis=1),
    )


def pack_costs(place: Ints, units: Units, packs: int) -> Ints:
    """Cost of every pack; the float sums are exact, since all costs together stay below 2^53."""
    return np.bincount(place, weights=units.costs, minlength=packs).astype(np.int64)


def lockstep_cost(search: SearchState) -> int:
    """The sum over indices of the largest cost among the ranks."""
    return int(search.load[search.table].max(axis=0).sum())


def _inverse(order: Ints) -> Ints:
    """Where each index stands in a permutation."""
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position


@compiled
def neighbour(place: int, choice: int, state: int) -> int:
    """A place among 4, 16, 64 or 256 neighbours to either side, by `choice`; it may lie outside."""
    reach = 4 << (choice % 4 * 2)
    return place + draw(state, 2 * reach + 1) - reach


@compiled
def exchange(
    pack_of: Ints, size: Ints, cost: Ints, members: Ints, seat: Ints, load: Ints, tokens: Ints, unit: int, other: int
) -> None:
    """Two units change packs; the totals of ranks are the caller's."""
    pack, other_pack = pack_of[unit], pack_of[other]
    moved = size[unit] - size[other]
    change = cost[unit] - cost[other]
    load[pack] -= change
    load[other_pack] += change
    tokens[pack] -= moved
    tokens[other_pack] += moved
    pack_of[unit] = other_pack
    pack_of[other] = pack
    seat_of_unit, seat_of_other = seat[unit], seat[other]
    members[seat_of_unit] = other
    members[seat_of_other] = unit
    seat[unit] = seat_of_other
    seat[other] = seat_of_unit


@compiled
def falling_threshold(gap: int, divisor: int, done: int, iterations: int) -> int:
    """The accepted loss after `done` steps: from `gap` / `divisor` to zero, as the square of what is left."""
    left = (iterations - done) * 1024 // iterations
    return gap // divisor * left // 1024 * left // 1024


@compiled
def keep(best_packs: Ints, pack_of: Ints, best_table: Ints, table: Ints) -> None:
    """Copies the packs of units and the table."""
    for unit in range(len(pack_of)):
        best_packs[unit] = pack_of[unit]
    for rank in range(table.shape[0]):
        for index in range(table.shape[1]):
            best_table[rank, index] = table[rank, index]
