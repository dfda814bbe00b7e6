"""Packs on nested blocks of ranks, where ranks wait for each other inside a block and at the end of the step."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.dynamic_cp.choices import SizeChoices

TARGETS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.12)
"""Longest times of a unit that are tried, in parts of the time of a rank: longer units get more ranks."""


@dataclass(frozen=True)
class PlacedPacks:
    """Units of each pack, its first rank and its size index, in an order that every rank follows."""

    units: list[list[int]]
    first_ranks: list[int]
    levels: list[int]
    loads: Ints
    """int64[ranks]: nanoseconds of each rank."""

    @property
    def step_time(self) -> int:
        """Nanoseconds of the slowest rank."""
        return int(self.loads.max())


def place_nested(choices: SizeChoices, ranks: int) -> PlacedPacks:
    """The fastest of several placements, which differ in the longest time that a unit may take."""
    work = int(
        (choices.times[choices.smallest, np.arange(choices.times.shape[1])] * choices.sizes[choices.smallest]).sum()
    )
    mean = max(work // ranks, 1)
    best = _place(choices, ranks, choices.smallest)
    tried = {best_key(choices.smallest)}
    for target in TARGETS:
        short = choices.times + choices.fixed[:, None] <= int(mean * target)
        levels = np.where(short.any(axis=0), np.argmax(short, axis=0), len(choices.sizes) - 1)
        levels = np.maximum(levels, choices.smallest)
        if best_key(levels) in tried:
            continue
        tried.add(best_key(levels))
        found = _place(choices, ranks, levels)
        best = found if found.step_time < best.step_time else best
    return best


def best_key(levels: Ints) -> bytes:
    """Hashable value of an array."""
    return levels.tobytes()


def _place(choices: SizeChoices, ranks: int, levels: Ints) -> PlacedPacks:
    """Placement of units on blocks of their sizes, the longest first on the block with the least time."""
    loads = np.zeros(ranks, dtype=np.int64)
    units: list[list[int]] = []
    first_ranks: list[int] = []
    level_of: list[int] = []
    for level in range(len(choices.sizes) - 1, -1, -1):
        size = int(choices.sizes[level])
        members = np.flatnonzero(levels == level)
        if not len(members):
            continue
        times, slots = choices.times[level], choices.slots[level]
        heap = [(int(load), block) for block, load in enumerate(loads.reshape(-1, size).max(axis=1))]
        heapq.heapify(heap)
        of_block: dict[int, list[int]] = {}
        for unit in members[np.argsort(-times[members], kind="stable")].tolist():
            load, block = heapq.heappop(heap)
            of_block.setdefault(block, []).append(unit)
            heapq.heappush(heap, (load + int(times[unit]), block))
        for block, inside in sorted(of_block.items()):
            for pack in _first_fit(inside, slots, int(choices.caps[level])):
                time = max(int(choices.fixed[level] + times[pack].sum()), choices.floor)
                loads[block * size : (block + 1) * size] += time
                units.append(pack)
                first_ranks.append(block * size)
                level_of.append(level)
    return PlacedPacks(units, first_ranks, level_of, loads)


def _first_fit(units: list[int], slots: Ints, cap: int) -> list[list[int]]:
    packs: list[list[int]] = []
    free: list[int] = []
    for unit in sorted(units, key=lambda unit: (-int(slots[unit]), unit)):
        need = int(slots[unit])
        at = next((i for i, room in enumerate(free) if room >= need), None)
        if at is None:
            packs.append([])
            free.append(cap)
            at = len(packs) - 1
        packs[at].append(unit)
        free[at] -= need
    return packs
