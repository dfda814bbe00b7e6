"""Columns of packs dealt to ranks: level totals for the ranks that wait for each other once per step.

Ranks stand in blocks of `width` neighbours that wait for each other at every index, so that a block takes the
largest cost among its packs there (`width` 1: every rank for itself; all ranks: one block, lockstep). Packs of
like cost go to one block; which block takes which of them levels the blocks' times, and inside a block the
ranks' totals.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.load_balance.columns import assign_ranks
from roll_batching.planning.load_balance.initial_placement import level_ranks

LEVEL_BUDGET = 4_000_000
"""Comparisons made to level totals beyond the first assignment."""


def block_tops(table: Ints, width: int) -> Ints:
    """The largest of every `width` rows (int64[dp / width, K]) of costs by rank and index (int64[dp, K])."""
    tops: Ints = table.reshape(-1, width, table.shape[1]).max(axis=1)
    return tops


def deal_columns(columns: Ints, load: Ints, width: int, *, budget: int = LEVEL_BUDGET) -> Ints:
    """The pack of every rank and index, int64[dp, K].

    `columns` (int64[K, dp]) are the packs that share an index, `load` (int64[packs]) their costs. A `budget` of 0
    leaves it at the first assignment.
    """
    count, ranks = columns.shape
    falling = np.take_along_axis(columns, np.argsort(-load[columns], axis=1, kind="stable"), axis=1)
    cells = falling.reshape(count, ranks // width, width)
    chosen = _level(load[cells[:, :, 0]], budget)
    table = np.empty((ranks, count), dtype=np.int64)
    for block in range(ranks // width):
        packs = cells[np.arange(count), chosen[block]]
        inside = _level(load[packs], budget) if width > 1 else np.zeros((1, count), dtype=np.int64)
        table[block * width : (block + 1) * width] = np.take_along_axis(packs.T, inside, axis=0)
    return table


def level_table(table: Ints, load: Ints, *, budget: int = LEVEL_BUDGET) -> Ints:
    """`table` (int64[dp, K]) with packs of one index exchanged between ranks until totals are level."""
    return np.take_along_axis(table, level_ranks(load[table], budget), axis=0)


def _level(costs: Ints, budget: int) -> Ints:
    """For costs int64[K, n] the one that each of n places takes at each index, int64[n, K]."""
    count, places = costs.shape
    if places == 1:
        return np.zeros((1, count), dtype=np.int64)
    numbers = np.arange(count * places, dtype=np.int64).reshape(count, places)
    place_of, _ = assign_ranks(numbers, np.ascontiguousarray(costs).reshape(-1), False)
    table = np.empty((places, count), dtype=np.int64)
    table[place_of[numbers], np.arange(count)[:, None]] = np.arange(places)
    exchanged = level_ranks(np.take_along_axis(costs.T, table, axis=0), budget)
    return np.take_along_axis(table, exchanged, axis=0)
