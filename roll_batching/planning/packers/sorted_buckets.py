"""Rows in one order, cut at the same positions on all ranks: ROLL's and NeMo-RL's dynamic batching, and plain padding.

An order is a function of the items' lengths; its rows are dealt to the ranks, and what stands at one place of the
ranks' queues is a *position*. Cutting extends a micro-batch position by position while every rank's rectangle stays
below the limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.packers.items import group_by_bin


def rising(lengths: Ints) -> Ints:
    """Short rows first, equal ones in the given order (ROLL)."""
    return np.argsort(lengths, kind="stable")


def falling(lengths: Ints) -> Ints:
    """Long rows first, equal ones in the given order (NeMo-RL)."""
    return np.argsort(-lengths, kind="stable")


def as_given(lengths: Ints) -> Ints:
    """Rows as they come."""
    return np.arange(len(lengths))


@dataclass(frozen=True)
class Limits:
    """How large a rectangle may be."""

    tokens: int | None
    """Most tokens; None: no cap."""
    rows: int | None
    """Most rows; None: any number."""
    width: int = 0
    """Every rectangle is at least this long, aligned."""


def cut_positions(longest: Ints, rows: Ints, alone: Flags, limits: Limits) -> list[list[int]]:
    """Positions of every micro-batch.

    Args:
        longest: int64[P], the longest aligned row of a position.
        rows: int64[P, dp], rows of every rank there (0: the rank has none).
        alone: bool[P], positions that share their micro-batch with no other.
        limits: of the shared rectangle: the most rows of any rank times the longest row.
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
    """The micro-batch of every position; limits below 0 are none."""
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
