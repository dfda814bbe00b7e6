"""Schedules compared with hand-made cases and Megatron's table; search for an order; choice of K."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from roll_batching.planning import (
    DEFAULT_COST,
    LinearQuadraticCost,
    Plan,
    PlanConstraints,
    plan_step,
    quadratic_cost,
    token_cost,
)
from roll_batching.planning.assemble import assemble
from roll_batching.planning.load_balance.planner import _warn_of_assumed_fixed_cost, balance
from roll_batching.planning.pipeline.ordering import order_for_pipeline, pipeline_makespan, small_at_ends
from roll_batching.planning.pipeline.schedule import (
    is_admissible,
    legal_count,
    schedule_table,
    smallest_group,
    stage_operations,
)
from roll_batching.planning.problem import build_problem
from tests.planning.pipeline_simulation import simulate_pipeline, simulate_plan

pytestmark = pytest.mark.planning


def random_costs(kind: str, count: int, seed: int) -> np.ndarray:
    """Mean 1, coefficient of variation 0.4, in millionths."""
    rng = np.random.default_rng(seed)
    if kind == "normal":
        values = np.maximum(rng.normal(1, 0.4, count), 0.1)
    else:
        values = rng.lognormal(0, np.sqrt(np.log(1.16)), count)
    return (values * 1e6).astype(np.int64)


def test_equal_micro_batches_take_m_plus_p_minus_1_rounds():
    for stages, count in [(1, 3), (2, 4), (4, 8), (4, 2)]:
        assert simulate_pipeline([1] * count, stages=stages).makespan == 3 * (count + stages - 1)


def test_two_stages_two_micro_batches_by_hand():
    # Stage 0: F0 0-1, F1 1-4, B0 waits for stage 1.  Stage 1: F0 1-2, B0 2-4, F1 4-7, B1 7-13.
    # Stage 0 again: B0 4-6, B1 13-19.
    run = simulate_pipeline([1, 3], stages=2)
    assert [(i.stage, i.kind, i.micro_batch, i.start, i.end) for i in run.intervals] == [
        (0, "F", 0, 0, 1),
        (0, "F", 1, 1, 4),
        (1, "F", 0, 1, 2),
        (1, "B", 0, 2, 4),
        (0, "B", 0, 4, 6),
        (1, "F", 1, 4, 7),
        (1, "B", 1, 7, 13),
        (0, "B", 1, 13, 19),
    ]
    assert run.makespan == 19
    assert run.bubble_share == pytest.approx(1 - 24 / 38)


def test_interleaving_divides_the_bubble_by_the_chunks():
    plain = simulate_pipeline([2] * 8, stages=4)
    split = simulate_pipeline([2] * 8, stages=4, chunks=2)
    work = 3 * 2 * 8
    assert plain.makespan - work == 3 * 2 * 3
    assert split.makespan - work == 3 * 2 * 3 / 2


def test_a_transfer_delays_every_hop():
    # One micro-batch over three stages: two hops there, two back.
    assert simulate_pipeline([1], stages=3, transfer=0.5).makespan == 3 + 6 + 4 * 0.5


def test_schedule_table_is_megatrons():
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for count, chunks, group in itertools.product(range(2, 14), (2, 3), range(2, 9)):
        if is_admissible(count, 2, group):
            assert schedule_table(count, chunks, group) == schedules.get_schedule_table(count, chunks, group)


def test_warm_up_of_the_interleaved_schedule_is_megatrons():
    """`(pp - rank - 1) * 2 + (chunks - 1) * group_size` forwards come first."""
    for stage in range(4):
        kinds = "".join(kind for kind, _, _ in stage_operations(stage, 4, 8, 2, 4))
        warm_up = (4 - stage - 1) * 2 + 4
        # In the steady part each backward follows a forward.
        assert kinds.index("B") == warm_up + 1


def test_admissible_counts_are_megatrons_rule():
    assert [m for m in range(1, 9) if is_admissible(m, 2, 3)] == [3, 5, 6, 8]
    assert is_admissible(5, 2, 5) and not is_admissible(4, 2, 3) and not is_admissible(2, 4, 4)
    assert smallest_group(5, 2) == 3  # 5 % 2 leaves 1, below pp
    auto = PlanConstraints(dp_size=1, max_tokens=8, pp_size=2, vpp_size=2, group_size="auto")
    assert [legal_count(m, auto) for m in (1, 2, 5)] == [2, 2, 5]


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (3, 2), (4, 2)])
def test_the_planners_recurrence_equals_the_simulation(stages, chunks):
    for seed in range(10):
        costs = random_costs("lognormal", 4 * stages, seed) * chunks
        run = simulate_pipeline((costs).tolist(), stages=stages, chunks=chunks)
        assert pipeline_makespan(costs, stages=stages, chunks=chunks) == pytest.approx(run.makespan * chunks)


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
@pytest.mark.parametrize(
    ("stages", "count", "chunks", "least"), [(4, 16, 1, 0.010), (8, 32, 1, 0.009), (4, 16, 2, 0.0)]
)
def test_order_beats_small_at_ends(kind, stages, count, chunks, least, report):
    gains = []
    for seed in range(30):
        costs = random_costs(kind, count, seed)
        baseline = pipeline_makespan(costs[small_at_ends(costs)], stages=stages, chunks=chunks)
        order = order_for_pipeline(costs, stages=stages, chunks=chunks)
        assert sorted(order.tolist()) == list(range(count))
        gains.append(1 - pipeline_makespan(costs[order], stages=stages, chunks=chunks) / baseline)
    assert min(gains) >= 0
    assert np.mean(gains) >= least
    report(f"order, pp{stages} m{count} vpp{chunks} {kind}: {np.mean(gains):.2%} below small-at-ends (mean of 30)")


@pytest.mark.parametrize(
    ("stages", "chunks", "counts"), [(2, 1, range(1, 9)), (4, 1, range(1, 9)), (2, 2, (2, 4, 6, 8)), (4, 2, (4, 8))]
)
def test_order_is_the_exhaustive_optimum_up_to_eight_micro_batches(stages, chunks, counts, report):
    worst = 0.0
    for count, kind in itertools.product(counts, ["normal", "lognormal"]):
        costs = random_costs(kind, count, seed=count)
        best = min(
            pipeline_makespan(costs[list(order)], stages=stages, chunks=chunks)
            for order in itertools.permutations(range(count))
        )
        order = order_for_pipeline(costs, stages=stages, chunks=chunks)
        worst = max(worst, pipeline_makespan(costs[order], stages=stages, chunks=chunks) / best - 1)
    report(f"order, pp{stages} vpp{chunks}, m up to {max(counts)}: {worst:.2%} above the exhaustive optimum at worst")
    assert worst == 0  # all orders are tried


@pytest.mark.parametrize("fixed_tokens", [64, 512, 4096])
@pytest.mark.parametrize(("pp_size", "vpp_size"), [(4, 1), (4, 2)])
def test_count_by_makespan_against_every_count(fixed_tokens, pp_size, vpp_size, report):
    rng = np.random.default_rng(fixed_tokens)
    lengths = np.clip(rng.lognormal(np.log(2400), 0.9, 96), 16, 16384).astype(int)
    constraints = PlanConstraints(dp_size=2, max_tokens=16384, pp_size=pp_size, vpp_size=vpp_size)
    cost = LinearQuadraticCost(fixed=24576 * fixed_tokens)
    problem = build_problem(lengths, constraints, cost=cost)

    def time(count: int | None) -> tuple[float, int]:
        plan = Plan.of(assemble(problem, balance(problem, count=count)))
        return simulate_plan(plan, fixed=problem.fixed_cost / pp_size).step, plan.num_micro_batches

    chosen_time, chosen = time(None)
    counts, count = [], legal_count(-(-int(lengths.sum()) // (2 * 16384)) + 1, constraints)
    while count <= 36:
        counts.append(count)
        count = legal_count(count + 1, constraints)
    times = {count: time(count)[0] for count in counts}
    best = min(times, key=times.__getitem__)
    report(
        f"K by makespan, pp{pp_size} vpp{vpp_size}, fixed {fixed_tokens} tokens: chose {chosen}, best {best} of "
        f"{counts[0]}..{counts[-1]} ({chosen_time / times[best] - 1:+.2%})"
    )
    assert chosen_time <= 1.03 * times[best]


def test_default_cost_does_not_make_one_micro_batch_per_sample():
    lengths = np.full(64, 500)
    plan = plan_step(lengths, PlanConstraints(dp_size=1, max_tokens=8192, pp_size=2), cost=DEFAULT_COST)
    assert 4 <= plan.num_micro_batches < 64


class UnknownFixedCost:
    """Cost model without a fixed cost per micro-batch."""

    fixed = 0

    def sequence(self, length: int) -> int:
        return 10**6 * length + length**3


@pytest.mark.parametrize(
    ("cost", "vpp_size"),
    [(LinearQuadraticCost(), 2), (token_cost(), 1), (quadratic_cost(), 1), (UnknownFixedCost(), 2)],
)
def test_a_cost_without_a_fixed_part_does_not_make_one_micro_batch_per_sample(cost, vpp_size, report, caplog):
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(2400), 0.9, 256), 16, 16384).astype(int)
    constraints = PlanConstraints(dp_size=2, max_tokens=16384, pp_size=4, vpp_size=vpp_size)
    _warn_of_assumed_fixed_cost.cache_clear()
    plan = plan_step(lengths, constraints, cost=cost)
    report(f"K without a fixed part, pp4 vpp{vpp_size}, {type(cost).__name__}: {plan.num_micro_batches}")
    assert plan.num_micro_batches <= 56  # 28 is the fewest that the cap admits; 112 to 130 without a fixed part
    plan_step(lengths[:32], constraints, cost=cost)
    assert [record.getMessage().count("fixed=0") for record in caplog.records] == [1]  # once per process


def test_a_fixed_part_of_the_cost_is_taken_as_given(caplog):
    constraints = PlanConstraints(dp_size=1, max_tokens=8192, pp_size=2)
    _warn_of_assumed_fixed_cost.cache_clear()
    plan = plan_step(np.full(64, 500), constraints, cost=token_cost(fixed=1))
    assert plan.num_micro_batches == 64, "micro-batches are nearly free: 11 with the fixed part that is assumed for 0"
    assert not caplog.records
