"""Number partitioning: Karmarkar-Karp, and the DP balance of a rollout batch."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.costs import DEFAULT_COST, sequence_costs
from roll_batching.planning.inputs import Ints, as_lengths


def karmarkar_karp(weights: ArrayLike, k: int, *, equal_size: bool = False) -> list[list[int]]:
    """Partition items into `k` parts of near-equal weight by largest differencing.

    `weights` is int[n], none negative. With `equal_size` all parts hold n / k items (n must be divisible).
    Parts come by their first item; items in the given order; parts may be empty when n < k. Deterministic.
    """
    array = np.asarray(weights)
    if array.ndim != 1 or array.dtype.kind not in "iu" or np.any(array < 0):
        raise PlanError("karmarkar_karp: weights must be a one-dimensional array of integers of at least 0")
    if k < 1:
        raise PlanError(f"karmarkar_karp: k={k} must be at least 1")
    if equal_size and len(array) % k:
        raise PlanError(f"karmarkar_karp: {len(array)} items cannot form {k} parts of equal size")
    values = [int(value) for value in array]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    State = tuple[int, int, list[tuple[int, list[int]]]]
    heap: list[State] = []
    if equal_size:
        for start in range(0, len(order), k):
            parts = [(values[i], [i]) for i in order[start : start + k]]
            heap.append((parts[-1][0] - parts[0][0], start, parts))
    else:
        for i in order:
            heap.append((-values[i], i, [(values[i], [i])] + [(0, []) for _ in range(k - 1)]))
    heapq.heapify(heap)
    tie = len(order)
    while len(heap) > 1:
        _, _, left = heapq.heappop(heap)
        _, _, right = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(left, reversed(right), strict=True)]
        merged.sort(key=lambda part: -part[0])
        tie += 1
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    groups = [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(k)]
    return sorted(groups, key=lambda items: (not items, items[:1]))


def batch_balance(lengths: ArrayLike, dp_size: int, *, cost: Any = None) -> Ints:
    """A `home_rank` (int64[n]) of near-equal cost per DP rank, ROLL's way.

    Karmarkar-Karp; every rank gets the same number of samples where n is divisible by `dp_size`, and
    numbers that differ by at most one where it is not.
    """
    sizes = as_lengths(lengths)
    costs = sequence_costs(sizes, DEFAULT_COST if cost is None else cost).values
    missing = -len(sizes) % dp_size
    # Samples of no cost fill up the last round, one for each rank at most.
    padded = np.concatenate([costs + 1, np.zeros(missing, dtype=np.int64)])
    home = np.empty(len(padded), dtype=np.int64)
    for rank, items in enumerate(karmarkar_karp(padded, dp_size, equal_size=True)):
        home[items] = rank
    return home[: len(sizes)]
