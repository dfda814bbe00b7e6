"""Karmarkar-Karp, compared with a simple implementation, and balanced home ranks."""

from __future__ import annotations

import heapq
import time

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import batch_balance, karmarkar_karp

pytestmark = pytest.mark.planning


def plain_largest_differencing(weights, k):
    """Textbook version on full k-tuples; returns the sums."""
    heap = []
    for tie, weight in enumerate(weights):
        heapq.heappush(heap, (-int(weight), tie, [int(weight)] + [0] * (k - 1)))
    tie = len(weights)
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = sorted((a + b for a, b in zip(left, reversed(right), strict=True)), reverse=True)
        tie += 1
        heapq.heappush(heap, (merged[-1] - merged[0], tie, merged))
    return heap[0][2]


def sums(weights, parts):
    return [int(sum(weights[i] for i in part)) for part in parts]


def test_near_plain_largest_differencing_on_200_cases(report):
    rng = np.random.default_rng(0)
    worst = 0.0
    for case in range(200):
        n, k = int(rng.integers(1, 200)), int(rng.integers(1, 20))
        weights = rng.integers(0, 1000, n) if case % 2 else np.clip(rng.lognormal(7, 0.9, n), 1, 16384).astype(int)
        parts = karmarkar_karp(weights, k)
        assert len(parts) == k
        assert sorted(i for part in parts for i in part) == list(range(n))
        plain = max(plain_largest_differencing(weights, k))
        worst = max(worst, max(sums(weights, parts)) / max(plain, 1))
    report(f"karmarkar_karp: largest sum at most {worst:.4f}x plain largest differencing on 200 cases")
    assert worst <= 1.001


def test_equal_sizes():
    weights = np.random.default_rng(1).integers(1, 1000, 64)
    parts = karmarkar_karp(weights, 8, equal_size=True)
    assert {len(part) for part in parts} == {8}
    totals = sums(weights, parts)
    assert max(totals) - min(totals) < 0.05 * np.mean(totals)
    with pytest.raises(PlanError, match="63 items cannot form 8 parts"):
        karmarkar_karp(weights[:63], 8, equal_size=True)


def test_fewer_items_than_parts_leaves_parts_empty():
    assert karmarkar_karp([5, 3], 4) == [[0], [1], [], []]
    assert karmarkar_karp([], 2) == [[], []]


def test_speed_at_16384_items_in_256_parts(report):
    rng = np.random.default_rng(0)
    weights = np.clip(rng.lognormal(np.log(2400), 0.9, 16384), 16, 16384).astype(int)
    karmarkar_karp(weights[:100], 8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        parts = karmarkar_karp(weights, 256)
        times.append(time.perf_counter() - start)
    totals = sums(weights, parts)
    report(f"karmarkar_karp: 16,384 items in 256 parts in {min(times):.3f} s (best of five)")
    assert max(totals) / np.mean(totals) < 1.001
    assert min(times) < 0.4  # 0.2 on a quiet machine; benchmarks/bench_planner.py --check holds the figure


@pytest.mark.parametrize("n", [64, 61, 3])
def test_batch_balance_gives_counts_that_differ_by_one_at_most(n):
    lengths = np.random.default_rng(n).integers(1, 4000, n)
    home = batch_balance(lengths, 8)
    assert home.shape == (n,) and home.dtype == np.int64
    counts = np.bincount(home, minlength=8)
    assert counts.max() - counts.min() <= 1
    if n == 64:
        cost = 24576 * lengths + lengths**2
        totals = np.bincount(home, weights=cost, minlength=8)
        assert totals.max() / totals.mean() < 1.01
