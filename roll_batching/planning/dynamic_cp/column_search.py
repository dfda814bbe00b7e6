"""Threshold accepting on columns of packs, for the sum of their times or the makespan of a pipeline.

Steps exchange or move units between packs, rebuild one or two columns from their units with other sizes, and, in a
pipeline, change the order of columns. The threshold falls to zero; all values are integers, so that equal inputs give
equal plans.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled, draw, next_random, seed_state
from roll_batching.planning.dynamic_cp.column_state import (
    ColumnState,
    UnitTables,
    add_unit,
    empty_state,
    fill_column,
    largest_time,
    remove_unit,
)
from roll_batching.planning.pipeline.ordering import makespan_in_order
from roll_batching.planning.pipeline.schedule import StaticSchedule

THRESHOLD_DIVISOR = 60
"""The first threshold is 1/n of the mean time of a column."""
REBUILD_PERIOD = 64
"""Every n-th step rebuilds columns; such a step costs about as much as the others together."""
LEAST_PERCENT, PERCENTS = 70, 36
"""Rebuilt columns aim at `LEAST_PERCENT` to `LEAST_PERCENT + PERCENTS - 1` percent of their times."""
SWAP_PERIOD = 8
"""Every n-th step in a pipeline exchanges two columns."""


class Passes(NamedTuple):
    """A `StaticSchedule` as int64 arrays, empty without a pipeline, and arrays for its makespan."""

    micro_batch: Ints
    backward: Ints
    previous: Ints
    awaited: Ints
    order: Ints
    end: Ints


def search_columns(
    tables: UnitTables, state: ColumnState, schedule: StaticSchedule | None, steps: int, seed: int
) -> tuple[int, Ints, Ints]:
    """(time, pack of each unit, level of each pack) of the best columns found; `state` is changed.

    The time is the sum over columns, or with `schedule` three times the makespan of a pipeline. Columns stand in
    the order of execution.
    """
    order, none = np.arange(len(state.packs)), np.zeros(0, dtype=np.int64)
    passes = Passes(none, none, none, none, order, none)
    if schedule is not None:
        end = np.empty(len(schedule.previous), dtype=np.int64)
        passes = Passes(schedule.micro_batch, schedule.backward, schedule.previous, schedule.awaited, order, end)
    pack_of, level = state.pack_of.copy(), state.level.copy()
    threshold = int(state.maxima.sum()) // (THRESHOLD_DIVISOR * len(state.maxima))
    time = _search(tables, state, passes, steps, threshold, seed, pack_of, level)
    return int(time), pack_of, level


@compiled
def _step_time(maxima: Ints, passes: Passes) -> int:
    """Sum of the times of columns; of a pipeline, three times its makespan: backward passes count twice the forward."""
    if len(passes.previous) > 0:
        micro_batch, backward = passes.micro_batch, passes.backward
        times = maxima.reshape(1, -1)  # one row: all chunks take equally long
        row = np.zeros_like(micro_batch)
        return int(
            makespan_in_order(
                times, passes.order, micro_batch, row, backward, passes.previous, passes.awaited, passes.end
            )
        )
    total = 0
    for time in maxima:
        total += time
    return total


@compiled
def _search(
    tables: UnitTables,
    state: ColumnState,
    passes: Passes,
    steps: int,
    first_threshold: int,
    seed: int,
    best_pack_of: Ints,
    best_level: Ints,
) -> int:
    """Runs the search; writes the best packs and returns their time."""
    columns = len(state.packs)
    saved = empty_state(tables, columns)
    copy_state(state, saved)
    best = current = _step_time(state.maxima, passes)
    random = seed_state(seed)
    for done in range(steps):
        most = current + first_threshold * (steps - done) // steps
        random = next_random(random)
        if done % REBUILD_PERIOD != 0 and (len(passes.previous) == 0 or done % SWAP_PERIOD != 1):
            random, time, a, b = _try_exchange(tables, state, passes, current, most, random)
        else:
            a = draw(random, columns)
            random = next_random(random)
            b = draw(random, columns)
            if done % REBUILD_PERIOD == 0:
                random, time = _try_rebuild(tables, state, saved, passes, a, b, most, random)
            else:
                time = _try_swap(tables, state, passes, a, b, most)
        if time < 0:
            continue
        copy_column(tables, state, saved, a)
        copy_column(tables, state, saved, b)
        current = time
        if current < best:
            best = current
            best_pack_of[:] = state.pack_of
            best_level[:] = state.level
    return best


@compiled
def _try_rebuild(
    tables: UnitTables, state: ColumnState, saved: ColumnState, passes: Passes, a: int, b: int, most: int, random: int
) -> tuple[int, int]:
    """(state of the generator, time) after a rebuild of two columns; the time is -1 if they are kept."""
    random, is_rebuilt = _rebuild(tables, state, a, b, random)
    time = -1
    if is_rebuilt:
        time = _step_time(state.maxima, passes)
    if time < 0 or time > most:
        copy_column(tables, saved, state, a)
        copy_column(tables, saved, state, b)
        return random, -1
    return random, time


@compiled
def _try_swap(tables: UnitTables, state: ColumnState, passes: Passes, a: int, b: int, most: int) -> int:
    """Time after two columns changed places; -1 if they are kept."""
    if a == b:
        return -1
    maxima = state.maxima
    maxima[a], maxima[b] = maxima[b], maxima[a]
    time = _step_time(maxima, passes)
    maxima[a], maxima[b] = maxima[b], maxima[a]
    if time > most:
        return -1
    _exchange_columns(tables, state, a, b)
    return time


@compiled
def _try_exchange(
    tables: UnitTables, state: ColumnState, passes: Passes, current: int, most: int, random: int
) -> tuple[int, int, int, int]:
    """(state of the generator, time, two columns) after units changed packs; the time is -1 if they are kept."""
    random, unit, slow, other, pack = _draw_exchange(tables, state, random)
    if pack < 0 or pack == slow or not _can_exchange(tables, state, unit, slow, other, pack):
        return random, -1, 0, 0
    a, b = slow // tables.ranks, pack // tables.ranks
    before_a, before_b = state.maxima[a], state.maxima[b]
    _exchange_units(tables, state, unit, slow, other, pack)
    state.maxima[a], state.maxima[b] = largest_time(tables, state, a), largest_time(tables, state, b)
    if len(passes.previous) == 0:
        time = current + state.maxima[a] - before_a
        if b != a:
            time += state.maxima[b] - before_b
    elif state.maxima[a] == before_a and state.maxima[b] == before_b:
        time = current
    else:
        time = _step_time(state.maxima, passes)
    if time > most:
        _exchange_units(tables, state, unit, pack, other, slow)
        state.maxima[a], state.maxima[b] = before_a, before_b
        return random, -1, a, b
    return random, time, a, b


@compiled
def _draw_exchange(tables: UnitTables, state: ColumnState, random: int) -> tuple[int, int, int, int, int]:
    """(state of the generator, unit, its pack, another unit or -1, pack); the last is -1 if there is no exchange.

    Mostly the unit is of the slowest pack of a column, and the other one is a little shorter.
    """
    columns, count = len(state.packs), len(state.pack_of)
    a = draw(random, columns)
    if state.packs[a] == 0:
        return random, 0, 0, -1, -1
    random = next_random(random)
    slow = _slowest(tables, state, a)
    if random % 4 == 0:
        slow = a * tables.ranks + draw(random, state.packs[a])
    random = next_random(random)
    unit = state.first[slow]
    for _ in range(draw(random, 8)):
        unit = state.following[unit]
        if unit < 0:
            unit = state.first[slow]
    random = next_random(random)
    if random % 8 != 0:
        reach = 1 << (random % 11)
        random = next_random(random)
        other = unit + 1 + draw(random, min(reach, count))
        if random % 16 == 0:
            other = unit - 1 - draw(random, 4)
        if other >= count or other < 0:
            return random, unit, slow, -1, -1
        return random, unit, slow, other, state.pack_of[other]
    random = next_random(random)
    b = draw(random, columns)
    if state.packs[b] == 0:
        return random, unit, slow, -1, -1
    random = next_random(random)
    if state.first[slow] == unit and state.following[unit] < 0:
        return random, unit, slow, -1, -1  # packs do not become empty
    return random, unit, slow, -1, b * tables.ranks + draw(random, state.packs[b])


@compiled
def _slowest(tables: UnitTables, state: ColumnState, column: int) -> int:
    start = column * tables.ranks
    slow = start
    for pack in range(start, start + state.packs[column]):
        if state.time[pack] > state.time[slow]:
            slow = pack
    return slow


@compiled
def _can_exchange(tables: UnitTables, state: ColumnState, unit: int, pack: int, other: int, other_pack: int) -> bool:
    """Whether packs stay below the cap if they exchange two units; `other` -1: one unit moves."""
    own, its = state.level[pack], state.level[other_pack]
    growth, its_growth = -tables.slots[own, unit], tables.slots[its, unit]
    if other >= 0:
        growth += tables.slots[own, other]
        its_growth -= tables.slots[its, other]
    return bool(
        state.used[pack] + growth <= tables.caps[own] and state.used[other_pack] + its_growth <= tables.caps[its]
    )


@compiled
def _exchange_units(tables: UnitTables, state: ColumnState, unit: int, pack: int, other: int, other_pack: int) -> None:
    """Moves `unit` from `pack` to `other_pack`, and `other` back unless it is -1."""
    remove_unit(tables, state, unit)
    if other >= 0:
        remove_unit(tables, state, other)
        add_unit(tables, state, other, pack)
    add_unit(tables, state, unit, other_pack)


@compiled
def _exchange_columns(tables: UnitTables, state: ColumnState, a: int, b: int) -> None:
    """Exchanges the packs of two columns, and with them the order in which a pipeline computes them."""
    for place in range(max(state.packs[a], state.packs[b])):
        pack_a, pack_b = a * tables.ranks + place, b * tables.ranks + place
        # Packs that are not in use may hold units of earlier contents.
        if place >= state.packs[a]:
            state.first[pack_a] = -1
        if place >= state.packs[b]:
            state.first[pack_b] = -1
        for values in (state.level, state.time, state.used, state.first):
            values[pack_a], values[pack_b] = values[pack_b], values[pack_a]
        for pack in (pack_a, pack_b):
            unit = state.first[pack]
            while unit >= 0:
                state.pack_of[unit] = pack
                unit = state.following[unit]
    for counts in (state.packs, state.maxima):
        counts[a], counts[b] = counts[b], counts[a]


@compiled
def copy_column(tables: UnitTables, source: ColumnState, to: ColumnState, column: int) -> None:
    """Copies a column's packs and their units."""
    start = column * tables.ranks
    for pack in range(start, start + source.packs[column]):
        to.level[pack], to.time[pack], to.used[pack] = source.level[pack], source.time[pack], source.used[pack]
        to.first[pack] = source.first[pack]
        unit = source.first[pack]
        while unit >= 0:
            to.pack_of[unit], to.following[unit] = pack, source.following[unit]
            unit = source.following[unit]
    to.packs[column], to.maxima[column] = source.packs[column], source.maxima[column]


@compiled
def copy_state(source: ColumnState, to: ColumnState) -> None:
    """Copies all arrays."""
    for column in range(len(source.packs)):
        to.packs[column], to.maxima[column] = source.packs[column], source.maxima[column]
    for pack in range(len(source.level)):
        to.level[pack], to.time[pack], to.used[pack] = source.level[pack], source.time[pack], source.used[pack]
        to.first[pack] = source.first[pack]
    for unit in range(len(source.pack_of)):
        to.pack_of[unit], to.following[unit] = source.pack_of[unit], source.following[unit]


@compiled
def _rebuild(tables: UnitTables, state: ColumnState, a: int, b: int, random: int) -> tuple[int, bool]:
    """Fills columns `a` and `b` anew with their units; returns the generator's state and whether all fit."""
    units = _units_of(tables, state, a, b)
    random = next_random(random)
    unplaced = len(units)
    target = other_target = state.maxima[a] * (LEAST_PERCENT + draw(random, PERCENTS)) // 100
    if a != b:
        random = next_random(random)
        other_target = state.maxima[b] * (LEAST_PERCENT + draw(random, PERCENTS)) // 100
    unplaced -= fill_column(tables, state, a, units, target)
    if a != b:
        if unplaced == 0:  # nothing remains for column b
            return random, False
        unplaced -= fill_column(tables, state, b, units, other_target)
    if unplaced == 0:
        return random, True
    for unit in units:  # the rest joins the fastest packs with room
        if unit < 0:
            continue
        pack = _fastest_with_room(tables, state, unit, a, b)
        if pack < 0:
            return random, False
        add_unit(tables, state, unit, pack)
    state.maxima[a], state.maxima[b] = largest_time(tables, state, a), largest_time(tables, state, b)
    return random, True


@compiled
def _units_of(tables: UnitTables, state: ColumnState, a: int, b: int) -> Ints:
    """Units of two columns, or of one, ascending."""
    units = np.empty(len(state.pack_of), dtype=np.int64)
    count = 0
    for column in (a, b):
        for pack in range(column * tables.ranks, column * tables.ranks + state.packs[column]):
            unit = state.first[pack]
            while unit >= 0:
                units[count] = unit
                count += 1
                unit = state.following[unit]
        if a == b:
            break
    inside = units[:count].copy()
    inside.sort()
    return inside


@compiled
def _fastest_with_room(tables: UnitTables, state: ColumnState, unit: int, a: int, b: int) -> int:
    """The pack of two columns that exceeds the time of its column least with the unit; -1: none has room."""
    best, best_growth = -1, 0
    for column in (a, b):
        for pack in range(column * tables.ranks, column * tables.ranks + state.packs[column]):
            level = state.level[pack]
            if state.used[pack] + tables.slots[level, unit] > tables.caps[level]:
                continue
            growth = state.time[pack] + tables.times[level, unit] - state.maxima[column]
            if best < 0 or growth < best_growth:
                best, best_growth = pack, growth
    return best
