"""Limits of the benchmark of shared prefixes."""

from __future__ import annotations

import pytest

from benchmarks.bench_shared_prefixes import limits_of_times


@pytest.mark.parametrize(
    ("median", "spread", "missed"),
    [(1.0, 0.01, []), (0.95, 0.05, []), (0.8, 0.05, ["time"]), (0.8, 0.22, ["too noisy: run it alone"])],
)
def test_noise_excuses_a_small_miss_and_not_a_large_one(median: float, spread: float, missed: list[str]) -> None:
    limits = limits_of_times({"update": (median, spread)}, 0.99)
    exceeded = [name for name, (value, limit) in limits.items() if value > limit]
    assert len(exceeded) == len(missed) and all(part in name for part, name in zip(missed, exceeded, strict=True))
