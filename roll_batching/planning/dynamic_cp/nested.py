"""Packs on nested blocks of ranks, where ranks wait for each other inside a block and at the end of the step."""

from __future__ import annotations

import heapq

import numpy as np

from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.leveling import level_ranks
from roll_batching.planning.dynamic_cp.placed import PlacedPacks
from roll_batching.planning.packers.first_fit import descending, first_fit

TARGETS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.12)
"""Longest times of a unit that are tried, in parts of the time of a rank: longer units get more ranks."""

MOST_FORMED = 2
"""Longest times of a unit, of those with the shortest steps, that are tried with full packs."""
MOST_LEVELLED = 3
"""Placements with the least work whose ranks are levelled."""
FORMS = ((99, False), (1, True), (2, True), (0, True))
"""(`full_from`, `fill`) of the placements that are tried; see `place_levels`."""


def place_nested(choices: SizeChoices, ranks: int) -> PlacedPacks:
    """The fastest of several placements, which differ in the longest time that a unit may take, and in full packs."""
    levels_of: dict[bytes, Ints] = {}
    for target in (None, *TARGETS):
        levels = choices.smallest if target is None else levels_by_target(choices, ranks, target)
        levels_of.setdefault(levels.tobytes(), levels)
    by_units = [(place_levels(choices, ranks, levels, *FORMS[0]), levels) for levels in levels_of.values()]
    by_units.sort(key=lambda placed: placed[0].step_time)
    candidates = [packs for packs, _ in by_units]
    for _, levels in by_units[:MOST_FORMED]:
        candidates += [place_levels(choices, ranks, levels, full_from, fill) for full_from, fill in FORMS[1:]]
    best = min(candidates, key=lambda packs: packs.step_time)
    means = [mean_load(packs, choices, ranks) for packs in candidates]
    for mean, place in sorted(zip(means, range(len(means)), strict=True))[:MOST_LEVELLED]:
        if mean >= best.step_time:
            break
        best = min(best, level_ranks(candidates[place], choices, ranks), key=lambda packs: packs.step_time)
    return best


def mean_load(packs: PlacedPacks, choices: SizeChoices, ranks: int) -> int:
    """Mean nanoseconds of a rank."""
    return int((choices.pack_times(packs) << np.array(packs.levels, dtype=np.int64)).sum()) // ranks


def levels_by_target(choices: SizeChoices, ranks: int, target: float) -> Ints:
    """Level of each unit, int64[units]: the smallest at which it takes at most `target` of the mean time of a rank."""
    every = np.arange(choices.times.shape[1])
    work = int((choices.times[choices.smallest, every] * choices.sizes[choices.smallest]).sum())
    is_short = choices.fits & (choices.times + choices.fixed[:, None] <= int(work // ranks * target))
    largest = len(choices.sizes) - 1 - np.argmax(choices.fits[::-1], axis=0)
    levels: Ints = np.where(is_short.any(axis=0), np.argmax(is_short, axis=0), largest).astype(np.int64)
    return levels


def place_levels(
    choices: SizeChoices, ranks: int, levels: Ints, full_from: int, fill: bool, *, cap_percent: int = 100
) -> PlacedPacks:
    """Units on blocks of the sizes of their `levels` (int64[units]), the longest first on the block with least time.

    From the level `full_from` on, packs are formed first and placed as a whole: they are fewer. Below, units are placed
    first and packed inside their block: ranks take more equal times. With `fill`, units of smaller sizes join full
    packs that have room. `cap_percent` lowers the cap of packs, as far as their longest units allow.
    """
    loads = np.zeros(ranks, dtype=np.int64)
    waiting = np.ones(len(levels), dtype=bool)
    placed: list[tuple[list[int], int, int]] = []
    for level in range(len(choices.sizes) - 1, -1, -1):
        size = int(choices.sizes[level])
        members = np.flatnonzero(waiting & (levels == level))
        if not len(members):
            continue
        waiting[members] = False
        slots = choices.slots[level]
        cap = max(int(choices.caps[level]) * cap_percent // 100, int(slots[members].max()))
        of_block = loads.reshape(-1, size).max(axis=1)
        if level >= full_from:
            packs = _first_fit(members, slots, cap)
            if fill:
                _fill(packs, np.flatnonzero(waiting), slots, cap, waiting)
            times = choices.times_of(packs, np.full(len(packs), level))
            blocks = _level_blocks(np.arange(len(packs)), times, of_block)
            packs_of = {block: [packs[pack] for pack in inside] for block, inside in blocks.items()}
        else:
            blocks = _level_blocks(members, choices.times[level], of_block)
            packs_of = {block: _first_fit(np.array(inside), slots, cap) for block, inside in blocks.items()}
        of_level = [(pack, block * size, level) for block, packs in sorted(packs_of.items()) for pack in packs]
        of_packs = choices.times_of([pack for pack, _, _ in of_level], np.full(len(of_level), level))
        for (_, first, _), time in zip(of_level, of_packs.tolist(), strict=True):
            loads[first : first + size] += time
        placed += of_level
    units, first_ranks, level_of = (list(column) for column in zip(*placed, strict=True))
    return PlacedPacks(units, first_ranks, level_of, int(loads.max()))


def _fill(packs: list[list[int]], units: Ints, slots: Ints, cap: int, waiting: Flags) -> None:
    """Adds `units`, the largest first, to the fullest packs that have room, and clears their `waiting`."""
    room = np.array([cap - int(slots[pack].sum()) for pack in packs], dtype=np.int64)
    largest_first = units[descending(slots[units])]
    places = _best_fit(slots[largest_first], room)
    for unit, place in zip(largest_first[places >= 0].tolist(), places[places >= 0].tolist(), strict=True):
        packs[place].append(unit)
        waiting[unit] = False


@compiled
def _best_fit(sizes: Ints, room: Ints) -> Ints:
    """Pack of each item (int64[n]) with the least `room` that holds it, -1 for none; changes `room`."""
    places = np.full(len(sizes), -1, dtype=np.int64)
    for item in range(len(sizes)):
        best = -1
        for pack in range(len(room)):
            if room[pack] >= sizes[item] and (best < 0 or room[pack] < room[best]):
                best = pack
        if best >= 0:
            places[item] = best
            room[best] -= sizes[item]
    return places


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


def _first_fit(units: Ints, slots: Ints, cap: int) -> list[list[int]]:
    """First-fit-decreasing packs of at most `cap` tokens."""
    sizes = slots[units]
    place_of = first_fit(sizes, descending(sizes), cap)
    by_pack = np.argsort(place_of, kind="stable")
    ends = np.cumsum(np.bincount(place_of))
    return [part.tolist() for part in np.split(units[by_pack], ends[:-1])]
