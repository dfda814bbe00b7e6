"""The last part in a million: exchanges of near-equal units, two at a time, between few ranks.

A search by chance comes as near as the number of its steps allows; the sums of two exchanges are as many as the square
of the exchanges, and sorted they are searched at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.load_balance.search_state import SearchState, exchange, lockstep_cost

FEW_RANKS = 8
"""With more, no exchange between two ranks lowers the largest total by much."""
FEW_PACKS = 64
"""Indices are settled one by one; many packs are level in sum without it."""
MOST_EXCHANGES = 8_192
"""Exchanges looked at: each unit of the costlier side with so many neighbours in size that there are this many."""
ROUNDS, COLUMN_ROUNDS = 12, 40
MOST_PARTNERS = 8
"""Packs that the costliest one of an index tries to exchange with."""
NEAR = 1_000
"""What is further from its floor than this part of it is not for one or two exchanges to mend."""


def settle_totals(search: SearchState, ceilings: Ints, cap: int, floor: int) -> bool:
    """Exchanges one or two pairs of units of the costliest and the cheapest rank, while that levels them.

    `ceilings`, `cap` and `floor` are those of `level_totals`. Returns whether nothing more is to be settled.
    """
    if len(search.totals) > FEW_RANKS:
        return True
    for _ in range(ROUNDS):
        top, least = int(np.argmax(search.totals)), int(np.argmin(search.totals))
        if not _is_near(int(search.totals[top]), floor):
            return True
        ranks = search.rank_of[search.pack_of]
        able = _Exchanges.between(search, ranks, top, least, cap)
        able = able.those(search.load[able.packs] - able.change <= ceilings[search.index_of[able.packs]])
        able = able.those(search.load[able.others] + able.change <= ceilings[search.index_of[able.others]])
        if not able.make(search, int(search.totals[top] - search.totals[least]), cap):
            break
    return not _is_near(int(search.totals.max()), floor)


def settle_columns(search: SearchState, cap: int, floor: int) -> bool:
    """The same of the costliest pack at every index and one that has room below the costliest at its own."""
    if search.table.size > FEW_PACKS:
        return True
    for _ in range(COLUMN_ROUNDS):
        found = lockstep_cost(search)
        if not _is_near(found, floor):
            return True
        if not any([_lower_top(search, index, found - floor, cap) for index in range(search.table.shape[1])]):
            break
    return not _is_near(lockstep_cost(search), floor)


def _lower_top(search: SearchState, index: int, wanted: int, cap: int) -> bool:
    """Takes up to `wanted` from the costliest pack at `index`; whether any exchange does."""
    costs = search.load[search.table]
    top = int(search.table[np.argmax(costs[:, index]), index])
    room = costs.max(axis=0) - costs
    room[:, index] = np.minimum(room[:, index], 2 * wanted)
    others = search.table.reshape(-1)
    for place in np.argsort(-room.reshape(-1), kind="stable")[:MOST_PARTNERS]:
        able = _Exchanges.between(search, search.pack_of, top, int(others[place]), cap)
        if able.make(search, min(int(room.reshape(-1)[place]), 2 * wanted), cap):
            return True
    return False


def _is_near(found: int, floor: int) -> bool:
    return floor < found <= floor + floor // NEAR


@dataclass(frozen=True)
class _Exchanges:
    """Units of two sides that can change places, and what that takes off the first; int64[n], by rising change."""

    mine: Ints
    theirs: Ints
    packs: Ints
    others: Ints
    more: Ints
    """Tokens that come to the first side."""
    change: Ints

    @classmethod
    def between(cls, search: SearchState, sides: Ints, mine: int, theirs: int, cap: int) -> _Exchanges:
        """All between units of two `sides` (int64[units]) that are near in size, below the cap."""
        units = np.flatnonzero(sides == mine)
        reach = max(1, min(len(sides), MOST_EXCHANGES // (2 * max(len(units), 1))))
        places = search.position[units][:, None] + np.delete(np.arange(-reach, reach + 1), reach)
        inside = (places >= 0) & (places < len(sides))
        first = np.broadcast_to(units[:, None], places.shape)[inside]
        second = search.by_size[places[inside]]
        packs, others = search.pack_of[first], search.pack_of[second]
        change = search.cost[first] - search.cost[second]
        more = search.size[second] - search.size[first]
        able = (sides[second] == theirs) & (change != 0)
        able &= (search.tokens[packs] + more <= cap) & (search.tokens[others] - more <= cap)
        order = np.flatnonzero(able)[np.argsort(change[able], kind="stable")]
        return cls(first[order], second[order], packs[order], others[order], more[order], change[order])

    def those(self, able: Flags) -> _Exchanges:
        """Some of them."""
        return _Exchanges(*(getattr(self, field.name)[able] for field in fields(self)))

    def make(self, search: SearchState, apart: int, cap: int) -> bool:
        """Makes the one or the two whose change is nearest to half of `apart`; whether any is below all of it.

        Two sides that are so far apart are nearer to each other then.
        """
        if not len(self.change) or apart <= 0:
            return False
        chosen, left = self._closest(search, apart, cap)
        if left >= apart:
            return False
        for i in chosen:
            mine, theirs = int(self.mine[i]), int(self.theirs[i])
            exchange(
                search.pack_of,
                search.size,
                search.cost,
                search.members,
                search.seat,
                search.load,
                search.tokens,
                mine,
                theirs,
            )
            search.totals[search.rank_of[self.packs[i]]] -= self.change[i]
            search.totals[search.rank_of[self.others[i]]] += self.change[i]
        return True

    def _closest(self, search: SearchState, apart: int, cap: int) -> tuple[list[int], int]:
        """The exchanges whose change, doubled, is nearest to `apart`, and how near that is."""
        double = 2 * self.change
        single = int(np.argmin(np.abs(double - apart)))
        best, left = [single], abs(int(double[single]) - apart)
        after = np.searchsorted(double, apart - double)
        for second in (after - 1, np.minimum(after, len(double) - 1)):
            both = self.more + self.more[second]
            able = (second >= 0) & (self.mine != self.mine[second]) & (self.theirs != self.theirs[second])
            able &= (self.packs != self.packs[second]) | (search.tokens[self.packs] + both <= cap)
            able &= (self.others != self.others[second]) | (search.tokens[self.others] - both <= cap)
            missed = np.where(able, np.abs(double + double[second] - apart), left)
            nearest = int(np.argmin(missed))
            if missed[nearest] < left:
                best, left = [nearest, int(second[nearest])], int(missed[nearest])
        return best, left
