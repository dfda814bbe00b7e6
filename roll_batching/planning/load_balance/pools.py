"""Pools of units that may share packs, and initial placements for a given number of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.compiled import compiled, next_random, seed_state
from roll_batching.planning.packers.items import descending, first_fit
from roll_batching.planning.partition import karmarkar_karp
from roll_batching.planning.problem import PlanProblem
from roll_batching.planning.search_budget import SEARCH_BUDGET


@dataclass(frozen=True)
class Packing:
    """Pack of every unit, and rank and index of every pack."""

    place: Ints
    """int64[n]: pack of each unit, 0 to dp*K - 1."""
    table: Ints
    """int64[dp, K]: pack of each rank and index. The order of indices is not yet that of execution."""


def has_empty_packs(packing: Packing) -> bool:
    """Whether a pack has no unit."""
    return bool(np.bincount(packing.place, minlength=packing.table.size).min() == 0)


def fill_empty_packs(problem: PlanProblem, packing: Packing) -> Packing:
    """Moves units into empty packs, as long as a pack has two: for hosts without fillers.

    An empty pack takes the cheapest unit of the costliest pack on its rank; of another rank where that rank has no pack
    with two units and units may move.
    """
    place, costs = packing.place.copy(), problem.units.costs
    rank_of = np.empty(packing.table.size, dtype=np.int64)
    rank_of[packing.table] = np.arange(len(packing.table))[:, None]
    for empty in np.flatnonzero(np.bincount(place, minlength=packing.table.size) == 0):
        several = np.flatnonzero(np.bincount(place, minlength=packing.table.size) > 1)
        near = several[rank_of[several] == rank_of[empty]]
        donors = near if len(near) or problem.has_home_ranks else several
        if len(donors):
            load = np.bincount(place, weights=costs, minlength=packing.table.size)
            units = np.flatnonzero(place == donors[np.argmax(load[donors])])
            place[units[np.argmin(costs[units])]] = empty
    return Packing(place, packing.table)


def pools_of(problem: PlanProblem) -> list[Pool]:
    """One pool of all units, or one per rank where units have a home."""
    units, dp_size = problem.units, problem.constraints.dp_size
    if not problem.has_home_ranks:
        return [Pool(problem, np.arange(len(units)), dp_size)]
    return [Pool(problem, np.flatnonzero(units.home == rank), 1) for rank in range(dp_size)]


class Pool:
    """Units that may share packs: all of them, or one rank's."""

    def __init__(self, problem: PlanProblem, units: Ints, ranks: int) -> None:
        self.units = units
        self.ranks = ranks
        self.cap = problem.constraints.usable_tokens
        self.seed = problem.constraints.seed
        self.slots = problem.units.slots[units]
        self.costs = problem.units.costs[units]
        self.order = descending(self.slots)
        self.first_fit = first_fit(self.slots, self.order, self.cap)
        self.first_fit_count = -(-(int(self.first_fit.max(initial=-1)) + 1) // ranks)
        self._placed: dict[int, Ints | None] = {}

    def least_count(self) -> int:
        """Lower bound of micro-batches per rank, by tokens and by units above half the cap."""
        oversize = self.slots > self.cap
        fitting = self.slots[~oversize]
        above_half = int((2 * fitting > self.cap).sum())  # no two of them share a pack
        packs = int(oversize.sum()) + max(above_half, -(-int(fitting.sum()) // self.cap))
        return -(-packs // self.ranks)

    def try_place(self, count: int) -> Ints | None:
        """Pack of each unit (int64[n], 0 to ranks * count - 1); None if no placement was found."""
        if count not in self._placed:
            self._placed[count] = self._try_place(count)
        return self._placed[count]

    def _try_place(self, count: int) -> Ints | None:
        """Tries placement by cost, then first-fit-decreasing, then repairing the packs above the cap."""
        packs = count * self.ranks
        if not len(self.units):
            return np.empty(0, dtype=np.int64)
        place, unplaced = cheapest_first(self.slots, self.costs, self.order, np.zeros(packs, np.int64), self.cap)
        if not unplaced:
            return place
        if count >= self.first_fit_count:
            return self.first_fit
        if np.any(self.slots > self.cap):
            return None
        place, overflow = repair_overflow(
            place, self.slots, self.order, packs, self.cap, SEARCH_BUDGET.overflow_steps, self.seed
        )
        return None if overflow else place

    def first_fit_leveled(self, count: int) -> Ints:
        """Packs of first-fit-decreasing, the cheapest of them spread over the packs that it leaves empty.

        All but the last indices stay full. The last ones are level, so that no rank waits there for a full pack.
        """
        spare = count * self.ranks - (int(self.first_fit.max(initial=-1)) + 1)
        if spare <= 0:
            return self.first_fit
        leveled = (spare // self.ranks + 1) * self.ranks
        full = count * self.ranks - leveled
        load = np.bincount(self.first_fit, weights=self.costs, minlength=count * self.ranks)
        position = np.empty(count * self.ranks, dtype=np.int64)
        position[np.argsort(-load, kind="stable")] = np.arange(count * self.ranks)
        place = position[self.first_fit]
        spread = self.order[place[self.order] >= full]
        empty = np.zeros(leveled, dtype=np.int64)
        packs, unplaced = cheapest_first(
            self.slots[spread], self.costs[spread], np.arange(len(spread)), empty, self.cap
        )
        if unplaced:
            return self.first_fit
        place[spread] = full + packs
        return place

    def place_beside_giants(self, count: int, *, level_totals: bool) -> Packing | None:
        """Placement by cost, with full packs at the indices of the costliest units; None if units do not fit."""
        reserved, cells = reserved_costs(self.costs, self.slots, self.ranks, count, self.cap, level_totals=level_totals)
        place, unplaced = cheapest_first(self.slots, self.costs, self.order, reserved, self.cap)
        packs = np.empty(len(cells), dtype=np.int64)
        packs[cells] = np.arange(len(cells))
        return None if unplaced else Packing(place, packs.reshape(count, self.ranks).T)

    def place_by_differencing(self, count: int) -> Ints | None:
        """Pack of each unit, packs of nearly equal cost by largest differencing; None if one is above the cap."""
        place = np.empty(len(self.units), dtype=np.int64)
        for pack, members in enumerate(karmarkar_karp(self.costs, count * self.ranks)):
            place[members] = pack
        tokens = np.bincount(place, weights=self.slots, minlength=count * self.ranks)
        return None if tokens.max(initial=0) > self.cap else place

    def place(self, count: int) -> Ints:
        """Places into a count of micro-batches that has a placement; see `try_place`."""
        place = self.try_place(count)
        assert place is not None
        return place


# ---- initial placements


def reserved_costs(
    costs: Ints, slots: Ints, ranks: int, count: int, cap: int, *, level_totals: bool
) -> tuple[Ints, Ints]:
    """Cost to reserve in each pack, so that packs at the index of a giant (far costlier than a mean pack) are filled.

    An index takes as long as its costliest unit: packs beside a giant cost no time until they cost as much as the
    giant, and leave less for the other indices. All indices without a giant get equal targets. With `level_totals`, the
    rank of a giant gets a smaller target there, by the cost that its giant has above the target of its index. Without
    giants all packs have one target, and nothing is reserved.

    Returns int64[ranks * count], ascending, and the cell that each pack is meant for, `k * ranks + rank`.
    """
    costliest = np.zeros(ranks * count, dtype=np.int64)
    falling = np.sort(costs)[::-1][: len(costliest)]
    costliest[: len(falling)] = falling
    units = costliest.reshape(count, ranks)
    total = int(costs.sum())
    mean = total // ranks
    full = min(total, total * cap // max(int(slots.sum()), 1))
    # Smallest target with which the packs of a rank reach the mean total; the giants of `above` indices exceed it.
    giants = np.minimum(units[:, 0], full)
    giants_before = offsets_of(giants)[:-1]
    above = int(np.count_nonzero(giants_before + giants * np.arange(count, 0, -1) >= mean))
    level = -(-(mean - int(giants[:above].sum())) // (count - above)) if above < count else 0
    level = min(max(level, 0), full)
    by_index = np.minimum(np.maximum(units[:, 0], level), full)
    target = np.repeat(by_index[:, None], ranks, axis=1)
    if level_totals:
        surplus = np.maximum(units - target, 0).sum(axis=0) + max(int(by_index.sum()) - mean, 0)
        for k in range(count - 1, -1, -1):
            if not surplus.any():
                break
            less = np.minimum(target[k], surplus)
            target[k] -= less
            surplus -= less
    cells = np.argsort(-target.reshape(-1), kind="stable")
    return target.max() - target.reshape(-1)[cells], cells


@compiled
def _sift_down(heap: Ints, key: Ints, length: int, start: int) -> None:
    """Restore a heap of packs, smallest (key, pack) on top, after the key at `start` grew."""
    pack = heap[start]
    while True:
        child = 2 * start + 1
        if child >= length:
            break
        right = child + 1
        if right < length and (
            key[heap[right]] < key[heap[child]] or (key[heap[right]] == key[heap[child]] and heap[right] < heap[child])
        ):
            child = right
        below = heap[child]
        if key[below] > key[pack] or (key[below] == key[pack] and below > pack):
            break
        heap[start] = below
        start = child
    heap[start] = pack


@compiled
def _sift_up(heap: Ints, key: Ints, start: int) -> None:
    """Restore a heap of packs after an entry was added at `start`."""
    pack = heap[start]
    while start > 0:
        parent = (start - 1) // 2
        above = heap[parent]
        if key[above] < key[pack] or (key[above] == key[pack] and above < pack):
            break
        heap[start] = above
        start = parent
    heap[start] = pack


@compiled
def cheapest_first(slots: Ints, costs: Ints, order: Ints, reserved: Ints, cap: int) -> tuple[Ints, int]:
    """Place each unit, largest slots first, into the cheapest pack with room: O(n log packs).

    `order` sorts slots descending; `reserved` (int64[packs], ascending) is the cost of each pack while it is empty.
    Returns the pack of each unit (int64[n], -1 where none had room) and the number of units without one. A unit above
    the cap takes an empty pack and closes it.
    """
    count = len(order)
    packs = len(reserved)
    place = np.full(count, -1, dtype=np.int64)
    load = reserved.copy()
    used = np.zeros(packs, dtype=np.int64)
    ready = np.arange(packs)
    ready_length = packs
    # Packs without room for the current unit wait, the emptiest on top, until a unit is small enough.
    waiting = np.empty(packs, dtype=np.int64)
    waiting_length = 0
    unplaced = 0
    for position in range(count):
        unit = order[position]
        size = slots[unit]
        while waiting_length and used[waiting[0]] + size <= cap:
            pack = waiting[0]
            waiting_length -= 1
            if waiting_length:
                waiting[0] = waiting[waiting_length]
                _sift_down(waiting, used, waiting_length, 0)
            ready[ready_length] = pack
            _sift_up(ready, load, ready_length)
            ready_length += 1
        while ready_length:
            pack = ready[0]
            if used[pack] + size <= cap or (size > cap and used[pack] == 0):
                break
            ready_length -= 1
            if ready_length:
                ready[0] = ready[ready_length]
                _sift_down(ready, load, ready_length, 0)
            waiting[waiting_length] = pack
            _sift_up(waiting, used, waiting_length)
            waiting_length += 1
        if not ready_length:
            unplaced += 1
            continue
        pack = ready[0]
        place[unit] = pack
        load[pack] += costs[unit]
        used[pack] += size
        _sift_down(ready, load, ready_length, 0)
    return place, unplaced


@compiled
def _fill_emptiest(place: Ints, slots: Ints, order: Ints, packs: int) -> Ints:
    """Put each unit without a pack (-1) into the emptiest, even above the cap; returns tokens of each pack."""
    used = np.zeros(packs, dtype=np.int64)
    for unit in range(len(place)):
        if place[unit] >= 0:
            used[place[unit]] += slots[unit]
    for position in range(len(order)):
        unit = order[position]
        if place[unit] < 0:
            emptiest = 0
            for pack in range(packs):
                if used[pack] < used[emptiest]:
                    emptiest = pack
            place[unit] = emptiest
            used[emptiest] += slots[unit]
    return used


@compiled
def repair_overflow(
    place: Ints, slots: Ints, order: Ints, packs: int, cap: int, iterations: int, seed: int
) -> tuple[Ints, int]:
    """Place the remaining units, then exchange units until no pack is above the cap.

    `place` and `order` are those of `cheapest_first`. Returns the pack of each unit and the tokens still above the cap,
    summed over packs.
    """
    count = len(place)
    place = place.copy()
    used = _fill_emptiest(place, slots, order, packs)
    overflow = 0
    for pack in range(packs):
        overflow += max(0, used[pack] - cap)
    rank_in_order = np.empty(count, dtype=np.int64)
    for position in range(count):
        rank_in_order[order[position]] = position
    state = seed_state(seed)
    for _ in range(iterations):
        if overflow == 0:
            break
        state = next_random(state)
        unit = state % count
        pack_a = place[unit]
        state = next_random(state)
        # Digits of one random number choose the kind of step, how far away the other unit is, and the unit.
        if state % 8 == 0:  # move a unit instead of exchanging two
            pack_b = state // 8 % packs
            other = -1
            moved = slots[unit]
        else:
            reach = 4 << (state // 8 % 4 * 2)
            p = rank_in_order[unit] + state // 32 % (2 * reach + 1) - reach
            if p < 0 or p >= count:
                continue
            other = order[p]
            pack_b = place[other]
            moved = slots[unit] - slots[other]
        if pack_a == pack_b:
            continue
        before = max(0, used[pack_a] - cap) + max(0, used[pack_b] - cap)
        after = max(0, used[pack_a] - moved - cap) + max(0, used[pack_b] + moved - cap)
        if after > before:
            continue
        overflow += after - before
        used[pack_a] -= moved
        used[pack_b] += moved
        place[unit] = pack_b
        if other >= 0:
            place[other] = pack_a
    return place, overflow
