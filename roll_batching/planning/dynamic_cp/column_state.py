"""Columns of packs as arrays that searches change in place, and the greedy filling of one column.

Units are numbered by falling time. Pack p stands in column `p // ranks`; packs of a column that are in use come first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.dynamic_cp.choices import SizeChoices


class UnitTables(NamedTuple):
    """Times and slots of units by level; int64 arrays as those of `SizeChoices`, units by falling time."""

    times: Ints
    slots: Ints
    fixed: Ints
    caps: Ints
    smallest: Ints
    least: int
    """Nanoseconds of a filler, the least of a column."""
    ranks: int


class ColumnState(NamedTuple):
    """Packs of all units: int64 arrays."""

    pack_of: Ints
    """[units]"""
    level: Ints
    """[packs]"""
    time: Ints
    """[packs]: nanoseconds, without the floor."""
    used: Ints
    """[packs]: tokens of all slots."""
    first: Ints
    """[packs]: first unit of each pack, or -1."""
    following: Ints
    """[units]: next unit of the same pack, or -1."""
    packs: Ints
    """[columns]: number of packs in use."""
    maxima: Ints
    """[columns]: nanoseconds of the slowest pack."""


def tables_of(choices: SizeChoices, ranks: int) -> tuple[UnitTables, Ints]:
    """Tables of units sorted by falling time, and the unit behind each of their columns (int64[units])."""
    order = np.argsort(-choices.times[0], kind="stable").astype(np.int64)
    times, slots = (np.ascontiguousarray(table[:, order]) for table in (choices.times, choices.slots))
    least = max(int(choices.fixed[0]), choices.floor)
    return UnitTables(times, slots, choices.fixed, choices.caps, choices.smallest[order], least, ranks), order


@compiled
def empty_state(tables: UnitTables, columns: int) -> ColumnState:
    """State whose units are in no pack."""
    units, packs = tables.times.shape[1], columns * tables.ranks
    return ColumnState(
        np.full(units, -1, dtype=np.int64),
        np.zeros(packs, dtype=np.int64),
        np.zeros(packs, dtype=np.int64),
        np.zeros(packs, dtype=np.int64),
        np.full(packs, -1, dtype=np.int64),
        np.full(units, -1, dtype=np.int64),
        np.zeros(columns, dtype=np.int64),
        np.full(columns, tables.least, dtype=np.int64),
    )


@compiled
def add_unit(tables: UnitTables, state: ColumnState, unit: int, pack: int) -> None:
    """Adds a unit to a pack in use."""
    level = state.level[pack]
    state.pack_of[unit] = pack
    state.following[unit] = state.first[pack]
    state.first[pack] = unit
    state.time[pack] += tables.times[level, unit]
    state.used[pack] += tables.slots[level, unit]


@compiled
def remove_unit(tables: UnitTables, state: ColumnState, unit: int) -> None:
    """Takes a unit out of its pack, which stays in use."""
    pack = state.pack_of[unit]
    level = state.level[pack]
    current, before = state.first[pack], -1
    while current != unit:
        before, current = current, state.following[current]
    if before < 0:
        state.first[pack] = state.following[unit]
    else:
        state.following[before] = state.following[unit]
    state.pack_of[unit] = -1
    state.time[pack] -= tables.times[level, unit]
    state.used[pack] -= tables.slots[level, unit]


@compiled
def largest_time(tables: UnitTables, state: ColumnState, column: int) -> int:
    """Nanoseconds of the slowest pack of a column."""
    largest = tables.least
    start = column * tables.ranks
    for pack in range(start, start + state.packs[column]):
        if state.time[pack] > largest and state.first[pack] >= 0:
            largest = state.time[pack]
    return largest


@compiled
def fill_column(tables: UnitTables, state: ColumnState, column: int, units: Ints, target: int) -> int:
    """Fills an empty column with `units`; returns how many it takes.

    `units` is int64[n], by falling time, with -1 in place of units that are in a column already; units taken here
    become -1. The longest ones open packs, at sizes at which they take about `target` nanoseconds. Others join the
    fastest pack that takes at most as long with them as `target` or the slowest pack.
    """
    free = _open_packs(tables, state, column, units, target)
    filled: int = state.packs[column]
    _widen_packs(tables, state, column, free)
    filled += _join_packs(tables, state, column, units, target)
    state.maxima[column] = largest_time(tables, state, column)
    return filled


@compiled
def _open_packs(tables: UnitTables, state: ColumnState, column: int, units: Ints, target: int) -> int:
    """Opens a pack for each of the longest units; returns the number of idle ranks."""
    times, slots, fixed, caps = tables.times, tables.slots, tables.fixed, tables.caps
    packs, free = 0, tables.ranks
    for place in range(len(units)):
        if free == 0:
            break
        unit = units[place]
        if unit < 0:
            continue
        level = tables.smallest[unit]
        if 1 << level > free:
            continue
        for larger in range(level + 1, len(fixed)):
            if times[level, unit] + fixed[level] <= target or 1 << larger > free:
                break
            if slots[larger, unit] <= caps[larger]:
                level = larger
        pack = column * tables.ranks + packs
        state.level[pack], state.time[pack], state.used[pack], state.first[pack] = level, fixed[level], 0, -1
        add_unit(tables, state, unit, pack)
        units[place] = -1
        free -= 1 << level
        packs += 1
    state.packs[column] = packs
    return free


@compiled
def _widen_packs(tables: UnitTables, state: ColumnState, column: int, free: int) -> None:
    """Lets idle ranks join the slowest packs, of one unit each, that they can double."""
    times, slots, fixed, levels = tables.times, tables.slots, tables.fixed, len(tables.fixed)
    start = column * tables.ranks
    while free > 0:
        widest = -1
        for pack in range(start, start + state.packs[column]):
            if 1 << state.level[pack] <= free and state.level[pack] < levels - 1:
                if widest < 0 or state.time[pack] > state.time[widest]:
                    widest = pack
        if widest < 0:
            break
        level, unit = state.level[widest] + 1, state.first[widest]
        if fixed[level] + times[level, unit] >= state.time[widest] or slots[level, unit] > tables.caps[level]:
            break
        free -= 1 << state.level[widest]
        state.level[widest], state.used[widest] = level, slots[level, unit]
        state.time[widest] = fixed[level] + times[level, unit]


@compiled
def _join_packs(tables: UnitTables, state: ColumnState, column: int, units: Ints, target: int) -> int:
    """Number of units that join packs within their time and cap."""
    times, slots, caps, last = tables.times, tables.slots, tables.caps, len(tables.fixed) - 1
    start = column * tables.ranks
    end = start + state.packs[column]
    limit, filled = target, 0
    for pack in range(start, end):
        limit = max(limit, state.time[pack])
    room, tokens = limit, caps[last]  # the most nanoseconds and tokens that a pack has left, or more
    for place in range(len(units)):
        unit = units[place]
        if unit < 0 or times[last, unit] > room or slots[0, unit] > tokens:
            continue
        best = -1
        room, tokens = 0, 0
        for pack in range(start, end):
            level = state.level[pack]
            free_tokens = caps[level] - state.used[pack]
            if state.time[pack] + times[level, unit] <= limit and slots[level, unit] <= free_tokens:
                if best < 0 or state.time[pack] < state.time[best]:
                    best = pack
            room, tokens = max(room, limit - state.time[pack]), max(tokens, free_tokens)
        if best >= 0:
            add_unit(tables, state, unit, best)
            units[place] = -1
            filled += 1
    return filled
