"""Packs in columns: all ranks have the same number of packs.

A column is the micro-batches of one index: blocks of several sizes that cover all ranks. Where all ranks wait for each
other at every micro-batch, the step takes the sum of the slowest blocks, so the blocks of a column should take equally
long. In a pipeline columns serve where every rank needs the same number of packs (virtual stages, experts, sharded
parameters), and compete with other placements elsewhere; short columns at the ends fill and drain it quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.dynamic_cp.choices import PlacedPacks, SizeChoices
from roll_batching.planning.dynamic_cp.column_search import search_columns
from roll_batching.planning.dynamic_cp.column_state import (
    ColumnState,
    UnitTables,
    add_unit,
    empty_state,
    fill_column,
    largest_time,
    tables_of,
)
from roll_batching.planning.dynamic_cp.joint import assign_ranks, columns_makespan
from roll_batching.planning.pipeline.ordering import order_for_pipeline, pipeline_makespan
from roll_batching.planning.pipeline.schedule import StaticSchedule, group_size_of, legal_count, static_schedule

TARGET_RATIO = 106
"""Of the times of a column that are tried, each is this many percent of the next shorter one."""
FULL_PERCENTS = (105, 100, 90, 75, 60, 50)
"""Times of a column that are tried, in percent of a full pack of the longest sequence left."""
MOST_STEPS = 150_000_000
"""Comparisons of units with blocks in all tries; with more units and ranks fewer times are tried."""
STARTS, PIPELINE_STARTS = 4, 6
"""Placements, with different numbers of columns, that a short search improves."""
SHORT_STEPS, LONG_STEPS, PIPELINE_LONG_STEPS = 20_000, 100_000, 150_000
"""Most steps of the short search from each start, and of the long search from the best one."""
SHORT_STEPS_PER_UNIT, LONG_STEPS_PER_UNIT = 80, 600
"""Steps of the short and the long search per unit, where that gives fewer."""
START_ORDERS = 500
"""Orders of columns that are tried for each start in a pipeline."""


@dataclass
class Columns:
    """Pack of each unit and level of each pack, by column."""

    time: int
    count: int
    pack_of: Ints
    level: Ints


def place_columns(choices: SizeChoices, constraints: PlanConstraints) -> PlacedPacks:
    """The fastest of several placements in columns, which differ in the number and the times of columns."""
    tables, order = tables_of(choices, constraints.dp_size)
    if constraints.pp_size == 1:
        candidates, long_steps = starts(tables)[:STARTS], LONG_STEPS
    else:
        candidates, long_steps = _starts_in_pipeline(tables, constraints)[:PIPELINE_STARTS], PIPELINE_LONG_STEPS
    short_steps = min(SHORT_STEPS, SHORT_STEPS_PER_UNIT * len(order))
    searched = [_search(tables, start, constraints, short_steps, seed) for seed, start in enumerate(candidates)]
    best = min(searched, key=lambda columns: columns.time)
    seed = STARTS if constraints.pp_size == 1 else PIPELINE_STARTS
    best = _search(tables, best, constraints, min(long_steps, LONG_STEPS_PER_UNIT * len(order)), seed)
    return packs_of(best, order, choices, constraints)


def _search(tables: UnitTables, start: Columns, constraints: PlanConstraints, steps: int, seed: int) -> Columns:
    """Columns after a search that lowers the sum of their times, or the makespan of a pipeline."""
    state = state_of(tables, start.pack_of, start.level, start.count)
    schedule = schedule_of(start.count, constraints) if constraints.pp_size > 1 else None
    time, pack_of, level = search_columns(tables, state, schedule, steps, seed)
    return Columns(time, start.count, pack_of, level)


def _starts_in_pipeline(tables: UnitTables, constraints: PlanConstraints) -> list[Columns]:
    """Placements without a search in an order with a short makespan, the fastest of each legal number of columns."""
    candidates = [_with_legal_count(tables, start, constraints) for start in starts(tables)]
    more = [_with_legal_count(tables, start, constraints, extra) for start in candidates[:4] for extra in (2, 4, 8)]
    candidates = sorted((_ordered(tables, start, constraints) for start in candidates + more), key=lambda c: c.time)
    by_count: dict[int, Columns] = {}
    for start in candidates:
        by_count.setdefault(start.count, start)
    return list(by_count.values())


def starts(tables: UnitTables) -> list[Columns]:
    """Placements without a search, the fastest of each number of columns, by time."""
    count, ranks = tables.times.shape[1], tables.ranks
    every = np.arange(count)
    smallest = tables.smallest
    mean = int((tables.times[smallest, every] << smallest).sum()) // ranks + tables.least
    tokens = int((tables.slots[smallest, every]).sum())
    fewest = max(1, tokens // (int(tables.caps[0]) * ranks))
    longest = int((tables.times[-1] + tables.fixed[-1]).max())
    # No time is tried below half of the longest unit's, or that would take over about three times the fewest columns.
    least = max(longest // 2, mean // (3 * fewest + 8), tables.least)
    best: dict[int, Columns] = {}
    steps = 0
    targets, target = [], 2 * mean
    while target >= least:
        targets.append(target)
        target = target * 100 // TARGET_RATIO
    # The times that fill the fewest columns, with 8% to spare, come first: with many units not all are tried.
    targets.sort(key=lambda target: abs(target - mean * 108 // (100 * fewest)))
    tries = [(target, 0) for target in targets] + [(0, percent) for percent in FULL_PERCENTS]
    if len(tries) > 1 and count * min(ranks, count) * fewest * len(tries) > MOST_STEPS:
        tries = [tries[0], *tries[-len(FULL_PERCENTS) :], *tries[1 : -len(FULL_PERCENTS)]]
    capacity = min(count, 4 * fewest + 2 * count // ranks + 16)  # a try that needs more columns is given up
    for target, percent in tries:
        state = empty_state(tables, capacity)
        columns = int(fill_columns(tables, state, target, percent))
        if columns > 0:
            time = int(state.maxima[:columns].sum())
            if columns not in best or time < best[columns].time:
                best[columns] = Columns(time, columns, state.pack_of, state.level[: columns * ranks].copy())
        steps += count * min(ranks, count) * max(columns, 1)
        if steps > MOST_STEPS and best:
            break
    if not best:  # one unit in each column always fits
        state = empty_state(tables, count)
        columns = int(fill_columns(tables, state, targets[0], 0))
        best[columns] = Columns(int(state.maxima[:columns].sum()), columns, state.pack_of, state.level)
    return sorted(best.values(), key=lambda columns: (columns.time, columns.count))


@compiled
def fill_columns(tables: UnitTables, state: ColumnState, target: int, percent: int) -> int:
    """Number of columns that hold all units, filled one after the other; 0: the state has too few.

    Columns take about `target`, or `percent` of the time of a full pack of the longest unit left.
    """
    count = tables.times.shape[1]
    units = np.arange(count)
    longest, unplaced = 0, count
    for column in range(len(state.packs)):
        while units[longest] < 0:
            longest += 1
        unit = units[longest]
        wanted = target
        if percent > 0:
            level = tables.smallest[unit]
            full = tables.fixed[level] + tables.times[level, unit] * tables.caps[level] // tables.slots[level, unit]
            wanted = full * percent // 100
        unplaced -= fill_column(tables, state, column, units, wanted)
        if unplaced == 0:
            return column + 1
    return 0


def state_of(tables: UnitTables, pack_of: Ints, level: Ints, columns: int) -> ColumnState:
    """State of units in packs of given levels."""
    state: ColumnState = empty_state(tables, columns)
    _set_packs(tables, state, pack_of, level)
    return state


@compiled
def _set_packs(tables: UnitTables, state: ColumnState, pack_of: Ints, level: Ints) -> None:
    for unit in range(len(pack_of)):
        pack = pack_of[unit]
        column = pack // tables.ranks
        if state.first[pack] < 0:
            state.level[pack], state.time[pack] = level[pack], tables.fixed[level[pack]]
            state.packs[column] = max(state.packs[column], pack % tables.ranks + 1)
        add_unit(tables, state, unit, pack)
    for column in range(len(state.packs)):
        state.maxima[column] = largest_time(tables, state, column)


def packs_of(columns: Columns, order: Ints, choices: SizeChoices, constraints: PlanConstraints) -> PlacedPacks:
    """Packs on ranks, with fillers for ranks without a pack, and the time of the step."""
    ranks, count = constraints.dp_size, columns.count
    by_pack = np.argsort(columns.pack_of, kind="stable")
    packs, starts_of = np.unique(columns.pack_of[by_pack], return_index=True)
    units = [part.tolist() for part in np.split(order[by_pack], starts_of[1:])]
    levels, of_column = columns.level[packs], packs // ranks
    idle = ranks - np.bincount(of_column, weights=1 << levels, minlength=count).astype(np.int64)
    units += [[] for _ in range(int(idle.sum()))]
    levels = np.concatenate([levels, np.zeros(int(idle.sum()), dtype=np.int64)])
    of_column = np.concatenate([of_column, np.repeat(np.arange(count), idle)])
    times = choices.times_of(units, levels)
    sequence = np.lexsort((-times, -levels, of_column))
    units = [units[pack] for pack in sequence.tolist()]
    levels, of_column, times = levels[sequence], of_column[sequence], times[sequence]
    first_ranks = assign_ranks(of_column, levels, times, ranks)
    sizes = choices.sizes[levels]
    schedule = schedule_of(count, constraints)
    makespan = columns_makespan(of_column, first_ranks, sizes, times, ranks, constraints.lockstep_ranks, schedule)
    step_time = makespan // 3 // constraints.vpp_size  # of a pack's time a third is the forward pass
    return PlacedPacks(units, first_ranks.tolist(), levels.tolist(), step_time)


def schedule_of(count: int, constraints: PlanConstraints) -> StaticSchedule:
    """Megatron's schedule of `count` micro-batches."""
    return static_schedule(constraints.pp_size, count, constraints.vpp_size, group_size_of(count, constraints))


def _with_legal_count(tables: UnitTables, start: Columns, constraints: PlanConstraints, extra: int = 0) -> Columns:
    """Columns with empty ones added, to a legal number."""
    count = legal_count(start.count + extra, constraints)
    level = np.concatenate([start.level, np.zeros((count - start.count) * tables.ranks, dtype=np.int64)])
    return Columns(start.time, count, start.pack_of, level)


def _ordered(tables: UnitTables, start: Columns, constraints: PlanConstraints) -> Columns:
    """Columns in an order with a short makespan, and three times that."""
    maxima = state_of(tables, start.pack_of, start.level, start.count).maxima
    group_size = group_size_of(start.count, constraints)
    sizes: dict[str, Any] = {"stages": constraints.pp_size, "chunks": constraints.vpp_size, "group_size": group_size}
    order = order_for_pipeline(maxima, **sizes, tries=START_ORDERS)
    position = np.empty(start.count, dtype=np.int64)
    position[order] = np.arange(start.count)
    pack_of = position[start.pack_of // tables.ranks] * tables.ranks + start.pack_of % tables.ranks
    level = start.level.reshape(start.count, -1)[order].reshape(-1)
    return Columns(pipeline_makespan(maxima[order], **sizes), start.count, pack_of, level)
