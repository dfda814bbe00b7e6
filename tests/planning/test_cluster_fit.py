"""Rates of a cluster, fitted to times of packs that are known or noisy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import FlopsCost
from roll_batching.planning.cluster_fit import fit_cluster
from roll_batching.planning.pack_times import LONGEST_TIME, Cluster, PackTimes

pytestmark = pytest.mark.planning

SHAPE = {"num_layers": 36, "hidden_size": 4096, "num_query_groups": 8, "kv_channels": 128}
TRUTH = Cluster(
    matmul_rate=5.1e14, matmul_half_tokens=210.0, attention_rate=2.9e14, layer_floor=6e-3, node_bandwidth=2.5e11
)
FITTED = ("matmul_rate", "matmul_half_tokens", "attention_rate", "layer_floor")


def times_of(cluster: Cluster, **sizes: int) -> PackTimes:
    cost = FlopsCost.from_model(
        **SHAPE, ffn_hidden_size=12288, num_attention_heads=32, vocab_size=151936, tp_size=sizes.get("tp_size", 1)
    )
    return PackTimes.of_model(cost, **SHAPE, **sizes, cluster=cluster)


def packs_of(seed: int, count: int, smallest: int = 40) -> list[np.ndarray]:
    """Packs of one to six sequences: about a quarter of them so short that they take the floor."""
    random = np.random.default_rng(seed)
    return [
        np.exp(random.uniform(np.log(smallest), np.log(30000), random.integers(1, 7))).astype(int) for _ in range(count)
    ]


def seconds_of(times: PackTimes, packs: list[np.ndarray]) -> np.ndarray:
    return np.array([times.pack(pack, 1) / 1e9 for pack in packs])


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2, "pp_size": 2}], ids=["one rank", "TP 2 x PP 2"])
@pytest.mark.parametrize("seed", range(4))
def test_known_rates_are_found(sizes: dict[str, int], seed: int) -> None:
    """The fit starts from the defaults, whose rates differ by a third; what it does not fit is given."""
    packs = packs_of(seed, 80)
    start = replace(Cluster(), node_bandwidth=TRUTH.node_bandwidth)
    seconds = seconds_of(times_of(TRUTH, **sizes), packs)
    fit = fit_cluster(times_of(start, **sizes), packs, seconds)
    floor = times_of(TRUTH, **sizes).floor / 1e9
    assert fit.packs_at_floor == int((seconds == floor).sum()) > 2
    assert fit.residual < 1e-6
    for name in FITTED:
        assert getattr(fit.cluster, name) == pytest.approx(getattr(TRUTH, name), rel=1e-4), name
    assert replace(fit.cluster, **{name: getattr(start, name) for name in FITTED}) == start


def test_noisy_times_give_rates_nearby(report: Any) -> None:
    """The fixed part of a pack is the worst known; predicted times of packs that were not measured count."""
    worst, off = dict.fromkeys(FITTED, 0.0), 0.0
    fresh = packs_of(99, 200)
    true_seconds = seconds_of(times_of(TRUTH), fresh)
    for seed in range(8):
        packs = packs_of(seed, 120)
        noise = np.random.default_rng(100 + seed).normal(1, 0.05, len(packs))
        fit = fit_cluster(times_of(Cluster()), packs, seconds_of(times_of(TRUTH), packs) * noise)
        assert 0.035 < fit.residual < 0.065
        for name in FITTED:
            worst[name] = max(worst[name], abs(getattr(fit.cluster, name) / getattr(TRUTH, name) - 1))
        off = max(off, float(np.abs(seconds_of(times_of(fit.cluster), fresh) / true_seconds - 1).max()))
    rates = ", ".join(f"{name} within {error:.1%}" for name, error in worst.items())
    report(f"120 packs with 5% noise: {rates}; times of other packs within {off:.1%}")
    assert worst["matmul_rate"] < 0.1 and worst["attention_rate"] < 0.12 and worst["layer_floor"] < 0.04 and off < 0.05


def test_a_floor_that_no_pack_takes_stays_below_the_shortest_time() -> None:
    packs = packs_of(0, 60, smallest=4000)
    seconds = seconds_of(times_of(replace(TRUTH, layer_floor=0.0)), packs)
    fit = fit_cluster(times_of(Cluster()), packs, seconds)
    assert fit.packs_at_floor == 0 and fit.cluster.layer_floor == Cluster().layer_floor
    slow_start = times_of(Cluster(layer_floor=0.04))
    assert fit_cluster(slow_start, packs, seconds).cluster.layer_floor == pytest.approx(seconds.min() / 36)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seconds": [1.0, 2.0, float("nan"), 3.0, 4.0]}, "finite and above 0"),
        ({"seconds": [1.0, 2.0, 0.0, 3.0, 4.0]}, "finite and above 0"),
        ({"seconds": [1.0, 2.0]}, r"5 packs but seconds has shape \(2,\)"),
        ({"seconds": "soon"}, "must be numbers"),
        ({"packs": [[1]], "seconds": [1.0]}, "do not determine 4 coefficients"),
        ({"packs": [[100], [], [300], [400], [9]]}, "pack 1 has no sequence: give"),
        ({"packs": [[100], [0], [300], [400], [9]]}, "pack 1 has a sequence of 0 tokens: give"),
        ({"packs": [[100], [1.5], [300], [400], [9]]}, "pack 1 must be integers"),
        ({"packs": [[100], ["x"], [300], [400], [9]]}, "pack 1"),
        ({"seconds": [1.0] * 5}, "do not grow with the tokens"),
        ({"model": None}, "PackTimes"),
    ],
    ids=str,
)
def test_measurements_that_determine_nothing_are_refused(change: dict[str, Any], words: str) -> None:
    given = {
        "model": times_of(Cluster()),
        "packs": [[100], [200], [300], [400], [900]],
        "seconds": [1.0, 2.0, 3.0, 4.0, 9.0],
    } | change
    with pytest.raises(PlanError, match=words):
        fit_cluster(**given)


@pytest.mark.bad_input
def test_times_beyond_64_bits_are_refused() -> None:
    times = replace(times_of(Cluster()), linear=1e30)
    with pytest.raises(PlanError, match=f"at most {LONGEST_TIME:,.0f} s can be planned: check the rates"):
        times.pack(np.array([1000]), 2)
