"""Slices of packs: their order on the stages of a pipeline, where packs are cut, and when that pays."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.planning import LinearQuadraticCost, Plan, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.pipeline.execution import JointPass, execute
from roll_batching.planning.pipeline.schedule import schedule_of, stage_operations
from roll_batching.planning.pipeline.slices import SLICE_COUNTS, slice_operations, sliced_makespan
from roll_batching.planning.plan_arrays import PackSlices
from roll_batching.planning.report import step_time

pytestmark = pytest.mark.planning

COST = LinearQuadraticCost(fixed=24576 * 512)


def workload(name: str, seed: int) -> tuple[np.ndarray, int]:
    """(lengths, cap) of everyday samples and of agents'."""
    median, sigma, count, cap = {"everyday": (2400, 0.9, 512, 16384), "agents": (9000, 0.8, 256, 65536)}[name]
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, count)
    return lengths.clip(16, cap).astype(np.int64), cap


def check_tables(cases: int, seed: int) -> None:
    """Every stage's passes, for random numbers of slices, run to their end, each once, in the promised order."""
    random = np.random.default_rng(seed)
    for _ in range(cases):
        counts, stages = random.integers(1, 9, random.integers(1, 9)).tolist(), int(random.integers(1, 9))
        lists = [slice_operations(counts, stage, stages) for stage in range(stages)]
        schedule_of(lists)  # raises for a deadlock
        pack_of = np.repeat(np.arange(len(counts)), counts)
        for operations in lists:
            forward = [op.micro_batch for op in operations if not op.is_backward]
            backward = [op.micro_batch for op in operations if op.is_backward]
            assert forward == list(range(sum(counts)))
            assert backward == sorted(forward, key=lambda unit: (pack_of[unit], -unit))
            done: set[int] = set()
            for operation in operations:  # a pack is forward as a whole before its first backward pass
                if operation.is_backward:
                    assert set(np.flatnonzero(pack_of == pack_of[operation.micro_batch])) <= done
                else:
                    done.add(operation.micro_batch)


def test_tables_have_no_deadlock() -> None:
    check_tables(400, 0)


@pytest.mark.slow
def test_ten_thousand_tables_have_no_deadlock() -> None:
    check_tables(10_000, 1)


def test_one_slice_a_pack_is_megatrons_schedule() -> None:
    for stages, count in [(1, 3), (2, 4), (4, 9), (4, 2), (8, 5)]:
        for stage in range(stages):
            assert slice_operations([1] * count, stage, stages) == stage_operations(stage, stages, count)


def test_as_few_forward_passes_run_ahead_as_can() -> None:
    """One forward pass less before any backward pass, and a stage would be behind the next one or lack a pack."""
    for counts in ([3, 1, 2], [4, 4], [1, 5, 1]):
        for stage in range(3):
            operations = slice_operations(counts, stage, 3)
            ahead = [op.is_backward for op in operations].index(True)
            assert ahead == min(sum(counts), counts[0] + 2 - stage) or counts != sorted(counts, reverse=True)


def test_the_makespan_is_that_of_the_execution() -> None:
    random = np.random.default_rng(2)
    for stages in (1, 2, 4, 7):
        for shares in (None, tuple(random.uniform(0.5, 1.5, stages).tolist())):
            counts = random.integers(1, 6, 7)
            costs = random.integers(1, 1000, counts.sum())
            passes = [JointPass((0,), float(cost), 2.0 * cost) for cost in costs]
            slices = [tuple(counts.tolist())]
            (timeline,) = execute([range(len(costs))], passes, stages=stages, shares=shares, slices=slices)
            end = max(events[-1].end for events in timeline)
            span = sliced_makespan(costs, counts, stages, shares)
            assert span == pytest.approx(end, abs=0 if shares is None else 3 * len(costs) * stages)


def test_transfers_beside_passes_delay_a_step_less_than_one_of_whole_packs() -> None:
    costs = np.full(16, 12.0)
    for hop in (0.5, 2.0):
        whole = [JointPass((0,), 4 * c, 8 * c, transfer=4 * hop) for c in costs[:4]]
        cut = [JointPass((0,), c, 2 * c, transfer=hop) for c in costs]
        ends = [
            max(events[-1].end for events in execute([range(len(passes))], passes, stages=4, **options)[0])
            for passes, options in ((whole, {}), (cut, {"slices": [(4,) * 4]}))
        ]
        bare = sliced_makespan(costs.astype(np.int64), np.full(4, 4), 4)
        assert bare < ends[1] < ends[0]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_cuts_are_aligned_and_divide_costs(cp_size: int) -> None:
    lengths, cap = workload("agents", 0)
    constraints = PlanConstraints(
        dp_size=4, pp_size=4, tp_size=2, cp_size=cp_size, sequence_parallel=True, max_tokens=cap, pipeline_slices=8
    )
    plan = plan_step(lengths, constraints, cost=COST)
    assert plan.slices is not None and plan.slices.counts.mean() == pytest.approx(8, rel=0.2)
    for rank in plan.micro_batches:
        for micro_batch in rank:
            assert (micro_batch.cuts % constraints.micro_batch_alignment == 0).all()
            assert (np.diff([0, *micro_batch.cuts.tolist(), micro_batch.tokens]) > 0).all()
    of_packs = np.split(plan.slices.costs, np.cumsum(plan.slices.counts)[:-1])
    assert [part.sum() for part in of_packs] == plan.costs.tolist()
    assert max(float(part.max() / part.mean()) for part in of_packs) < 1.05
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_shared_prefixes_are_cut_by_what_is_computed() -> None:
    shared = np.tile([0, 3000, 3000, 3000], 16)
    prefixes = SharedPrefixes(order=np.arange(64), shared=shared)
    constraints = PlanConstraints(dp_size=2, pp_size=2, max_tokens=16384, pipeline_slices=6)
    plan = plan_step(np.full(64, 4000), constraints, cost=COST, prefixes=prefixes)
    assert plan.report.shared_tokens > 0 and plan.slices is not None
    of_packs = np.split(plan.slices.costs, np.cumsum(plan.slices.counts)[:-1])
    assert [part.sum() for part in of_packs] == plan.costs.tolist()


def test_experts_have_equal_numbers_of_slices_at_every_index() -> None:
    lengths, cap = workload("everyday", 1)
    constraints = PlanConstraints(dp_size=4, pp_size=2, ep_size=4, max_tokens=cap, pipeline_slices=5)
    plan = plan_step(lengths, constraints, cost=COST)
    assert plan.slices is not None
    counts = plan.slices.counts.reshape(4, -1)
    assert (counts == counts[0]).all() and counts.max() > 2


TABLE = [("everyday", 4, 8, 1.04), ("everyday", 8, 8, 1.09), ("agents", 4, 16, 1.05), ("agents", 8, 16, 1.09)]
"""Samples, stages, slices of a pack, and the most that a step may take over perfectly shared work."""


@pytest.mark.parametrize(("name", "stages", "slices", "most"), TABLE)
def test_stages_hardly_wait(name: str, stages: int, slices: int, most: float) -> None:
    lengths, cap = workload(name, 0)
    constraints = PlanConstraints(dp_size=8, pp_size=stages, max_tokens=cap, pipeline_slices=slices)
    cost = LinearQuadraticCost()
    ideal = 3 * sum(cost.sequence(int(n)) for n in lengths) / 8
    ratio = step_time(plan_step(lengths, constraints, cost=COST), 0) / ideal
    whole = plan_step(lengths, replace(constraints, pipeline_slices=1), cost=COST)
    assert ratio < most < step_time(whole, 0) / ideal


def test_auto_is_never_slower_than_whole_packs() -> None:
    random = np.random.default_rng(3)
    took_slices = 0
    for case in range(40):
        count, median = int(random.integers(3, 60)), float(random.choice([300, 2000, 20000]))
        lengths = random.lognormal(np.log(median), 0.9, count).clip(1, 65536).astype(np.int64)
        constraints = PlanConstraints(
            dp_size=int(random.choice([1, 2, 4])),
            pp_size=int(random.choice([1, 2, 4])),
            tp_size=1 + case % 2,
            sequence_parallel=case % 2 == 1,
            max_tokens=int(random.choice([65536, 131072])),
        )
        whole = plan_step(lengths, constraints, cost=COST)
        auto = plan_step(lengths, replace(constraints, pipeline_slices="auto"), cost=COST)
        took_slices += auto.slices is not None
        assert step_time(auto, COST.fixed) <= step_time(whole, COST.fixed)
        assert sorted(auto.samples) == sorted(whole.samples)
    assert took_slices > 10


def test_auto_cuts_no_slices_that_are_too_small() -> None:
    lengths = np.full(64, 1000)
    plan = plan_step(lengths, PlanConstraints(dp_size=1, pp_size=4, max_tokens=4096, pipeline_slices="auto"), cost=COST)
    assert plan.slices is None or plan.slices.counts.max() <= 2
    assert SLICE_COUNTS[0] == 1


def broken() -> dict[str, tuple[dict[str, Any], str]]:
    return {
        "descending": ({"cuts": [32, 16]}, "cuts must rise"),
        "misaligned": ({"cuts": [15, 32]}, "multiples of 2"),
        "outside": ({"cuts": [16, 64]}, "inside"),
        "counts": ({"offsets": [0, 2, 2]}, "load what Plan.to_dict returned"),
        "names": ({"rows": []}, "pass PackSlices.to_dict"),
    }


@pytest.mark.parametrize("name", broken())
def test_wrong_cuts_are_refused(name: str) -> None:
    changes, message = broken()[name]
    constraints = PlanConstraints(dp_size=1, pp_size=2, tp_size=2, sequence_parallel=True, max_tokens=64)
    plan = plan_step([64], constraints)
    slices = PackSlices(*(np.array(values) for values in ([0, 2], [16, 32], [1, 1, 1])))
    cut = replace(plan, slices=slices)
    values = cut.to_dict()
    assert Plan.from_dict(values) == cut != plan
    values["slices"] |= changes
    with pytest.raises(PlanError, match=message):
        Plan.from_dict(values)


@pytest.mark.parametrize("layout", [{}, {"cp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=str)
@pytest.mark.parametrize("slices", [1, 4, "auto"])
@pytest.mark.parametrize("stages", [1, 4])
def test_longer_sequences_in_slices_of_at_most_the_cap(stages: int, slices: Any, layout: dict[str, Any]) -> None:
    random, found = np.random.default_rng(stages), 0
    for _ in range(8):
        cap = int(random.integers(16, 3000))
        lengths = random.lognormal(np.log(cap), 1.2, int(random.integers(1, 30))).clip(1, 30 * cap).astype(np.int64)
        constraints = PlanConstraints(
            dp_size=2, pp_size=stages, max_tokens=cap, oversize="slice", pipeline_slices=slices, **layout
        )
        plan = plan_step(lengths, constraints, cost=COST)
        alone = plan_step(lengths, replace(constraints, oversize="alone", pipeline_slices=1), cost=COST)
        assert sorted(plan.tokens.tolist())[-3:] == sorted(alone.tokens.tolist())[-3:]
        assert (plan.tokens.max() > cap) == (lengths.max() > constraints.usable_tokens)
        for rank in plan.micro_batches:
            for micro_batch in rank:
                parts = np.diff([0, *micro_batch.cuts.tolist(), micro_batch.tokens])
                assert parts.max() <= cap and len(micro_batch.samples) == 1 or micro_batch.tokens <= cap
        if plan.tokens.max() > cap:
            whole, found = replace(alone, constraints=constraints), found + 1
            with pytest.raises(PlanError, match="cut it into more"):
                Plan.from_dict(whole.to_dict() | {"fingerprint": whole.fingerprint})
    assert found > 3


def test_where_longer_sequences_are_not_cut() -> None:
    common: dict[str, Any] = {"dp_size": 2, "pp_size": 2, "max_tokens": 64, "oversize": "slice"}
    with pytest.raises(PlanError, match='oversize="slice" cuts packs into slices, which needs vpp_size=1 instead of 2'):
        PlanConstraints(**common, vpp_size=2)
    with pytest.raises(PlanError, match="here 2 ranks wait for each other at every slice"):
        PlanConstraints(**common, ep_size=2)
    with pytest.raises(PlanError, match="mode='dynamic' does not make"):
        PlanConstraints(**common, mode="dynamic")
    with pytest.raises(PlanError, match='oversize="slice" is not available with max_cp_size=2'):
        PlanConstraints(**common | {"pp_size": 1}, max_cp_size=2)


@pytest.mark.parametrize(
    "options", [{"vpp_size": 2}, {"mode": "dynamic"}, {"max_cp_size": 2}, {"shared_shapes": True}], ids=str
)
def test_what_is_not_cut(options: dict[str, Any]) -> None:
    common: dict[str, Any] = {"dp_size": 2, "pp_size": 2, "max_tokens": 64}
    with pytest.raises(PlanError, match=f"pipeline_slices=4 cuts packs into slices, which needs {next(iter(options))}"):
        PlanConstraints(**common, **options, pipeline_slices=4)
    assert not PlanConstraints(**common, **options, pipeline_slices="auto").cuts_packs
