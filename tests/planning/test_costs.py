"""Cost models: exact, integer, fitted."""

from __future__ import annotations

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import FlopsCost, LinearQuadraticCost, fit_cost, quadratic_cost, token_cost
from roll_batching.planning.cost_model import sequence_costs

pytestmark = pytest.mark.planning

QWEN_7B = {
    "hidden_size": 3584,
    "ffn_hidden_size": 18944,
    "num_layers": 28,
    "num_attention_heads": 28,
    "num_query_groups": 4,
    "vocab_size": 152064,
}


def test_plain_models():
    assert LinearQuadraticCost().sequence(1000) == 24576 * 1000 + 1000**2
    assert token_cost().sequence(7) == 7
    assert quadratic_cost().sequence(7) == 49
    with pytest.raises(PlanError, match="linear"):
        LinearQuadraticCost(linear=-1)
    with pytest.raises(PlanError, match="above 0"):
        LinearQuadraticCost(linear=0, quadratic=0)


def test_costs_are_divided_by_the_smallest_power_of_two_that_keeps_the_total_below_2_53():
    lengths = np.arange(1, 1001, dtype=np.int64)
    for linear in (1, 10**9, 10**15, 10**30):
        cost = LinearQuadraticCost(linear=linear)
        scaled = sequence_costs(lengths, cost)
        exact = [cost.sequence(int(n)) for n in lengths]
        assert scaled.values.tolist() == [value >> scaled.shift for value in exact]
        assert sum(exact) >> scaled.shift < 2**53
        assert scaled.shift == 0 or sum(exact) >> (scaled.shift - 1) >= 2**53


def test_costs_that_are_not_integers_are_refused():
    class Float:
        fixed = 0

        def sequence(self, length):
            return 0.5 * length

    with pytest.raises(PlanError, match="a cost is an integer"):
        sequence_costs(np.array([3]), Float())


def test_flops_of_a_dense_model_by_hand():
    cost = FlopsCost.from_model(**QWEN_7B)
    per_layer = 3584 * (2 * 3584 + 2 * 4 * 128) + 3 * 3584 * 18944
    assert cost.linear == 6 * (28 * per_layer + 3584 * 152064)
    assert cost.quadratic == 6 * 28 * 2 * 3584 // 2
    # 6 x parameters that multiply, within 1%: embeddings (not multiplied) left out.
    assert cost.linear / 6 / 7.07e9 == pytest.approx(1, abs=0.01)


def test_flops_follow_the_layout_and_the_model():
    dense = FlopsCost.from_model(**QWEN_7B)
    assert FlopsCost.from_model(**QWEN_7B, causal=False).quadratic == 2 * dense.quadratic
    assert FlopsCost.from_model(**QWEN_7B, tp_size=2, cp_size=2).linear == dense.linear // 4
    assert FlopsCost.from_model(**QWEN_7B, forward_only=True).linear == dense.linear // 3
    headless = FlopsCost.from_model(**QWEN_7B, include_head=False)
    assert dense.linear - headless.linear == 6 * 3584 * 152064
    full_heads = FlopsCost.from_model(**{**QWEN_7B, "num_query_groups": None})
    assert full_heads.linear > dense.linear
    sparse = FlopsCost.from_model(**QWEN_7B, num_experts=64, moe_router_topk=8, moe_ffn_hidden_size=18944 // 8)
    # Eight experts of an eighth each: the dense feed-forward and the router.
    assert sparse.linear - dense.linear == 6 * 28 * 3584 * 64
    some = FlopsCost.from_model(
        **QWEN_7B, num_experts=64, num_moe_layers=7, moe_router_topk=8, moe_ffn_hidden_size=18944 // 8
    )
    assert some.linear - dense.linear == 6 * 7 * 3584 * 64
    with pytest.raises(PlanError, match="num_moe_layers=29"):
        FlopsCost.from_model(**QWEN_7B, num_experts=64, num_moe_layers=29)
    with pytest.raises(PlanError, match="num_layers=0"):
        FlopsCost.from_model(**{**QWEN_7B, "num_layers": 0})


def test_fit_finds_the_coefficients_and_reports_the_residual():
    rng = np.random.default_rng(0)
    packs = [rng.integers(10, 8000, int(rng.integers(1, 12))) for _ in range(60)]
    truth = np.array([3e-3 + 2e-6 * pack.sum() + 1e-10 * (pack.astype(float) ** 2).sum() for pack in packs])
    exact = fit_cost(packs, truth)
    assert exact.fixed / 1e18 == pytest.approx(3e-3, rel=1e-3)
    assert exact.linear / 1e18 == pytest.approx(2e-6, rel=1e-3)
    assert exact.quadratic / 1e18 == pytest.approx(1e-10, rel=1e-2)
    assert exact.residual < 1e-6
    noisy = fit_cost(packs, truth * rng.normal(1, 0.05, 60))
    assert 0.02 < noisy.residual < 0.08
    assert noisy.linear / 1e18 == pytest.approx(2e-6, rel=0.2)


def test_fit_never_returns_a_negative_part():
    packs = [[100], [200], [300], [400]]
    cost = fit_cost(packs, [4.0, 7.9, 11.7, 15.3])  # bends down: no quadratic part
    assert cost.quadratic == 0 and cost.linear > 0 and cost.fixed >= 0
    with pytest.raises(PlanError, match="measure more"):
        fit_cost([[1], [2]], [1.0, 2.0])
    with pytest.raises(PlanError, match="finite"):
        fit_cost(packs, [1.0, 2.0, float("nan"), 3.0])
