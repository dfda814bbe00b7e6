"""Columns of packs dealt to ranks: level totals for the ranks that wait for each other once per step.

Ranks stand in blocks of `width` neighbours that wait for each other at every index, so that a block takes the
largest cost among its packs there (`width` 1: every rank for itself; all ranks: one block, lockstep). Packs of
like cost go to one block; which block takes which of them levels the blocks' times, and inside a block the
ranks' totals.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled

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


def _level(costs: Ints, budget: int) -> Ints:
    """For costs int64[K, n] the one that each of n places takes at each index, int64[n, K]."""
    count, places = costs.shape
    if places == 1:
        return np.zeros((1, count), dtype=np.int64)
    table = np.empty((places, count), dtype=np.int64)
    totals = np.zeros(places, dtype=np.int64)
    # The costliest of an index to the lightest place, indices by falling spread.
    for k in np.argsort(costs.min(axis=1) - costs.max(axis=1), kind="stable"):
        lightest, falling = np.argsort(totals, kind="stable"), np.argsort(-costs[k], kind="stable")
        table[lightest, k] = falling
        totals[lightest] += costs[k, falling]
    exchanged = _level_ranks(np.take_along_axis(costs.T, table, axis=0), budget)
    return np.take_along_axis(table, exchanged, axis=0)


@compiled
def _level_ranks(table: Ints, budget: int) -> Ints:
    """Exchange packs of one column between ranks until the rank totals are level.

    `table` is int64[dp, K], the cost of each rank's pack at each index; returns int64[dp, K], for each place
    the rank whose pack goes there. Columns keep their packs, so the lockstep cost stays. The costliest rank
    exchanges with the one where it helps most, until nothing helps; `budget` bounds the comparisons.
    """
    ranks, count = table.shape
    origin = np.empty((ranks, count), dtype=np.int64)
    total = np.zeros(ranks, dtype=np.int64)
    for rank in range(ranks):
        for k in range(count):
            origin[rank, k] = rank
            total[rank] += table[rank, k]
    while budget > 0:
        top = np.argmax(total)
        best_gain = 0
        best_rank = -1
        best_k = -1
        # Against the lightest rank alone where looking at all of them would cost too much.
        everyone = ranks * count <= 65536
        for rank in range(ranks) if everyone else range(np.argmin(total), np.argmin(total) + 1):
            budget -= count
            for k in range(count):
                change = table[origin[top, k], k] - table[origin[rank, k], k]
                if change > 0:
                    gain = total[top] - max(total[top] - change, total[rank] + change)
                    if gain > best_gain:
                        best_gain = gain
                        best_rank = rank
                        best_k = k
        if best_rank < 0:
            break
        change = table[origin[top, best_k], best_k] - table[origin[best_rank, best_k], best_k]
        total[top] -= change
        total[best_rank] += change
        swap = origin[top, best_k]
        origin[top, best_k] = origin[best_rank, best_k]
        origin[best_rank, best_k] = swap
    return origin
