"""Packs on nested blocks of ranks, where ranks wait for each other inside a block and at the end of the step.

In a pipeline without virtual stages they wait for the stages of their block.
"""

from __future__ import annotations

import itertools

import numpy as np

from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.dynamic_cp.choices import PlacedPacks, SizeChoices
from roll_batching.planning.dynamic_cp.joint import joint_makespan
from roll_batching.planning.packers.items import descending, first_fit
from roll_batching.planning.pipeline.ordering import Shares

TARGETS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.12)
"""Longest times of a unit that are tried, in parts of the time of a rank: longer units get more ranks."""

MOST_FORMED = 2
"""Number of `TARGETS`, those with the shortest steps, that are also tried with full packs."""
MOST_LEVELLED = 3
"""Number of placements, those with the least work, whose ranks are levelled."""
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
    units: list[list[int]] = []
    first_ranks: list[int] = []
    level_of: list[int] = []
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
            packs = _split(members, first_fit(slots[members], descending(slots[members]), cap))
            if fill:
                _fill(packs, np.flatnonzero(waiting), slots, cap, waiting)
            times = choices.times_of(packs, np.full(len(packs), level))
            block_of = _level_blocks(times, of_block)
        else:
            packs, block_of = _packs_inside(members, _level_blocks(choices.times[level, members], of_block), slots, cap)
            times = choices.times_of(packs, np.full(len(packs), level))
        sums = np.zeros(len(of_block), dtype=np.int64)
        np.add.at(sums, block_of, times)
        loads += np.repeat(sums, size)
        by_block = np.argsort(block_of, kind="stable")
        units += [packs[pack] for pack in by_block.tolist()]
        first_ranks += (block_of[by_block] * size).tolist()
        level_of += [level] * len(packs)
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


def _level_blocks(times: Ints, loads: Ints) -> Ints:
    """Block of each item (int64[n]), the longest item first, each on the block with the least time.

    Blocks have `loads` already.
    """
    blocks = np.empty(len(times), dtype=np.int64)
    _fill_least(np.argsort(-times, kind="stable").astype(np.int64), times, loads.copy(), blocks)
    return blocks


@compiled
def _fill_least(order: Ints, times: Ints, loads: Ints, blocks: Ints) -> None:
    for item in order:
        block = 0
        for other in range(1, len(loads)):
            if loads[other] < loads[block]:
                block = other
        blocks[item] = block
        loads[block] += times[item]


def _packs_inside(units: Ints, block_of: Ints, slots: Ints, cap: int) -> tuple[list[list[int]], Ints]:
    """First-fit-decreasing packs of the units of each block, of at most `cap` tokens; packs, and block of each."""
    order = descending(slots[units])
    place_of = np.empty(len(units), dtype=np.int64)
    blocks = _first_fit_inside(slots[units], order, block_of, int(block_of.max()) + 1, cap, place_of)
    return _split(units, place_of), blocks


@compiled
def _first_fit_inside(sizes: Ints, order: Ints, block_of: Ints, blocks: int, cap: int, place_of: Ints) -> Ints:
    """Writes the pack of each item; returns the block of each pack."""
    first = np.full(blocks, -1, dtype=np.int64)
    following = np.full(len(sizes), -1, dtype=np.int64)
    room = np.empty(len(sizes), dtype=np.int64)
    block_of_pack = np.empty(len(sizes), dtype=np.int64)
    packs = 0
    for item in order:
        block = block_of[item]
        pack, last = first[block], -1
        while pack >= 0 and room[pack] < sizes[item]:
            last, pack = pack, following[pack]
        if pack < 0:
            pack = packs
            packs += 1
            room[pack], block_of_pack[pack] = cap, block
            if last < 0:
                first[block] = pack
            else:
                following[last] = pack
        room[pack] -= sizes[item]
        place_of[item] = pack
    return block_of_pack[:packs].copy()


def _split(units: Ints, place_of: Ints) -> list[list[int]]:
    """Units by place, 0 to the largest."""
    by_pack = np.argsort(place_of, kind="stable")
    ends = np.cumsum(np.bincount(place_of))[:-1].tolist()
    listed = units[by_pack].tolist()
    return [listed[start:end] for start, end in zip([0, *ends], [*ends, len(listed)], strict=True)]


PIPELINE_CAPS = (100, 50, 25)
"""Caps of packs that are tried, in percent: smaller packs fill the pipeline better and pay more fixed costs."""
PIPELINE_TARGETS = (None, 0.3, 0.12)
"""Longest times of a unit that are tried, in parts of the time of a rank."""
PIPELINE_ORDERS = (1, -1)
"""Packs of a block by rising or falling time."""


def place_in_pipeline(choices: SizeChoices, ranks: int, stages: int, shares: Shares | None = None) -> PlacedPacks:
    """The placement with the shortest makespan among several caps, sizes and orders, without virtual stages.

    A block computes a pack jointly on each stage. Its ranks may have different numbers of packs: the packs of a block
    stand before those of smaller blocks, so all its ranks compute them at the same index.
    """
    candidates = []
    for target in PIPELINE_TARGETS:
        levels_of_units = choices.smallest if target is None else levels_by_target(choices, ranks, target)
        for percent, (full_from, fill) in itertools.product(PIPELINE_CAPS, FORMS):
            packs = place_levels(choices, ranks, levels_of_units, full_from, fill, cap_percent=percent)
            times = choices.pack_times(packs)
            firsts, levels = np.array(packs.first_ranks, dtype=np.int64), np.array(packs.levels, dtype=np.int64)
            for direction in PIPELINE_ORDERS:
                order = np.lexsort((direction * times, firsts, -levels))
                span = joint_makespan(firsts[order], choices.sizes[levels[order]], times[order], ranks, stages, shares)
                candidates.append(
                    PlacedPacks(
                        units=[packs.units[pack] for pack in order.tolist()],
                        first_ranks=firsts[order].tolist(),
                        levels=levels[order].tolist(),
                        step_time=span,
                    )
                )
    return min(candidates, key=lambda packs: packs.step_time)


# ---- levelling of ranks


MOST_MOVES = 1500
"""Moves and swaps of a search; it ends earlier where none shortens the slowest rank."""
MOST_PARTNERS = 6
"""Ranks, from the fastest on, with which the slowest tries to exchange units."""


def level_ranks(packs: PlacedPacks, choices: SizeChoices, ranks: int) -> PlacedPacks:
    """`packs` with units moved and swapped between packs of size 1; never slower."""
    single = [pack for pack, level in enumerate(packs.levels) if level == 0]
    if not single:
        return packs
    loads = rank_loads(packs, choices, ranks)
    pack_of = np.full(choices.times.shape[1], -1, dtype=np.int64)
    for place, pack in enumerate(single):
        pack_of[packs.units[pack]] = place
    rank_of = np.array([packs.first_ranks[pack] for pack in single], dtype=np.int64)
    members = np.flatnonzero(pack_of >= 0).astype(np.int64)
    cap = int(choices.caps[0])
    _exchange(members, pack_of, rank_of, choices.times[0], choices.slots[0], loads, cap)
    units = [list(pack) for pack in packs.units]
    for place, pack in enumerate(single):
        units[pack] = members[pack_of[members] == place].tolist()
    non_empty = [pack for pack, inside in enumerate(units) if inside]
    levelled = PlacedPacks(
        units=[units[pack] for pack in non_empty],
        first_ranks=[packs.first_ranks[pack] for pack in non_empty],
        levels=[packs.levels[pack] for pack in non_empty],
        step_time=0,
    )
    time = int(rank_loads(levelled, choices, ranks).max())
    return PlacedPacks(levelled.units, levelled.first_ranks, levelled.levels, time) if time < packs.step_time else packs


def rank_loads(packs: PlacedPacks, choices: SizeChoices, ranks: int) -> Ints:
    """int64[ranks]: nanoseconds of each rank."""
    loads = np.zeros(ranks, dtype=np.int64)
    for first, level, time in zip(packs.first_ranks, packs.levels, choices.pack_times(packs).tolist(), strict=True):
        loads[first : first + (1 << level)] += time
    return loads


@compiled
def _exchange(members: Ints, pack_of: Ints, rank_of: Ints, times: Ints, slots: Ints, loads: Ints, cap: int) -> None:
    """Exchanges units between the slowest rank and fast ones, in place, while that shortens the slowest rank."""
    packs = len(rank_of)
    used = np.zeros(packs, dtype=np.int64)
    for unit in members:
        used[pack_of[unit]] += slots[unit]
    for _ in range(MOST_MOVES):
        slow = int(np.argmax(loads))
        order = np.argsort(loads)
        best_time, best_unit, best_other, best_pack = loads[slow], -1, -1, -1
        for partner in order[:MOST_PARTNERS]:
            if partner == slow or loads[partner] >= best_time:
                continue
            for unit in members:
                if rank_of[pack_of[unit]] != slow:
                    continue
                lighter = loads[slow] - times[unit]
                for pack in range(packs):  # a move
                    if rank_of[pack] == partner and used[pack] + slots[unit] <= cap:
                        time = max(lighter, loads[partner] + times[unit])
                        if time < best_time:
                            best_time, best_unit, best_other, best_pack = time, unit, -1, pack
                for other in members:  # a swap
                    pack = pack_of[other]
                    if rank_of[pack] != partner or times[other] >= times[unit]:
                        continue
                    if used[pack] + slots[unit] - slots[other] > cap:
                        continue
                    if used[pack_of[unit]] + slots[other] - slots[unit] > cap:
                        continue
                    time = max(lighter + times[other], loads[partner] + times[unit] - times[other])
                    if time < best_time:
                        best_time, best_unit, best_other, best_pack = time, unit, other, pack
            if best_unit >= 0:
                break
        if best_unit < 0:
            return
        old_pack = pack_of[best_unit]
        partner = rank_of[best_pack]
        loads[slow] -= times[best_unit]
        loads[partner] += times[best_unit]
        used[old_pack] -= slots[best_unit]
        used[best_pack] += slots[best_unit]
        pack_of[best_unit] = best_pack
        if best_other >= 0:
            loads[slow] += times[best_other]
            loads[partner] -= times[best_other]
            used[old_pack] += slots[best_other]
            used[best_pack] -= slots[best_other]
            pack_of[best_other] = old_pack
