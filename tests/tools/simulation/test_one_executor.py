"""One executor of pipeline schedules: compiled makespans of the planner, simulated steps and reports agree with it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from roll_batching.planning import LinearQuadraticCost, Plan, PlanConstraints, plan_step
from roll_batching.planning.dynamic_cp.joint import columns_makespan, joint_makespan
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.planning.pipeline.execution import JointPass, Timeline, execute
from roll_batching.planning.pipeline.ordering import pipeline_makespan
from roll_batching.planning.pipeline.schedule import is_admissible, static_schedule
from roll_batching.planning.report import step_time
from roll_batching.tools.report.plan_section import make_timeline
from roll_batching.tools.simulation import simulate_plan

LINEAR, QUADRATIC = 24576, 1
RATE = 1e12


def end_of(timeline: Timeline) -> float:
    return max(passes[-1].end for stages in timeline for passes in stages)


def times_of(pp_size: int) -> PackTimes:
    """Times in proportion to `LinearQuadraticCost(LINEAR, QUADRATIC)`: no fixed part, no floor, no tiles."""
    cluster = Cluster(matmul_rate=RATE, attention_rate=RATE, matmul_half_tokens=0.0, attention_tile=1, layer_floor=0.0)
    sizes = {"num_layers": 8, "hidden_size": 64, "kv_size": 64}
    return PackTimes(linear=LINEAR * 1e3, quadratic=QUADRATIC * 1e3, pp_size=pp_size, cluster=cluster, **sizes)


LAYOUTS: dict[str, dict[str, Any]] = {
    "ranks meet at the end": {"dp_size": 4},
    "experts": {"dp_size": 4, "ep_size": 2},
    "lockstep": {"dp_size": 4, "objective": "lockstep"},
    "pipeline": {"dp_size": 2, "pp_size": 4},
    "pipeline with experts": {"dp_size": 4, "pp_size": 2, "ep_size": 2},
    "virtual stages": {"dp_size": 2, "pp_size": 2, "vpp_size": 2},
    "virtual stages in groups of any size": {"dp_size": 2, "pp_size": 2, "vpp_size": 2, "group_size": "auto"},
    "a size per pack": {"dp_size": 4, "max_cp_size": 4},
    "a size per pack in a pipeline": {"dp_size": 4, "pp_size": 2, "max_cp_size": 4},
    "a size per pack with virtual stages": {"dp_size": 4, "pp_size": 2, "vpp_size": 2, "max_cp_size": 4},
}


def predicted_waiting(plan: Plan) -> float:
    """Share of waiting by the planner's own prediction of the step."""
    constraints = plan.constraints
    if plan.blocks is not None:
        work = sum(int(plan.blocks.times[packs].sum()) for packs in plan.blocks.lists) / constraints.dp_size
        return 1 - work / plan.blocks.step_time
    seconds = step_time(plan, 0)
    if constraints.pp_size > 1:  # its unit is the forward pass through one chunk: a third of the work of a stage
        seconds /= 3 * constraints.vpp_size
    return 1 - float(plan.costs.sum()) / constraints.dp_size / seconds


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_planner_simulation_and_report_say_the_same_waiting_for_one_plan_and_cost(layout: dict[str, Any]) -> None:
    times, cost = times_of(layout.get("pp_size", 1)), LinearQuadraticCost(LINEAR, QUADRATIC)
    for seed in range(6):
        lengths = np.random.default_rng(seed).lognormal(np.log(400), 1.2, 50).clip(16, 2048).astype(np.int64)
        constraints = PlanConstraints(max_tokens=2048, **layout)
        plan = plan_step(lengths, constraints, cost=cost, times=times if constraints.has_cp_per_pack else None)
        step, timeline = simulate_plan(plan, times, transfers="free"), make_timeline(plan, constraints.dp_size)
        waiting = step.waiting_share
        assert timeline.bubble_share == pytest.approx(waiting, rel=1e-4, abs=1e-6)
        assert predicted_waiting(plan) == pytest.approx(waiting, rel=1e-4, abs=1e-6)
        assert step.with_free_transfers().waiting_share == waiting
        assert simulate_plan(plan, times, transfers="instant").seconds >= step.seconds * (1 - 1e-9)


def test_the_makespan_of_a_pipeline_is_that_of_its_execution() -> None:
    random = np.random.default_rng(0)
    for stages, chunks, count, group in itertools.product((1, 2, 4), (1, 2, 3), (1, 4, 7, 9), (None, 4, 5)):
        if (stages == 1 and chunks > 1) or (chunks > 1 and not is_admissible(count, stages, group or stages)):
            continue
        costs = random.integers(1, 1000, count)
        shares = None if count == 4 else tuple(random.uniform(0.5, 1.5, stages * chunks).tolist())
        sizes: dict[str, Any] = {"stages": stages, "chunks": chunks, "group_size": group}
        passes = [JointPass((0,), float(cost), 2.0 * cost) for cost in costs]
        end = end_of(execute([range(count)], passes, **sizes, shares=shares, posts_receives=True))
        span = pipeline_makespan(costs, **sizes, shares=shares)
        assert span == pytest.approx(end, abs=0 if shares is None else 3 * count * stages * chunks)  # costs are rounded


def test_the_makespan_of_packs_on_blocks_of_ranks_is_that_of_their_execution() -> None:
    random = np.random.default_rng(1)
    for case in range(30):
        ranks, stages = 4, 1 + case % 4
        shares = None if case % 2 else tuple(random.uniform(0.5, 1.5, stages).tolist())
        packs = [
            (int(random.integers(ranks // size)) * size, size, 3 * int(random.integers(1, 1000)))
            for size in (4, 2, 1)
            for _ in range(int(random.integers(1, 5)))
        ]
        first_ranks, sizes, times = (np.array(column, dtype=np.int64) for column in zip(*packs, strict=True))
        lists = [[p for p, (first, size, _) in enumerate(packs) if first <= r < first + size] for r in range(ranks)]
        joint = [JointPass(tuple(range(first, first + size)), time / 3, time * 2 / 3) for first, size, time in packs]
        filled = [packs for packs in lists if packs]
        end = end_of(execute(filled, joint, stages=stages, shares=shares, posts_receives=True))
        span = joint_makespan(first_ranks, sizes, times, ranks, stages, shares)
        assert span == pytest.approx(end, abs=1e-6 if shares is None else 4 * len(packs) * stages)


def test_the_makespan_of_columns_is_that_of_their_execution() -> None:
    random = np.random.default_rng(2)
    for stages, chunks, count, width in itertools.product((1, 2, 4), (1, 2), (4, 8), (1, 2)):
        if stages == 1 and chunks > 1:
            continue
        columns, first_ranks, sizes = [], [], []
        for column in range(count):
            for first, size in ([(0, 4)], [(0, 2), (2, 2)], [(0, 1), (1, 1), (2, 2)])[int(random.integers(3))]:
                columns.append(column)
                first_ranks.append(first)
                sizes.append(size)
        times = random.integers(1, 1000, len(columns))
        together: dict[tuple[int, int], list[int]] = {}  # by column and first rank: packs that meet
        for pack, (column, first) in enumerate(zip(columns, first_ranks, strict=True)):
            start = max((f for c, f in together if c == column), default=0) if first % width else first
            together.setdefault((column, start), []).append(pack)
        lists: list[list[int]] = [[] for _ in range(4)]
        joint = []
        for packs in together.values():
            members = tuple(first_ranks[p] + offset for p in packs for offset in range(sizes[p]))
            longest = float(times[packs].max())
            joint.append(JointPass(members, longest, 2 * longest))
            for rank in members:
                lists[rank].append(len(joint) - 1)
        sized: dict[str, Any] = {"stages": stages, "chunks": chunks, "group_size": stages if chunks > 1 else None}
        end = end_of(execute(lists, joint, **sized, posts_receives=True))
        arrays = [np.array(values, dtype=np.int64) for values in (columns, first_ranks, sizes)]
        schedule = static_schedule(stages, count, chunks, sized["group_size"])
        assert columns_makespan(*arrays, times, 4, width, schedule) == end
