"""Packers of rectangles as in cosmos-rl: prefer_first and prefer_closest."""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.packers.items import Items, group_by_bin


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
            at = bisect.bisect_right(lengths, longest)
            for length in lengths[max(at - 1, 0) : at + 1]:
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
