"""Sorted rows cut at the same positions on all ranks: dynamic batching of ROLL and NeMo-RL, and padding.

An order is a function of the lengths of items. Ordered items are distributed over the queues of the ranks; one place in
all queues is a *position*. A micro-batch is extended by one position at a time, while the rectangles of all ranks stay
below the limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.packers.items import group_by_bin


def rising(lengths: Ints) -> Ints:
    """Order by rising length, equal ones in the given order (ROLL)."""
    return np.argsort(lengths, kind="stable")


def falling(lengths: Ints) -> Ints:
    """Order by falling length, equal ones in the given order (NeMo-RL)."""
    return np.argsort(-lengths, kind="stable")


def as_given(lengths: Ints) -> Ints:
    """The given order."""
    return np.arange(len(lengths))


@dataclass(frozen=True)
class Limits:
    """Limits of a rectangle."""

    tokens: int | None
    """Most tokens; None: no limit."""
    rows: int | None
    """Most rows; None: no limit."""
    width: int = 0
    """Least row length, aligned."""


def cut_positions(longest: Ints, rows: Ints, alone: Flags, limits: Limits) -> list[list[int]]:
    """Positions of each micro-batch.

    Args:
        longest: int64[P], longest aligned row of each position.
        rows: int64[P, dp], rows of each position and rank (0: the rank has none there).
        alone: bool[P], positions that share their micro-batch with no other.
        limits: limits of the shared rectangle, the most rows of any rank times the longest row.
    """
    bins = _cut(
        longest,
        rows,
        alone.astype(np.int64),
        -1 if limits.tokens is None else limits.tokens,
        -1 if limits.rows is None else limits.rows,
        limits.width,
    )
    return group_by_bin(bins, np.arange(len(bins)))


@compiled
def _cut(longest: Ints, rows: Ints, alone: Ints, most_tokens: int, most_rows: int, width: int) -> Ints:
    """Micro-batch of each position; a limit below 0 means no limit."""
    bins = np.empty(len(longest), dtype=np.int64)
    current = -1
    closed = True
    height = np.zeros(rows.shape[1], dtype=np.int64)
    widest = 0
    for position in range(len(longest)):
        wider = max(widest, longest[position], width)
        grown = height + rows[position]
        tallest = grown.max()
        fits = (most_tokens < 0 or tallest * wider <= most_tokens) and (most_rows < 0 or tallest <= most_rows)
        if closed or alone[position] or not fits:
            current += 1
            height = rows[position].copy()
            widest = longest[position]
        else:
            height = grown
            widest = max(widest, longest[position])
        bins[position] = current
        closed = alone[position] == 1
    return bins
