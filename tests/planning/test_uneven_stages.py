"""Pipelines whose stages cost different amounts: makespan, order, plans, and where the costs come from."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import FlopsCost, LinearQuadraticCost, Plan, PlanConstraints, plan_step
from roll_batching.planning.cost_model import ChunkCosts
from roll_batching.planning.dynamic_cp.joint import joint_makespan
from roll_batching.planning.pipeline.ordering import order_for_pipeline, pipeline_makespan
from tests.planning.pipeline_simulation import simulate_pipeline

pytestmark = pytest.mark.planning

SIZES = {
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "kv_channels": 128,
    "vocab_size": 151936,
}
QWEN3_1_7B = {**SIZES, "num_layers": 28}


def shares_of(costs: list[float]) -> tuple[float, ...]:
    return tuple(cost * len(costs) / sum(costs) for cost in costs)


def random_shares(count: int, seed: int) -> tuple[float, ...]:
    return shares_of(np.random.default_rng(seed).uniform(0.2, 2.0, count).tolist())


def random_costs(count: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).lognormal(0, 0.5, count) * 1e6).astype(np.int64)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (3, 2), (4, 2)])
def test_makespan_equals_the_simulation(stages: int, chunks: int) -> None:
    for seed in range(10):
        costs, shares = random_costs(4 * stages, seed) * chunks, random_shares(stages * chunks, seed)
        run = simulate_pipeline(costs.tolist(), stages=stages, chunks=chunks, shares=shares)
        found = pipeline_makespan(costs, stages=stages, chunks=chunks, shares=shares)
        assert found == pytest.approx(run.makespan * chunks, rel=1e-5)
        ones = (1.0,) * (stages * chunks)
        equal = pipeline_makespan(costs, stages=stages, chunks=chunks)
        assert pipeline_makespan(costs, stages=stages, chunks=chunks, shares=ones) == equal != found


def test_a_light_first_stage_by_hand() -> None:
    # Two micro-batches of 2 on stages of half and of one and a half: 1 and 3 forward, 2 and 6 backward.
    # Stage 0: F0 0-1, F1 1-2, B0 10-12, B1 19-21.  Stage 1: F0 1-4, B0 4-10, F1 10-13, B1 13-19.
    assert pipeline_makespan([2, 2], stages=2, shares=(0.5, 1.5)) == 21
    assert pipeline_makespan([2, 2], stages=2) == 18


@pytest.mark.parametrize(("stages", "chunks", "counts"), [(2, 1, range(1, 7)), (4, 1, (4, 6)), (2, 2, (2, 4, 6))])
def test_order_is_the_optimum_for_unequal_stages(stages: int, chunks: int, counts: Any) -> None:
    for count, seed in itertools.product(counts, range(3)):
        costs, shares = random_costs(count, seed), random_shares(stages * chunks, seed)
        layout = {"stages": stages, "chunks": chunks, "shares": shares}
        best = min(pipeline_makespan(costs[list(order)], **layout) for order in itertools.permutations(range(count)))
        assert pipeline_makespan(costs[order_for_pipeline(costs, **layout)], **layout) == best


def test_flops_of_chunks_by_hand() -> None:
    cost = FlopsCost.from_model(**QWEN3_1_7B, chunk_layers=[(6, 0), (8, 0), (8, 0), (6, 0)])
    assert cost.chunks is not None
    layer = 2048 * (2 * 2048 + 2 * 1024) + 3 * 2048 * 6144
    assert cost.chunks.linear == (12 * layer, 16 * layer, 16 * layer, 12 * layer + 2 * 2048 * 151936)
    assert sum(cost.chunks.linear) * 3 == cost.linear and sum(cost.chunks.quadratic) * 3 == cost.quadratic
    plain = FlopsCost.from_model(**QWEN3_1_7B)
    assert (plain.linear, plain.quadratic, plain.fixed) == (cost.linear, cost.quadratic, cost.fixed)
    short, long = (cost.chunks.shares(np.array([length])) for length in (16, 65536))
    assert short[3] > short[1] > short[0] and sum(short) == pytest.approx(4)
    assert long[1] > long[3] > long[0], "attention outweighs the head in long sequences"
    experts = {"num_experts": 8, "num_moe_layers": 2, "moe_router_topk": 2, "moe_ffn_hidden_size": 768}
    mixed = FlopsCost.from_model(**SIZES, num_layers=3, **experts, chunk_layers=[(1, 0), (2, 2)])
    mixture = 2048 * (2 * 2048 + 2 * 1024) + 2 * 3 * 2048 * 768 + 2048 * 8
    assert mixed.chunks is not None
    assert mixed.chunks.linear == (2 * layer, 4 * mixture + 2 * 2048 * 151936)


@pytest.mark.parametrize("chunk_layers", [[(3, 0), (24, 0)], [(28, 1)], [(29, 0), (-1, 0)]])
def test_chunks_with_other_layers_than_the_model_are_refused(chunk_layers: Any) -> None:
    with pytest.raises(PlanError, match="chunk_layers|ChunkCosts"):
        FlopsCost.from_model(**QWEN3_1_7B, chunk_layers=chunk_layers)


def constraints(**more: Any) -> PlanConstraints:
    return PlanConstraints(dp_size=2, max_tokens=16384, **{"pp_size": 4, **more})


def lengths_of(seed: int, count: int = 96) -> list[int]:
    draw = random.Random(seed)
    return [min(16384, max(16, int(draw.lognormvariate(7.5, 0.9)))) for _ in range(count)]


def test_plans_of_equal_chunks_are_those_without_costs_by_chunk() -> None:
    for vpp in (1, 2):
        plain = FlopsCost.from_model(**QWEN3_1_7B, include_head=False)
        even = [(28 // 4 // vpp, 0)] * (4 * vpp) if vpp == 1 else [(4, 0), (3, 0)] * 4
        cost = LinearQuadraticCost(
            linear=plain.linear,
            quadratic=plain.quadratic,
            fixed=plain.fixed,
            chunks=ChunkCosts(linear=(5,) * len(even), quadratic=(7,) * len(even)),
        )
        one, other = (plan_step(lengths_of(1), constraints(vpp_size=vpp), cost=price) for price in (plain, cost))
        assert one.fingerprint == other.fingerprint and one.report == other.report
        assert other.chunk_shares == pytest.approx((1.0,) * len(even)) and one.chunk_shares is None


@pytest.mark.parametrize("vpp", [1, 2])
def test_plans_for_unequal_stages_are_not_slower_on_them(vpp: int, report: Any) -> None:
    layers = {1: [(4, 0), (10, 0), (10, 0), (4, 0)], 2: [(2, 0), (5, 0), (5, 0), (2, 0)] * 2}[vpp]
    cost, ratios = FlopsCost.from_model(**QWEN3_1_7B, chunk_layers=layers), []
    for seed in range(6):
        lengths = lengths_of(seed)
        aware = plan_step(lengths, constraints(vpp_size=vpp), cost=cost)
        blind = plan_step(lengths, constraints(vpp_size=vpp), cost=FlopsCost.from_model(**QWEN3_1_7B))
        assert aware.chunk_shares is not None and aware.report.gap is not None and aware.report.gap >= 0
        times = []
        for plan in (aware, blind):
            fixed = int(cost.fixed) * int(plan.costs.sum()) // sum(cost.sequence(n) for n in lengths)
            table = plan.costs.reshape(2, -1) + fixed
            runs = [
                simulate_pipeline(row, stages=4, chunks=vpp, group_size=plan.group_size, shares=aware.chunk_shares)
                for row in table.tolist()
            ]
            times.append(max(run.makespan for run in runs))
        ratios.append(times[0] / times[1])
    report(f"uneven stages, pp4 vpp{vpp}: planned for them {np.mean(ratios):.4f} of planned for equal ones (mean of 6)")
    assert np.mean(ratios) <= 1.0 and max(ratios) < 1.01


def test_a_context_parallel_size_per_pack_counts_each_stage() -> None:
    costs = np.array([10, 6, 18, 2, 8], dtype=np.int64)
    zeros, ones, shares = np.zeros(5, dtype=np.int64), np.ones(5, dtype=np.int64), (0.5, 1.0, 1.5)
    found = joint_makespan(zeros, ones, 3 * costs, 1, 3, shares)
    assert found == pipeline_makespan(costs, stages=3, shares=shares) != pipeline_makespan(costs, stages=3)


def test_a_saved_plan_keeps_the_shares_and_refuses_odd_ones() -> None:
    cost = LinearQuadraticCost(linear=10, quadratic=1, fixed=1000, chunks=ChunkCosts(linear=(1, 3), quadratic=(0, 0)))
    plan = plan_step(lengths_of(3), constraints(pp_size=2), cost=cost)
    assert plan.chunk_shares == (0.5, 1.5)
    saved = json.loads(json.dumps(plan.to_dict()))
    restored = Plan.from_dict(saved)
    assert restored == plan and restored.chunk_shares == plan.chunk_shares and restored.report == plan.report
    for odd in ([0.5], [0.5, float("nan")], [0.5, "1"], [True, 1.0], [-1.0, 3.0], 5):
        with pytest.raises(PlanError, match="chunk_shares|cannot be read"):
            Plan.from_dict({**saved, "chunk_shares": odd})


@pytest.mark.parametrize(
    "values", [((1,), (1, 2)), ((0, 0), (0, 0)), ((1.5, 2), (0, 0)), ((True, 2), (0, 0)), ((-1, 2), (0, 0)), ((), ())]
)
def test_odd_costs_of_chunks_are_refused(values: Any) -> None:
    with pytest.raises(PlanError, match="ChunkCosts"):
        ChunkCosts(linear=values[0], quadratic=values[1])


def test_costs_of_another_number_of_chunks_are_refused() -> None:
    cost = LinearQuadraticCost(chunks=ChunkCosts(linear=(1, 3), quadratic=(0, 0)))
    with pytest.raises(PlanError, match="2 model chunks.* = 4"):
        plan_step([5, 6, 7, 8], constraints(), cost=cost)
    assert plan_step([5, 6, 7, 8], constraints(pp_size=1), cost=cost).chunk_shares is None
    with pytest.raises(PlanError, match="pass ChunkCosts"):
        LinearQuadraticCost(chunks=(1, 2))  # type: ignore[arg-type]
