"""Packers of rectangles: rows cut at the same positions on all ranks (ROLL, NeMo-RL, padding), or as in cosmos-rl.

An order is a function of the lengths of items. Ordered items are distributed over the queues of the ranks; one place in
all queues is a *position*. A micro-batch is extended by one position at a time, while the rectangles of all ranks stay
below the limits.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

import numpy as np

from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.packers.items import Items, group_by_bin


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


# ---- rectangles that stay small, as in cosmos-rl


def first(items: Items) -> list[list[int]]:
    """The oldest item opens a rectangle; then the item that keeps it smallest joins, while one fits.

    That is the item with the smallest `max(longest, L) * rows` below the cap, and among equals the oldest
    (`LoadBalancedDataset` of cosmos-rl, whose documentation calls it first in, first out).
    """
    bins = _smallest_then_oldest(items.longest, items.rows, items.capacity)
    return group_by_bin(bins, np.arange(len(bins)))


@compiled
def _smallest_then_oldest(longest: Ints, rows: Ints, capacity: int) -> Ints:
    """Rectangle of each item, numbered in the order of opening."""
    count = len(longest)
    bins = np.full(count, -1, dtype=np.int64)
    after = np.arange(1, count + 1)  # next item without a rectangle; skips placed items once they are passed
    lowest = count and rows.min()
    opened = 0
    for opener in range(count):
        if bins[opener] >= 0:
            continue
        widest, height = longest[opener], rows[opener]
        chosen = opener
        while chosen >= 0:
            bins[chosen] = opened
            widest, height = max(widest, longest[chosen]), height + (rows[chosen] if chosen != opener else 0)
            chosen = -1
            smallest = capacity + 1
            before = opener
            item = after[opener]
            # No item gives less than one with the fewest rows and no more width: the first such item ends the search.
            while item < count and smallest > (height + lowest) * widest:
                if bins[item] >= 0:
                    after[before] = after[item]
                else:
                    size = (height + rows[item]) * max(widest, longest[item])
                    if size < smallest:
                        smallest, chosen = size, item
                    before = item
                item = after[item]
        opened += 1
    return bins


def closest(items: Items) -> list[list[int]]:
    """The oldest item opens a rectangle; then the item that keeps it smallest joins, while one fits.

    That is the item with the smallest `max(longest, L) * rows` below the cap. Among equals the item closest in length
    to the longest joins, then the oldest, as in cosmos-rl.
    """
    waiting = _Waiting(items)
    bins: list[list[int]] = []
    for opener in range(len(items)):
        if opener in waiting.taken:
            continue
        waiting.take(opener)
        members = [opener]
        rows, longest = int(items.rows[opener]), int(items.longest[opener])
        while (item := waiting.closest_to(rows, longest, items.capacity)) is not None:
            waiting.take(item)
            members.append(item)
            rows += int(items.rows[item])
            longest = max(longest, int(items.longest[item]))
        bins.append(members)
    return bins


class _Waiting:
    """Items without a rectangle, by shape (longest, rows)."""

    def __init__(self, items: Items) -> None:
        self._shapes = list(zip(items.longest.tolist(), items.rows.tolist(), strict=True))
        self.taken: set[int] = set()
        self._by_shape: dict[tuple[int, int], deque[int]] = {}
        for item, shape in enumerate(self._shapes):
            self._by_shape.setdefault(shape, deque()).append(item)
        self._lengths: dict[int, list[int]] = {}
        for length, rows in sorted(self._by_shape):
            self._lengths.setdefault(rows, []).append(length)

    def closest_to(self, rows: int, longest: int, capacity: int) -> int | None:
        """Item that keeps a rectangle of `rows` x `longest` smallest; None if no item fits."""
        best: tuple[int, int, int] | None = None
        for height, lengths in self._lengths.items():
            # Among items with equal rows, only the neighbours of `longest` can be best: all lengths up to it make
            # equal rectangles, and above it the shortest makes the smallest.
            index = bisect.bisect_right(lengths, longest)
            for length in lengths[max(index - 1, 0) : index + 1]:
                size = max(longest, length) * (rows + height)
                key = (size, abs(length - longest), self._by_shape[length, height][0])
                if size <= capacity and (best is None or key < best):
                    best = key
        return None if best is None else best[2]

    def take(self, item: int) -> None:
        """Remove `item`."""
        self.taken.add(item)
        length, rows = shape = self._shapes[item]
        self._by_shape[shape].remove(item)
        if not self._by_shape[shape]:
            lengths = self._lengths[rows]
            del lengths[bisect.bisect_left(lengths, length)]
            del self._by_shape[shape]
