"""Objective `auto`: ranks that wait for each other once per step, at every micro-batch, in a pipeline, or both."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import LinearQuadraticCost, PlanConstraints, plan_step, quadratic_cost
from tests.planning.pipeline_simulation import simulate_pipeline, simulate_plan

pytestmark = pytest.mark.planning

COST = LinearQuadraticCost(linear=24576, quadratic=1)


def w1(seed: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(2400), 0.9, n), 16, 16384).astype(int)


def heavy_tailed(seed: int, n: int = 1024) -> np.ndarray:
    """Most requests short, some up to the cap of 131,072."""
    rng = np.random.default_rng(seed)
    return np.clip(2000 * (1 + rng.pareto(1.1, n)), 16, 131072).astype(int)


def table(plan) -> np.ndarray:
    return plan.costs.reshape(plan.constraints.dp_size, -1)


def largest_total(plan) -> float:
    totals = table(plan).sum(axis=1)
    return float(totals.max() / totals.mean())


def block_time(plan, width: int) -> float:
    """Time of the slowest block of `width` ranks that wait for each other at every micro-batch."""
    costs = table(plan)
    tops = costs.reshape(-1, width, costs.shape[1]).max(axis=1)
    return float(tops.sum(axis=1).max() / costs.sum() * len(costs))


@pytest.mark.parametrize("n", [256, 1024])
def test_plain_data_parallelism_levels_rank_totals_first(n, report):
    found = []
    for seed in range(6):
        plan = plan_step(w1(seed, n), PlanConstraints(dp_size=8, max_tokens=16384), cost=COST)
        found.append((largest_total(plan), block_time(plan, 8)))
    totals, lockstep = np.array(found).T
    report(f"auto, W1 n={n}: rank total {totals.max():.4f} at worst, lockstep {lockstep.mean():.4f} (mean of 6)")
    assert totals.max() <= 1.0005
    # A plan that looks at totals alone loses three times as much to lockstep.
    assert lockstep.mean() <= {256: 1.035, 1024: 1.005}[n]


@pytest.mark.parametrize("cost", [quadratic_cost(), COST], ids=["quadratic", "linear and quadratic"])
def test_heavy_tails_are_level_wherever_rank_totals_alone_can_be(cost, report):
    worst = 0.0
    for seed in range(4):
        lengths = heavy_tailed(seed)
        plan = plan_step(lengths, PlanConstraints(dp_size=8, max_tokens=131072), cost=cost)
        alone = PlanConstraints(dp_size=8, max_tokens=131072, objective="rank_total")
        other = plan_step(lengths, alone, cost=cost)
        assert plan.num_micro_batches == other.num_micro_batches
        assert largest_total(plan) <= max(1.0005, largest_total(other))
        assert block_time(plan, 8) <= block_time(other, 8)
        worst = max(worst, largest_total(plan))
    report(f"auto, heavy tails: rank total {worst:.4f} at worst")


def test_a_remainder_that_no_plan_can_level_is_as_level_as_totals_alone():
    lengths = np.full(1024, 300)
    lengths[0] = 16384
    plan = plan_step(lengths, PlanConstraints(dp_size=8, max_tokens=16384), cost=COST)
    alone = plan_step(lengths, PlanConstraints(dp_size=8, max_tokens=16384, objective="rank_total"), cost=COST)
    assert 1.0005 < largest_total(plan) <= largest_total(alone)


@pytest.mark.parametrize("more", [{"ep_size": 8}, {"fully_sharded": True}, {"shared_shapes": True}])
def test_ranks_that_meet_at_every_micro_batch_ask_for_lockstep(more):
    for n, limit in ((256, 1.021), (1024, 1.004)):
        plans = [plan_step(w1(s, n), PlanConstraints(dp_size=8, max_tokens=16384, **more), cost=COST) for s in range(4)]
        assert np.mean([block_time(plan, 8) for plan in plans]) <= limit


@pytest.mark.parametrize("ep_size", [2, 4])
def test_a_small_expert_group_waits_for_its_own_slowest_rank_only(ep_size, report):
    for seed in range(2):
        lengths = heavy_tailed(seed, 512)
        shared, apart, everyone = (
            plan_step(lengths, PlanConstraints(dp_size=8, max_tokens=131072, **more), cost=COST)
            for more in ({"ep_size": ep_size}, {}, {"ep_size": 8})
        )
        assert block_time(shared, ep_size) <= min(block_time(apart, ep_size), block_time(everyone, ep_size))
        report(f"ep {ep_size} in dp 8, heavy tails: {block_time(shared, ep_size):.4f}, lockstep of all "
               f"{block_time(everyone, 8):.4f}")  # fmt: skip


def meeting_ranks(tp: int, cp: int, dp: int, ep: int, etp: int) -> list[list[int]]:
    """DP ranks that wait for each other, from Megatron's own groups of one pipeline stage."""
    generator = pytest.importorskip("megatron.core.parallel_state").RankGenerator
    order = "tp-cp-ep-dp-pp"
    dense = generator(tp=tp, ep=1, dp=dp, pp=1, cp=cp, order=order)
    experts = generator(tp=etp, ep=ep, dp=tp * cp * dp // (etp * ep), pp=1, cp=1, order=order)
    dp_rank = {rank: place for group in dense.get_ranks("dp") for place, rank in enumerate(group)}
    block_of = list(range(dp))
    for group in experts.get_ranks("tp-ep"):
        together = {block_of[dp_rank[rank]] for rank in group}
        block_of = [min(together) if block in together else block for block in block_of]
    return [[rank for rank in range(dp) if block_of[rank] == block] for block in sorted(set(block_of))]


def test_expert_groups_are_megatrons():
    tried = 0
    for tp, cp, dp in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 3, 4, 6, 8)):
        for ep, etp in itertools.product((1, 2, 3, 4, 6, 8), (1, 2, 4)):
            if (tp * cp * dp) % (ep * etp):
                continue
            constraints = PlanConstraints(
                dp_size=dp, tp_size=tp, cp_size=cp, ep_size=ep, etp_size=None if etp == tp else etp, max_tokens=4096
            )
            width = constraints.lockstep_ranks
            blocks = [list(range(first, first + width)) for first in range(0, dp, width)]
            assert blocks == meeting_ranks(tp, cp, dp, ep, etp), (tp, cp, dp, ep, etp)
            tried += 1
    assert tried > 300


def test_experts_that_lie_inside_a_replica_leave_ranks_alone():
    inside = PlanConstraints(dp_size=8, cp_size=4, ep_size=4, max_tokens=16384)
    assert inside.lockstep_ranks == 1
    assert largest_total(plan_step(w1(0, 256), inside, cost=COST)) <= 1.0005


@pytest.mark.bad_input
def test_expert_sizes_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match=r"ep_size=3 does not divide dp_size x cp_size = 8: change one of them"):
        PlanConstraints(dp_size=4, cp_size=2, ep_size=3, max_tokens=64)
    with pytest.raises(PlanError, match=r"ep_size=4 x etp_size=4 does not divide dp_size x cp_size x tp_size = 8"):
        PlanConstraints(dp_size=4, tp_size=2, ep_size=4, etp_size=4, max_tokens=64)
    with pytest.raises(PlanError, match="ep_size is 0; it must be an integer, at least 1"):
        PlanConstraints(dp_size=4, ep_size=0, max_tokens=64)


def fastest(lengths: list[int], constraints: PlanConstraints, cost: LinearQuadraticCost, count: int) -> float:
    """Smallest simulated step time of all placements with `count` micro-batches.

    Blocks meet nowhere but at the end, so each takes the best order of its own.
    """
    ranks, width = constraints.dp_size, constraints.lockstep_ranks
    costs = [cost.sequence(n) for n in lengths]
    makespans: dict[tuple[float, ...], float] = {}

    def makespan(forward: tuple[float, ...]) -> float:
        if forward not in makespans:
            run = simulate_pipeline(forward, stages=constraints.pp_size, chunks=constraints.vpp_size)
            makespans[forward] = run.makespan
        return makespans[forward]

    best = float("inf")
    for packs in itertools.product(range(ranks * count), repeat=len(lengths)):
        used, load = [0] * (ranks * count), [0] * (ranks * count)
        for i, pack in enumerate(packs):
            used[pack] += lengths[i]
            load[pack] += costs[i]
        if max(used) > constraints.max_tokens:
            continue
        blocks = np.array(load).reshape(ranks // width, width, count).max(axis=1) / constraints.pp_size
        best = min(best, max(makespan(tuple(block)) for block in blocks.tolist()))
    return best


@pytest.mark.parametrize("vpp_size", [1, 2])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_step_time_in_a_pipeline_against_every_placement(ep_size, vpp_size, report):
    """Without expert parallelism the pipelines of ranks are independent; with it, both ranks wait at each index."""
    cost = LinearQuadraticCost(linear=100, quadratic=1)
    worst = 1.0
    for seed in range(4):
        lengths = np.random.default_rng(seed).integers(10, 60, 5).tolist()
        constraints = PlanConstraints(
            dp_size=2, pp_size=2, vpp_size=vpp_size, ep_size=ep_size, max_tokens=100, min_num_micro_batches=2
        )
        plan = plan_step(lengths, constraints, cost=cost)
        time = simulate_plan(plan)
        assert time.step == {1: time.free, 2: time.lockstep}[ep_size]
        assert plan.num_micro_batches <= 4
        worst = max(worst, time.step / fastest(lengths, constraints, cost, plan.num_micro_batches))
    report(f"pp2 vpp{vpp_size} dp2 ep{ep_size}: {worst - 1:.2%} above the best of all placements at worst")
    assert worst <= 1.02


def test_without_experts_a_pipeline_does_not_pay_for_lockstep():
    """The makespan of the slowest rank counts, not that of the costliest pack at each index."""
    lengths = heavy_tailed(0, 256)
    own, shared = (
        simulate_plan(plan_step(lengths, PlanConstraints(dp_size=4, pp_size=4, max_tokens=131072, **more), cost=COST))
        for more in ({}, {"ep_size": 4})
    )
    assert own.step == own.free and shared.step == shared.lockstep
    assert own.step <= shared.free and shared.step <= own.lockstep


def test_simulated_step_of_expert_groups():
    plan = plan_step(w1(0, 64), PlanConstraints(dp_size=4, pp_size=2, ep_size=2, max_tokens=16384), cost=COST)
    halves = table(plan).reshape(2, 2, -1).max(axis=1) / 2
    expected = max(simulate_pipeline(half.tolist(), stages=2).makespan for half in halves)
    time = simulate_plan(plan)
    assert time.step == expected and time.free <= time.step <= time.lockstep
