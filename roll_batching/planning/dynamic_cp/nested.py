"""Packs on nested blocks of ranks, where ranks wait for each other inside a block and at the end of the step."""

from __future__ import annotations

import heapq

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.placed import PlacedPacks

TARGETS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.12)
"""Longest times of a unit that are tried, in parts of the time of a rank: longer units get more ranks."""


def place_nested(choices: SizeChoices, ranks: int) -> PlacedPacks:
    """The fastest of several placements, which differ in the longest time that a unit may take."""
    best = place_levels(choices, ranks, choices.smallest)
    tried = {choices.smallest.tobytes()}
    for target in TARGETS:
        levels = levels_by_target(choices, ranks, target)
        if levels.tobytes() not in tried:
            tried.add(levels.tobytes())
            best = min(best, place_levels(choices, ranks, levels), key=lambda packs: packs.step_time)
    return best


def levels_by_target(choices: SizeChoices, ranks: int, target: float) -> Ints:
    """Level of each unit, int64[units]: the smallest at which it takes at most `target` of the mean time of a rank."""
    every = np.arange(choices.times.shape[1])
    work = int((choices.times[choices.smallest, every] * choices.sizes[choices.smallest]).sum())
    is_short = choices.times + choices.fixed[:, None] <= int(work // ranks * target)
    levels = np.where(is_short.any(axis=0), np.argmax(is_short, axis=0), len(choices.sizes) - 1)
    return np.maximum(levels, choices.smallest).astype(np.int64)


def place_levels(choices: SizeChoices, ranks: int, levels: Ints, *, cap_percent: int = 100) -> PlacedPacks:
    """Units on blocks of the sizes of their `levels` (int64[units]), the longest first on the block with least time.

    `cap_percent` lowers the cap of packs, as far as their longest units allow.
    """
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
        cap = max(int(choices.caps[level]) * cap_percent // 100, int(slots[members].max()))
        blocks = _level_blocks(members, times, loads.reshape(-1, size).max(axis=1))
        for block, inside in sorted(blocks.items()):
            for pack in _first_fit(inside, slots, cap):
                loads[block * size : (block + 1) * size] += choices.pack_time(pack, level)
                units.append(pack)
                first_ranks.append(block * size)
                level_of.append(level)
    return PlacedPacks(units, first_ranks, level_of, int(loads.max()))


def _level_blocks(members: Ints, times: Ints, loads: Ints) -> dict[int, list[int]]:
    """Units of each block, which has `loads` already: the longest unit first, on the block with the least time."""
    heap = [(int(load), block) for block, load in enumerate(loads)]
    heapq.heapify(heap)
    blocks: dict[int, list[int]] = {}
    for unit in members[np.argsort(-times[members], kind="stable")].tolist():
        load, block = heap[0]
        blocks.setdefault(block, []).append(unit)
        heapq.heapreplace(heap, (load + int(times[unit]), block))
    return blocks


def _first_fit(units: list[int], slots: Ints, cap: int) -> list[list[int]]:
    """First-fit-decreasing packs of at most `cap` tokens."""
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
