"""Refinement after a search: the best one or two exchanges between two ranks, or between two packs.

A random search gets as close to its lower bound as its steps allow. The sums of two exchanges are as many as the square
of the exchanges, and in sorted order the best sum is found directly: this closes the last millionth of the gap.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.load_balance.search_state import SearchState, exchange_units, lockstep_cost
from roll_batching.planning.search_budget import SEARCH_BUDGET


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
