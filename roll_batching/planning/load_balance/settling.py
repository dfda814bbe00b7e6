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
ROUNDS = 12
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
        if not able.make(search, int(search.totals[top] - search.totals[least]) // 2, cap):
            break
    return not _is_near(int(search.totals.max()), floor)


def settle_columns(search: SearchState, cap: int, floor: int) -> bool:
    """The same of the costliest pack at every index and the cheapest one that helps."""
    if search.table.size > FEW_PACKS:
        return True
    for _ in range(ROUNDS):
        if not _is_near(lockstep_cost(search), floor):
            return True
        made = False
        for packs in search.table.T:
            costs = search.load[packs]
            *others, top = np.argsort(costs, kind="stable").tolist()
            for other in others:
                able = _Exchanges.between(search, search.pack_of, int(packs[top]), int(packs[other]), cap)
                if able.make(search, int(costs[top] - costs[other]) // 2, cap):
                    made = True
                    break
        if not made:
            break
    return not _is_near(lockstep_cost(search), floor)


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

    def make(self, search: SearchState, target: int, cap: int) -> bool:
        """Makes the one or the two whose change is nearest to `target`; whether any is nearer than none."""
        if not len(self.change) or target <= 0:
            return False
        chosen, left = self._closest(search, target, cap)
        if left >= target:
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

    def _closest(self, search: SearchState, target: int, cap: int) -> tuple[list[int], int]:
        """The exchanges whose change is nearest to `target`, and how near that is."""
        change = self.change
        single = int(np.argmin(np.abs(change - target)))
        best, left = [single], abs(int(change[single]) - target)
        after = np.searchsorted(change, target - change)
        for second in (after - 1, np.minimum(after, len(change) - 1)):
            both = self.more + self.more[second]
            apart = (second >= 0) & (self.mine != self.mine[second]) & (self.theirs != self.theirs[second])
            apart &= (self.packs != self.packs[second]) | (search.tokens[self.packs] + both <= cap)
            apart &= (self.others != self.others[second]) | (search.tokens[self.others] - both <= cap)
            missed = np.where(apart, np.abs(change + change[second] - target), left)
            nearest = int(np.argmin(missed))
            if missed[nearest] < left:
                best, left = [nearest, int(second[nearest])], int(missed[nearest])
        return best, left
