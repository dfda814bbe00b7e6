"""Packs in columns, where all ranks wait for each other at every micro-batch.

A column is the micro-batches of one index: blocks of several sizes that cover all ranks. The step takes the sum of the
slowest blocks, so the blocks of a column should take equally long.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.placed import PlacedPacks

MOST_COLUMNS = 24
"""Numbers of columns that are tried, from 1 on."""
SLACKS = (102, 106, 112, 120, 130)
"""Times of a column that are tried, in percent of the mean time of a rank divided by the number of columns."""
MOST_STEPS = 150_000_000
"""Comparisons of units with blocks in all tries; with more units and ranks fewer times are tried."""


def place_columns(choices: SizeChoices, ranks: int) -> PlacedPacks:
    """The fastest of several placements in columns, which differ in the time of a column."""
    order = np.argsort(-choices.times[0], kind="stable").astype(np.int64)
    times, slots = (np.ascontiguousarray(table[:, order]) for table in (choices.times, choices.slots))
    smallest = choices.smallest[order]
    work = times[smallest, np.arange(len(order))] * choices.sizes[smallest]
    mean = int(work.sum()) // ranks
    longest = int((times[-1] + choices.fixed[-1]).max())
    best, best_time, steps = np.zeros((3, 0), dtype=np.int64), 0, 0
    for count in range(1, MOST_COLUMNS + 1):
        if mean // count < longest // 2 and best_time:
            break  # blocks of the longest unit alone take longer
        for slack in SLACKS:
            target = mean // count * slack // 100 + int(choices.fixed[0])
            placed = _fill_columns(times, slots, choices.fixed, choices.caps, smallest, ranks, target)
            time = _columns_time(placed, times, choices.fixed, choices.floor)
            if not best_time or time < best_time:
                best, best_time = placed, time
            steps += len(order) * min(ranks, len(order)) * (int(placed[0].max()) + 1)
            if steps > MOST_STEPS:
                return _packs_of(best, order, choices, ranks, best_time)
    return _packs_of(best, order, choices, ranks, best_time)


def _packs_of(placed: Ints, order: Ints, choices: SizeChoices, ranks: int, time: int) -> PlacedPacks:
    """Packs of units (column, block and level of each), with fillers for ranks without a block."""
    units: list[list[int]] = []
    first_ranks: list[int] = []
    levels: list[int] = []
    column_of, block_of, level_of = placed
    for column in range(int(column_of.max()) + 1):
        inside = np.flatnonzero(column_of == column)
        blocks = {int(block): inside[block_of[inside] == block] for block in np.unique(block_of[inside])}
        rank = 0
        # Large blocks first: each then begins at a multiple of its size.
        for members in sorted(blocks.values(), key=lambda members: (-int(level_of[members[0]]), int(members[0]))):
            units.append(order[members].tolist())
            first_ranks.append(rank)
            levels.append(int(level_of[members[0]]))
            rank += int(choices.sizes[levels[-1]])
        for filler in range(rank, ranks):
            units.append([])
            first_ranks.append(filler)
            levels.append(0)
    return PlacedPacks(units, first_ranks, levels, time)


@compiled
def _fill_columns(times: Ints, slots: Ints, fixed: Ints, caps: Ints, smallest: Ints, ranks: int, target: int) -> Ints:
    """Column, block and level of each unit, int64[3, units]; units in the order of falling times."""
    count = times.shape[1]
    placed = np.full((3, count), -1, dtype=np.int64)
    level = np.zeros(ranks, dtype=np.int64)
    time = np.zeros(ranks, dtype=np.int64)
    used = np.zeros(ranks, dtype=np.int64)
    left, column = count, 0
    while left > 0:
        blocks = _open_blocks(times, slots, fixed, caps, smallest, ranks, target, placed, column, level, time, used)
        limit = target
        for block in range(blocks):
            limit = max(limit, time[block])
        _fill_blocks(times, slots, caps, blocks, limit, placed, column, level, time, used)
        for unit in range(count):
            if placed[0, unit] == column:
                placed[2, unit] = level[placed[1, unit]]
                left -= 1
        column += 1
    return placed


@compiled
def _open_blocks(
    times: Ints,
    slots: Ints,
    fixed: Ints,
    caps: Ints,
    smallest: Ints,
    ranks: int,
    target: int,
    placed: Ints,
    column: int,
    level: Ints,
    time: Ints,
    used: Ints,
) -> int:
    """Number of blocks of a column, each opened by the longest unit left, at a size at which it takes `target`."""
    levels, count = times.shape
    opened_by = np.zeros(ranks, dtype=np.int64)
    blocks, free = 0, ranks
    for unit in range(count):
        if free == 0:
            break
        if placed[0, unit] >= 0:
            continue
        own = smallest[unit]
        if 1 << own > free:
            continue
        for larger in range(own + 1, levels):
            if times[own, unit] + fixed[own] <= target or 1 << larger > free:
                break
            if slots[larger, unit] <= caps[larger]:
                own = larger
        level[blocks], time[blocks] = own, fixed[own] + times[own, unit]
        used[blocks], opened_by[blocks] = slots[own, unit], unit
        placed[0, unit], placed[1, unit] = column, blocks
        free -= 1 << own
        blocks += 1
    while free > 0:  # idle ranks join the slowest block that they can double
        widest = -1
        for block in range(blocks):
            if 1 << level[block] <= free and level[block] < levels - 1:
                if widest < 0 or time[block] > time[widest]:
                    widest = block
        if widest < 0:
            break
        own, unit = level[widest] + 1, opened_by[widest]
        if fixed[own] + times[own, unit] >= time[widest] or slots[own, unit] > caps[own]:
            break
        free -= 1 << level[widest]
        level[widest], time[widest] = own, fixed[own] + times[own, unit]
        used[widest] = slots[own, unit]
    return blocks


@compiled
def _fill_blocks(
    times: Ints,
    slots: Ints,
    caps: Ints,
    blocks: int,
    limit: int,
    placed: Ints,
    column: int,
    level: Ints,
    time: Ints,
    used: Ints,
) -> None:
    """Adds further units to the fastest block that takes at most `limit` with them."""
    for unit in range(times.shape[1]):
        if placed[0, unit] >= 0:
            continue
        at = -1
        for block in range(blocks):
            own = level[block]
            if time[block] + times[own, unit] <= limit and used[block] + slots[own, unit] <= caps[own]:
                if at < 0 or time[block] < time[at]:
                    at = block
        if at >= 0:
            placed[0, unit], placed[1, unit] = column, at
            time[at] += times[level[at], unit]
            used[at] += slots[level[at], unit]


@compiled
def _columns_time(placed: Ints, times: Ints, fixed: Ints, floor: int) -> int:
    """Sum over columns of the time of the slowest block."""
    columns = placed[0].max() + 1
    total = 0
    loads = np.zeros((columns, placed[1].max() + 1), dtype=np.int64)
    for unit in range(placed.shape[1]):
        column, block, level = placed[0, unit], placed[1, unit], placed[2, unit]
        if loads[column, block] == 0:
            loads[column, block] = fixed[level]
        loads[column, block] += times[level, unit]
    for column in range(columns):
        total += max(floor, loads[column].max())
    return total
