"""The last part in a million: exchanges of near-equal units, two at a time, between few ranks.

A search by chance comes as near as the number of its steps allows; the sums of two exchanges are as many as the square
of the exchanges, and sorted they are searched at once.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.load_balance.search_state import SearchState, exchange

FEW_RANKS = 4
"""With more, no exchange between two ranks lowers the largest total by much."""
NEIGHBOURS = 16
MOST_EXCHANGES = 16_384
"""Exchanges looked at: each unit of the costliest rank with so many neighbours in size, up to this many in all."""
ROUNDS = 8


def settle_totals(search: SearchState, ceilings: Ints, cap: int, floor: int) -> None:
    """Exchanges one or two pairs of units of the costliest and the cheapest rank, while that levels them.

    `ceilings`, `cap` and `floor` are those of `level_totals`.
    """
    if len(search.totals) > FEW_RANKS:
        return
    for _ in range(ROUNDS):
        top, least = int(np.argmax(search.totals)), int(np.argmin(search.totals))
        if search.totals[top] <= floor:
            return
        mine, theirs, change = _exchanges(search, ceilings, cap, top, least)
        if not len(mine):
            return
        target = int(search.totals[top] - search.totals[least]) // 2
        chosen, left = _closest(change, search.pack_of[mine], search.pack_of[theirs], target)
        if left >= target:
            return
        for i in chosen:
            exchange(
                search.pack_of,
                search.size,
                search.cost,
                search.members,
                search.seat,
                search.load,
                search.tokens,
                int(mine[i]),
                int(theirs[i]),
            )
            search.totals[top] -= change[i]
            search.totals[least] += change[i]


def _exchanges(search: SearchState, ceilings: Ints, cap: int, top: int, least: int) -> tuple[Ints, Ints, Ints]:
    """Units of two ranks that can change places, and what that takes off the first; by rising change."""
    ranks = search.rank_of[search.pack_of]
    units = np.flatnonzero(ranks == top)
    reach = max(1, min(NEIGHBOURS, MOST_EXCHANGES // (2 * len(units))))
    places = search.position[units][:, None] + np.delete(np.arange(-reach, reach + 1), reach)
    inside = (places >= 0) & (places < len(ranks))
    mine = np.broadcast_to(units[:, None], places.shape)[inside]
    theirs = search.by_size[places[inside]]
    packs, others = search.pack_of[mine], search.pack_of[theirs]
    change = search.cost[mine] - search.cost[theirs]
    more = search.size[theirs] - search.size[mine]
    able = (ranks[theirs] == least) & (change != 0)
    able &= (search.tokens[packs] + more <= cap) & (search.tokens[others] - more <= cap)
    able &= search.load[packs] - change <= ceilings[search.index_of[packs]]
    able &= search.load[others] + change <= ceilings[search.index_of[others]]
    order = np.flatnonzero(able)[np.argsort(change[able], kind="stable")]
    return mine[order], theirs[order], change[order]


def _closest(change: Ints, packs: Ints, others: Ints, target: int) -> tuple[list[int], int]:
    """The one exchange, or the two of different packs, whose change is nearest to `target`; and how near that is."""
    single = int(np.argmin(np.abs(change - target)))
    best, left = [single], abs(int(change[single]) - target)
    first = np.arange(len(change))
    after = np.searchsorted(change, target - change)
    for second in (after - 1, np.minimum(after, len(change) - 1)):
        apart = (second >= 0) & (packs[first] != packs[second]) & (others[first] != others[second])
        missed = np.where(apart, np.abs(change[first] + change[second] - target), left)
        nearest = int(np.argmin(missed))
        if missed[nearest] < left:
            best, left = [nearest, int(second[nearest])], int(missed[nearest])
    return best, left
