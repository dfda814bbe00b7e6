"""State of a search, the moves that all searches share, and the refinement after a search.

A move exchanges two units of different packs. Each pack also holds some empty units, so that an exchange with one of
them moves a unit. Most candidates are neighbours in the order of sizes: in nearly full packs only units of similar size
can be exchanged.

A worse result is accepted up to a threshold that falls to zero (threshold accepting: G. Dueck and T. Scheuer, Journal
of Computational Physics 90, 1990). The threshold is a fraction of the gap to the lower bound, in integers, so that the
result is the same on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from roll_batching.planning.arrays import Flags, Ints, offsets_of
from roll_batching.planning.compiled import compiled, draw
from roll_batching.planning.problem import Units
from roll_batching.planning.search_budget import SEARCH_BUDGET


class SearchState(NamedTuple):
    """Packs of all units, rank and index of all packs: int64 arrays that a search changes in place."""

    pack_of: Ints
    """[units]: pack of each unit; empty units come last."""
    size: Ints
    """[units]: tokens of each unit, aligned."""
    cost: Ints
    """[units]"""
    home: Ints
    """[units]: rank where a unit must stay, or -1."""
    first: Ints
    """[packs + 1]: units of pack p are `members[first[p]:first[p + 1]]`."""
    members: Ints
    """[units]: units by pack."""
    seat: Ints
    """[units]: position of each unit in `members`."""
    by_size: Ints
    """[units]: units by home and size."""
    position: Ints
    """[units]: position of each unit in `by_size`."""
    load: Ints
    """[packs]: cost of each pack."""
    tokens: Ints
    """[packs]: tokens of each pack."""
    table: Ints
    """[dp, K]: pack of each rank and index."""
    rank_of: Ints
    """[packs]: rank of each pack."""
    index_of: Ints
    """[packs]: index of each pack."""
    totals: Ints
    """[dp]: cost of each rank."""


def begin_search(place: Ints, table: Ints, units: Units, empty_units: int) -> SearchState:
    """State for units in packs (`place`, int64[n], values 0 to dp*K - 1) and packs in `table` (int64[dp, K]).

    `empty_units`: units of size 0 that each pack gets. Without any, a search exchanges units and empties no pack.
    """
    packs = table.size
    empty = np.repeat(np.arange(packs), empty_units)
    zeros = np.zeros(len(empty), dtype=np.int64)
    size, cost = np.concatenate([units.slots, zeros]), np.concatenate([units.costs, zeros])
    has_home_ranks = bool(units.home[0] >= 0)
    rank_of = _inverse(table.reshape(-1)) // table.shape[1]
    home = np.concatenate([units.home, rank_of[empty] if has_home_ranks else zeros - 1])
    return _state_of(np.concatenate([place, empty]), table.copy(), size, cost, home)


def restore(search: SearchState, pack_of: Ints, table: Ints) -> None:
    """Set `search` to these packs of all units, empty ones included, and this table."""
    state = _state_of(pack_of, table, search.size, search.cost, search.home)
    for current, restored in zip(search, state, strict=True):
        current[...] = restored


def _state_of(pack_of: Ints, table: Ints, size: Ints, cost: Ints, home: Ints) -> SearchState:
    """The search state of units in packs, with all derived arrays; arguments are fields of `SearchState`."""
    packs = table.size
    cell_of = _inverse(table.reshape(-1))
    members = np.argsort(pack_of, kind="stable")
    # By home first: neighbours in size then mostly share a home, and may be exchanged.
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
        rank_of=cell_of // table.shape[1],
        index_of=cell_of % table.shape[1],
        totals=load[table].sum(axis=1),
    )


def pack_costs(place: Ints, units: Units, packs: int) -> Ints:
    """Cost of each pack, int64[packs].

    The float sums are exact: all costs together stay below 2^53.
    """
    return np.bincount(place, weights=units.costs, minlength=packs).astype(np.int64)


def lockstep_cost(search: SearchState) -> int:
    """Sum over indices of the largest cost among the ranks."""
    return int(search.load[search.table].max(axis=0).sum())


def _inverse(order: Ints) -> Ints:
    """Inverse of a permutation."""
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return position


# Moves take scalars and single arrays, not the state: in each call numba counts references to all 15 arrays of a state,
# which takes several times as long as a move. Even nine arrays cost half as much again where every step passes them, so
# only accepted exchanges do, and searches read the arrays of a draw themselves.


@compiled
def neighbour(place: int, choice: int, state: int) -> int:
    """A place among 4, 16, 64 or 256 neighbours to either side, by `choice`; it may lie outside."""
    reach = 4 << (choice % 4 * 2)
    return place + draw(state, 2 * reach + 1) - reach


@compiled
def fits(tokens: int, other_tokens: int, more: int, cap: int) -> bool:
    """Whether two packs stay below `cap` if `more` tokens go from the other pack to the first.

    A pack above the cap (an oversize unit by itself) may still get smaller.
    """
    if more > 0:
        return bool(tokens + more <= cap)
    return bool(more == 0 or other_tokens - more <= cap)


@compiled
def exchange_units(
    pack_of: Ints, size: Ints, cost: Ints, members: Ints, seat: Ints, load: Ints, tokens: Ints, unit: int, other: int
) -> None:
    """Exchange two units between their packs; the caller changes the totals of ranks."""
    pack, other_pack = pack_of[unit], pack_of[other]
    change = cost[unit] - cost[other]
    moved = size[unit] - size[other]
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
def exchange_packs(table: Ints, rank_of: Ints, index_of: Ints, load: Ints, totals: Ints, pack: int, other: int) -> None:
    """Exchange the ranks and indices of two packs, and change the totals of ranks."""
    rank, index = rank_of[pack], index_of[pack]
    other_rank, other_index = rank_of[other], index_of[other]
    table[rank, index], table[other_rank, other_index] = other, pack
    rank_of[pack], index_of[pack] = other_rank, other_index
    rank_of[other], index_of[other] = rank, index
    change = load[pack] - load[other]
    totals[rank] -= change
    totals[other_rank] += change


@compiled
def excess(totals: Ints, rank: int, other: int, change: int, bound: int) -> int:
    """How far the larger of two totals exceeds its old value and `bound` if `change` goes to the other rank."""
    before = max(totals[rank], totals[other], bound)
    return int(max(totals[rank] - change, totals[other] + change) - before)


@compiled
def falling_threshold(gap: int, divisor: int, done: int, iterations: int) -> int:
    """Accepted loss after `done` steps: from `gap` / `divisor` to zero, as the square of the remaining share."""
    left = (iterations - done) * 1024 // iterations
    return gap // divisor * left // 1024 * left // 1024


@compiled
def copy_packs(best_packs: Ints, pack_of: Ints, best_table: Ints, table: Ints) -> None:
    """Copy the packs of all units and the table."""
    # Loops: a slice assignment takes numba a second to compile.
    for unit in range(len(pack_of)):
        best_packs[unit] = pack_of[unit]
    for rank in range(table.shape[0]):
        for index in range(table.shape[1]):
            best_table[rank, index] = table[rank, index]


# ---- refinement after a search
#
# A random search gets as close to its lower bound as its steps allow. The sums of two exchanges are as many as the
# square of the exchanges, and in sorted order the best sum is found directly: this closes the last millionth of the
# gap.


def refine_totals(search: SearchState, ceilings: Ints, cap: int, floor: int) -> bool:
    """Level the costliest and the cheapest rank by exchanges of one or two pairs of units, while that helps.

    `ceilings`, `cap` and `floor` as in `level_totals`. Returns False where the largest total is still above `floor`
    and near enough for another search to be worth it.
    """
    if len(search.totals) > SEARCH_BUDGET.refine_max_ranks:
        return True
    for _ in range(SEARCH_BUDGET.refine_totals_rounds):
        top, least = int(np.argmax(search.totals)), int(np.argmin(search.totals))
        if not _is_near(int(search.totals[top]), floor):
            return True
        ranks = search.rank_of[search.pack_of]
        candidates = _Exchanges.between(search, ranks, top, least, cap)
        packs, others = candidates.packs, candidates.other_packs
        allowed = search.load[packs] - candidates.change <= ceilings[search.index_of[packs]]
        allowed &= search.load[others] + candidates.change <= ceilings[search.index_of[others]]
        if not candidates.select(allowed).apply_best(search, int(search.totals[top] - search.totals[least]), cap):
            break
    return not _is_near(int(search.totals.max()), floor)


def refine_lockstep(search: SearchState, cap: int, floor: int) -> bool:
    """Lower the costliest pack of each index by exchanges with packs below the costliest of theirs.

    `cap` and `floor` as in `lower_lockstep`. Returns as `refine_totals`.
    """
    if search.table.size > SEARCH_BUDGET.refine_max_packs:
        return True
    for _ in range(SEARCH_BUDGET.refine_lockstep_rounds):
        cost = lockstep_cost(search)
        if not _is_near(cost, floor):
            return True
        if not any([_lower_costliest(search, index, cost - floor, cap) for index in range(search.table.shape[1])]):
            break
    return not _is_near(lockstep_cost(search), floor)


def _lower_costliest(search: SearchState, index: int, gap: int, cap: int) -> bool:
    """Take up to `gap` from the costliest pack at `index`; whether an exchange does."""
    costs = search.load[search.table]
    top = int(search.table[np.argmax(costs[:, index]), index])
    room = costs.max(axis=0) - costs
    room[:, index] = np.minimum(room[:, index], 2 * gap)
    packs, room = search.table.reshape(-1), room.reshape(-1)
    for cell in np.argsort(-room, kind="stable")[: SEARCH_BUDGET.refine_partners]:
        candidates = _Exchanges.between(search, search.pack_of, top, int(packs[cell]), cap)
        if candidates.apply_best(search, min(int(room[cell]), 2 * gap), cap):
            return True
    return False


def _is_near(value: int, floor: int) -> bool:
    """Whether `value` is above `floor`, and near enough for one or two exchanges to close the gap."""
    return floor < value <= floor + floor // SEARCH_BUDGET.refine_gap


@dataclass(frozen=True)
class _Exchanges:
    """Possible exchanges between units of two sides, by rising `change`; all int64[n]."""

    units: Ints
    """Unit of the first side."""
    other_units: Ints
    """Unit of the second side."""
    packs: Ints
    other_packs: Ints
    tokens: Ints
    """Tokens that the first side gains."""
    change: Ints
    """Cost that the first side loses."""

    @classmethod
    def between(cls, search: SearchState, sides: Ints, side: int, other_side: int, cap: int) -> _Exchanges:
        """Exchanges between units near in size that keep all packs below the cap; `sides` is int64[units]."""
        units = np.flatnonzero(sides == side)
        reach = SEARCH_BUDGET.refine_max_exchanges // (2 * max(len(units), 1))
        reach = max(1, min(len(sides), reach))
        places = search.position[units][:, None] + np.delete(np.arange(-reach, reach + 1), reach)
        inside = (places >= 0) & (places < len(sides))
        first = np.broadcast_to(units[:, None], places.shape)[inside]
        second = search.by_size[places[inside]]
        packs, other_packs = search.pack_of[first], search.pack_of[second]
        change = search.cost[first] - search.cost[second]
        tokens = search.size[second] - search.size[first]
        possible = (sides[second] == other_side) & (change != 0)
        possible &= (search.tokens[packs] + tokens <= cap) & (search.tokens[other_packs] - tokens <= cap)
        order = np.flatnonzero(possible)[np.argsort(change[possible], kind="stable")]
        return cls(first[order], second[order], packs[order], other_packs[order], tokens[order], change[order])

    def select(self, mask: Flags) -> _Exchanges:
        """Exchanges where `mask` (bool[n]) is set."""
        return _Exchanges(*(getattr(self, field.name)[mask] for field in fields(self)))

    def apply_best(self, search: SearchState, difference: int, cap: int) -> bool:
        """Apply the one or two exchanges whose change is closest to half of `difference`.

        `difference` is the first side's cost less the second's. Returns False, and changes nothing, where no exchange
        brings the two sides closer to each other.
        """
        if not len(self.change) or difference <= 0:
            return False
        best, remaining = self._closest(search, difference, cap)
        if remaining >= difference:
            return False
        for i in best:
            unit, other = int(self.units[i]), int(self.other_units[i])
            exchange_units(
                search.pack_of,
                search.size,
                search.cost,
                search.members,
                search.seat,
                search.load,
                search.tokens,
                unit,
                other,
            )
            search.totals[search.rank_of[self.packs[i]]] -= self.change[i]
            search.totals[search.rank_of[self.other_packs[i]]] += self.change[i]
        return True

    def _closest(self, search: SearchState, difference: int, cap: int) -> tuple[list[int], int]:
        """The one or two exchanges that leave the smallest difference, and that difference."""
        double = 2 * self.change
        single = int(np.argmin(np.abs(double - difference)))
        best, remaining = [single], abs(int(double[single]) - difference)
        # For each exchange, the two whose sum with it lies next to `difference` on either side.
        after = np.searchsorted(double, difference - double)
        for second in (after - 1, np.minimum(after, len(double) - 1)):
            tokens = self.tokens + self.tokens[second]
            possible = (second >= 0) & (self.units != self.units[second])
            possible &= self.other_units != self.other_units[second]
            possible &= (self.packs != self.packs[second]) | (search.tokens[self.packs] + tokens <= cap)
            possible &= (self.other_packs != self.other_packs[second]) | (
                search.tokens[self.other_packs] - tokens <= cap
            )
            missed = np.where(possible, np.abs(double + double[second] - difference), remaining)
            nearest = int(np.argmin(missed))
            if missed[nearest] < remaining:
                best, remaining = [nearest, int(second[nearest])], int(missed[nearest])
        return best, remaining
