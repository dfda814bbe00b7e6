"""Columns of packs: which packs meet at one index, which of them is the costliest, and what ranks have in sum."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled


@compiled
def sort_columns(load: Ints, dp_size: int, count: int, homes: bool) -> tuple[Ints, Ints]:
    """Columns by falling cost: `columns[k, r]` (pack) and `column_of[pack]`.

    Cutting the sorted packs into groups of dp_size minimises the lockstep cost. With `homes`, packs are
    rank-major and stay on their rank: the k-th costliest of every rank share column k.
    """
    columns = np.empty((count, dp_size), dtype=np.int64)
    column_of = np.empty(dp_size * count, dtype=np.int64)
    if homes:
        for rank in range(dp_size):
            order = np.argsort(-load[rank * count : (rank + 1) * count], kind="mergesort")
            for k in range(count):
                pack = rank * count + order[k]
                columns[k, rank] = pack
                column_of[pack] = k
    else:
        order = np.argsort(-load, kind="mergesort")
        for position in range(dp_size * count):
            columns[position // dp_size, position % dp_size] = order[position]
            column_of[order[position]] = position // dp_size
    return columns, column_of


@compiled
def assign_ranks(columns: Ints, load: Ints, homes: bool) -> tuple[Ints, Ints]:
    """A rank for every pack, and the rank totals: each column's costliest pack to the lightest rank.

    Columns are taken by falling spread. With `homes` the packs are on their ranks already.
    """
    count, dp_size = columns.shape
    rank_of_pack = np.empty(count * dp_size, dtype=np.int64)
    totals = np.zeros(dp_size, dtype=np.int64)
    if homes:
        for k in range(count):
            for rank in range(dp_size):
                rank_of_pack[columns[k, rank]] = rank
                totals[rank] += load[columns[k, rank]]
        return rank_of_pack, totals
    spread = np.empty(count, dtype=np.int64)
    for k in range(count):
        inside = load[columns[k]]
        spread[k] = inside.max() - inside.min()
    for k in np.argsort(-spread, kind="mergesort"):
        falling = np.argsort(-load[columns[k]], kind="mergesort")
        rising = np.argsort(totals, kind="mergesort")
        for position in range(dp_size):
            pack = columns[k, falling[position]]
            rank_of_pack[pack] = rising[position]
            totals[rising[position]] += load[pack]
    return rank_of_pack, totals


@compiled
def costliest_but(columns: Ints, load: Ints, k: int, first: int, second: int) -> int:
    """The costliest pack of column k apart from two packs, or -1."""
    best = -1
    for rank in range(columns.shape[1]):
        pack = columns[k, rank]
        if pack != first and pack != second and (best < 0 or load[pack] > load[best]):
            best = pack
    return best


@compiled
def column_tops(columns: Ints, load: Ints) -> Ints:
    """The costliest pack of every column."""
    top = np.empty(len(columns), dtype=np.int64)
    for k in range(len(columns)):
        top[k] = costliest_but(columns, load, k, -1, -1)
    return top


@compiled
def excess_above(totals: Ints, level: int) -> int:
    """What the ranks have above `level`, in sum."""
    above = 0
    for rank in range(len(totals)):
        above += max(0, totals[rank] - level)
    return above


@compiled
def excess_gain(totals: Ints, level: int, rank_a: int, rank_b: int, change: int) -> int:
    """How much excess vanishes when `change` goes from one rank to another."""
    if rank_a == rank_b:
        return 0
    before = max(0, totals[rank_a] - level) + max(0, totals[rank_b] - level)
    after = max(0, totals[rank_a] - change - level) + max(0, totals[rank_b] + change - level)
    return int(before - after)


@compiled
def top_after(columns: Ints, load: Ints, top: int, k: int, pack: int, after: int) -> tuple[int, int]:
    """The costliest pack of column k and its cost when `pack` costs `after`."""
    if after >= load[top]:
        return pack, after
    if top != pack:
        return top, load[top]
    other = costliest_but(columns, load, k, pack, -1)
    if other < 0 or after > load[other]:
        return pack, after
    return other, load[other]
