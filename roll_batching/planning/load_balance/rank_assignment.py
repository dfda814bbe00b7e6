"""Assign the packs of each index to ranks, so that blocks of ranks, and ranks inside them, have level totals.

A block is `width` consecutive ranks that wait for each other at every index; it takes the largest cost of its packs
there (`width` 1: every rank by itself; all ranks: lockstep). Packs of similar cost go to one block. Which block takes
which of them levels the times of blocks; inside a block the same levels the totals of ranks.
"""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.search_budget import SEARCH_BUDGET


def block_maxima(costs: Ints, width: int) -> Ints:
    """Largest of each `width` ranks (int64[dp / width, K]) of costs by rank and index (int64[dp, K])."""
    maxima: Ints = costs.reshape(-1, width, costs.shape[1]).max(axis=1)
    return maxima


def assign_packs(columns: Ints, load: Ints, width: int, *, comparisons: int | None = None) -> Ints:
    """Pack of each rank and index, int64[dp, K].

    `columns` (int64[K, dp]) are the packs of each index, `load` (int64[packs]) their costs. `comparisons` is the most
    made to level totals (None: `level_comparisons`); 0 keeps the first assignment.
    """
    most = SEARCH_BUDGET.level_comparisons if comparisons is None else comparisons
    count, ranks = columns.shape
    falling = np.take_along_axis(columns, np.argsort(-load[columns], axis=1, kind="stable"), axis=1)
    blocks = falling.reshape(count, ranks // width, width)
    chosen = _level(load[blocks[:, :, 0]], most)
    table = np.empty((ranks, count), dtype=np.int64)
    for block in range(ranks // width):
        packs = blocks[np.arange(count), chosen[block]]
        inside = _level(load[packs], most) if width > 1 else np.zeros((1, count), dtype=np.int64)
        table[block * width : (block + 1) * width] = np.take_along_axis(packs.T, inside, axis=0)
    return table


def _level(costs: Ints, comparisons: int) -> Ints:
    """For costs int64[K, n], which of the n each of n places takes at each index, int64[n, K]."""
    count, places = costs.shape
    if places == 1:
        return np.zeros((1, count), dtype=np.int64)
    table = np.empty((places, count), dtype=np.int64)
    totals = np.zeros(places, dtype=np.int64)
    # The costliest at an index goes to the place with the smallest total, indices by falling spread.
    for k in np.argsort(costs.min(axis=1) - costs.max(axis=1), kind="stable"):
        by_total, falling = np.argsort(totals, kind="stable"), np.argsort(-costs[k], kind="stable")
        table[by_total, k] = falling
        totals[by_total] += costs[k, falling]
    # Comparing the costliest rank with all others takes too long for many ranks or indices.
    all_ranks = costs.size <= SEARCH_BUDGET.level_all_ranks_cells
    exchanged = _level_ranks(np.take_along_axis(costs.T, table, axis=0), comparisons, all_ranks)
    return np.take_along_axis(table, exchanged, axis=0)


@compiled
def _level_ranks(table: Ints, comparisons: int, all_ranks: bool) -> Ints:
    """Exchange packs at one index between ranks until the rank totals are level.

    `table` is int64[dp, K], the cost of each rank's pack at each index; returns int64[dp, K], for each cell the rank
    whose pack goes there. An index keeps its packs, so the lockstep cost stays. The costliest rank exchanges with the
    rank where that helps most, or with the cheapest (`all_ranks` False), until nothing helps.
    """
    ranks, count = table.shape
    origin = np.empty((ranks, count), dtype=np.int64)
    total = np.zeros(ranks, dtype=np.int64)
    for rank in range(ranks):
        for k in range(count):
            origin[rank, k] = rank
            total[rank] += table[rank, k]
    while comparisons > 0:
        top = np.argmax(total)
        best_gain = 0
        best_rank = -1
        best_k = -1
        for rank in range(ranks) if all_ranks else range(np.argmin(total), np.argmin(total) + 1):
            comparisons -= count
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
