"""Steps of plans: times as the planner predicts them, shares of the time, timelines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.planning.simulated_step import SimulatedStep, pack_work
from roll_batching.tools.simulation import Scenario, read_architecture, simulate_plan, simulate_single_sizes
from roll_batching.tools.simulation.report import timeline_of
from tests.planning.pipeline_simulation import simulate_pipeline

MODEL = read_architecture("qwen3-8b")
LENGTHS = np.random.default_rng(3).lognormal(np.log(1500), 1.4, 96).clip(32, 60_000).astype(np.int64)


def scenario(**constraints) -> Scenario:
    return Scenario(
        lengths=LENGTHS, constraints=PlanConstraints(**{"max_tokens": 8192, **constraints}), architecture=MODEL
    )


def require_whole(step: SimulatedStep) -> None:
    """Shares add up, passes of a lane do not overlap, and every pack is computed once forward and once backward."""
    shares = (step.compute_share, step.exchange_share, step.bubble_share, step.end_wait_share)
    assert sum(shares) == pytest.approx(1) and min(shares) >= -1e-12
    chunks = step.plan.constraints.vpp_size
    for row in timeline_of(step):
        passes, packs = row["passes"], step.units[row["dp_rank"]]
        assert len(passes) == 2 * chunks * len(packs)
        assert len({(one["pass"], one["micro_batch"], one["chunk"]) for one in passes}) == len(passes)
        for earlier, later in zip(passes, passes[1:], strict=False):
            assert earlier["end"] <= later["start"] + 1e-12
        assert all(one["busy"] <= one["end"] - one["start"] + 1e-12 for one in passes)
        assert all(0 <= one["exchange"] <= one["busy"] for one in passes)
        assert sum(one["busy"] for one in passes) == pytest.approx(step.busy[row["dp_rank"]])
        assert sum(one["exchange"] for one in passes) == pytest.approx(step.exchange[row["dp_rank"]])
        assert passes[-1]["end"] <= step.seconds + 1e-12


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_size": 16},
        {"dp_size": 16, "tp_size": 2},
        {"dp_size": 16, "fully_sharded": True},
        {"dp_size": 16, "pp_size": 4},
        {"dp_size": 8, "pp_size": 2, "tp_size": 2},
    ],
    ids=str,
)
def test_a_size_per_pack_takes_as_long_as_the_planner_predicts(layout) -> None:
    many = np.random.default_rng(3).lognormal(np.log(1500), 1.4, 400).clip(32, 60_000).astype(np.int64)
    case = replace(scenario(max_cp_size=8, **layout), lengths=many)
    plan = case.plan()
    step = simulate_plan(plan, case.times, transfers="free")
    assert len(set(plan.cp_sizes.tolist())) > 2 and plan.report.predicted_seconds
    assert step.seconds == pytest.approx(plan.report.predicted_seconds, rel=1e-6)
    require_whole(step)
    assert simulate_plan(plan, case.times).seconds >= step.seconds


@pytest.mark.parametrize("cp_size", [1, 4])
@pytest.mark.parametrize(("pp_size", "vpp_size"), [(1, 1), (4, 1), (4, 3)])
def test_one_size_takes_as_long_as_in_a_separate_simulation(cp_size: int, pp_size: int, vpp_size: int) -> None:
    case = scenario(dp_size=2, cp_size=cp_size, pp_size=pp_size, vpp_size=vpp_size, max_tokens=65536)
    step = simulate_plan(case.plan(), case.times, transfers="free")
    require_whole(step)
    for rank, micro_batches in enumerate(step.plan.micro_batches):
        forward = [case.times.pack(mb.lengths, cp_size) / 3e9 for mb in micro_batches]
        assert step.work.forward[list(step.units[rank])] == pytest.approx(forward)
        other = simulate_pipeline(forward, stages=pp_size, chunks=vpp_size, group_size=step.plan.group_size)
        assert step.rank_ends[rank] == pytest.approx(other.makespan)
    assert (step.exchange > 0).all() == (cp_size > 1)


@pytest.mark.parametrize(("pp_size", "width"), [(1, 2), (1, 4), (2, 2)])
def test_ranks_that_share_experts_meet_at_every_micro_batch(pp_size: int, width: int) -> None:
    case = scenario(dp_size=4, ep_size=width, pp_size=pp_size, max_tokens=65536)
    plan = case.plan()
    step = simulate_plan(plan, case.times, transfers="free")
    require_whole(step)
    table = step.work.forward.reshape(-1, width, plan.num_micro_batches).max(axis=1)
    expected = [simulate_pipeline(costs, stages=pp_size).makespan for costs in table.tolist()]
    assert step.seconds == pytest.approx(max(expected))
    # Who meets waits: with equal groups the ranks end together.
    assert step.rank_ends.reshape(-1, width).std(axis=1) == pytest.approx(0)


def test_padding_is_computed_by_layers_and_not_by_the_head() -> None:
    head = 6.0 * MODEL.hidden_size * MODEL.vocab_size
    lengths = np.array([1000, 3000, 2000, 4000])
    constraints = PlanConstraints(dp_size=1, mode="padded", rows=2, padded_length=4096)
    times = scenario(dp_size=1).times
    plan = plan_step(lengths, constraints)
    whole = [times.pack(np.full(2, 4096), 1) / 1e9] * 2
    assert pack_work(plan, times).forward * 3 == pytest.approx(whole)
    skipped = [(2 * 4096 - mb.lengths.sum()) * head / times.cluster.matmul_rate for mb in plan.micro_batches[0]]
    assert pack_work(plan, times, head=head).forward * 3 == pytest.approx(np.array(whole) - skipped)


def test_recomputed_layers_run_forward_again() -> None:
    case = scenario(dp_size=2, max_tokens=65536)
    plain, again = case.simulate(), replace(case, recompute=0).simulate()
    assert again.seconds == pytest.approx(plain.seconds * 4 / 3)
    assert replace(case, recompute=9).simulate().seconds == pytest.approx(plain.seconds * (1 + 0.25 / 3))


def test_shared_prefixes_are_computed_once() -> None:
    lengths = np.full(8, 3000)
    prefixes = SharedPrefixes.of_groups(np.arange(8) // 4, np.full(8, 2000), lengths)
    constraints, times = PlanConstraints(dp_size=1, max_tokens=16384), scenario(dp_size=1).times
    shared, alone = (plan_step(lengths, constraints, prefixes=one) for one in (prefixes, None))
    own, first = (int(times.sequences(np.array([n]), 1)[0]) for n in (3000, 2000))
    taken = int((shared.shared > 0).sum())
    assert taken == 6
    expected = 8 * own - sum(int(times.sequences(np.array([n]), 1)[0]) for n in shared.shared if n)
    expected += shared.num_micro_batches * times.fixed(1)
    assert simulate_plan(shared, times).seconds == pytest.approx(expected / 1e9, rel=1e-3)
    assert simulate_plan(alone, times).seconds > 1.2 * simulate_plan(shared, times).seconds
    assert own > first


def test_single_sizes_keep_the_cap_of_a_rank() -> None:
    case = scenario(dp_size=16, max_cp_size=16)
    steps, reasons = simulate_single_sizes(case)
    assert sorted([*steps, *reasons]) == [1, 2, 4, 8, 16]
    assert all("exceeds max_tokens" in reason for reason in reasons.values())
    for size, step in steps.items():
        found = step.plan.constraints
        assert (found.dp_size * size, found.cp_size, found.max_tokens) == (16, size, 8192 * size)
    assert case.simulate().seconds <= min(step.seconds for step in steps.values()) * 1.001


@pytest.mark.parametrize(("devices", "is_within_node"), [(8, True), (16, False)])
def test_activations_travel_between_stages(devices: int, is_within_node: bool) -> None:
    case = scenario(dp_size=devices // 8, tp_size=2, cp_size=2, pp_size=2, sequence_parallel=True, max_tokens=65536)
    plan, times = case.plan(), case.times
    cluster = times.cluster
    rate = cluster.node_bandwidth if is_within_node else cluster.network_bandwidth
    latency = cluster.node_latency if is_within_node else cluster.network_latency
    expected = latency + plan.tokens / (2 * 2) * MODEL.hidden_size * 2 / rate
    assert pack_work(plan, times).transfer == pytest.approx(expected)
    assert simulate_plan(plan, times).seconds > simulate_plan(plan, times, transfers="free").seconds


def test_slower_links_make_the_exchange_longer() -> None:
    case = scenario(dp_size=2, cp_size=8, max_tokens=65536)
    slow = replace(case, cluster=Cluster(node_bandwidth=30e9))
    assert slow.simulate().exchange_share > 4 * case.simulate().exchange_share


@pytest.mark.bad_input
def test_wrong_arguments_are_refused() -> None:
    case = scenario(dp_size=2, pp_size=2, max_tokens=65536)
    plan, times = case.plan(), case.times
    with pytest.raises(PlanError, match="plan is a dict"):
        simulate_plan({}, times)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="times is a float"):
        simulate_plan(plan, 1.0)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="pp_size=1"):
        simulate_plan(plan, replace(times, pp_size=1))
    for name, value in (("recomputed", 1.5), ("recomputed", float("nan")), ("head", -1.0), ("head", float("nan"))):
        with pytest.raises(PlanError, match=name):
            simulate_plan(plan, times, **{name: value})
    with pytest.raises(PlanError, match="at most"):
        constraints = PlanConstraints(dp_size=4096, pp_size=64, max_tokens=64)
        times = PackTimes(linear=1, quadratic=0, num_layers=64, hidden_size=8, kv_size=8, pp_size=64)
        simulate_plan(plan_step(np.full(4096 * 4, 64), constraints), times)
