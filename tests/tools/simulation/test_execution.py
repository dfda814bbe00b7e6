"""Megatron's order of passes and transfers, on real processes; makespans against a separate simulation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.simulation.sleeping import SleepingJob, SleepingPlan, step_seconds, train
from roll_batching.errors import PlanError
from roll_batching.planning.pipeline.execution import JointPass, Timeline, Transfers, execute, stage_program
from roll_batching.planning.pipeline.schedule import Pass, is_admissible
from tests.planning.pipeline_simulation import simulate_pipeline
from tests.support.ranks import run_ranks

TRAIN = f"{train.__module__}:{train.__name__}"


def plan_of(forward: list[float]) -> SleepingPlan:
    return SleepingPlan(packs=(tuple(range(len(forward))),), forward=tuple(forward))


def run_one(forward: list[float], stages: int, chunks: int = 1, group_size: int | None = None) -> Timeline:
    passes = [JointPass((0,), seconds / chunks, 2 * seconds / chunks) for seconds in forward]
    return execute([list(range(len(forward)))], passes, stages=stages, chunks=chunks, group_size=group_size)


def makespan(timeline: Timeline) -> float:
    return max(passes[-1].end for stages in timeline for passes in stages)


@pytest.mark.layouts
@pytest.mark.parametrize(("stages", "chunks", "counts"), [(4, 1, (2, 6)), (2, 2, (2, 6)), (4, 2, (4, 8))])
def test_passes_and_transfers_have_megatrons_order(stages: int, chunks: int, counts: tuple[int, ...]) -> None:
    job = SleepingJob(plans=tuple(plan_of([0.0] * count) for count in counts), stages=stages, chunks=chunks)
    for result in run_ranks(job.processes, TRAIN, job):
        for place, count in enumerate(counts):
            program = stage_program(result["stage"], stages, count, chunks, stages if chunks > 1 else None)
            passes = [(one.is_backward, one.micro_batch, one.chunk) for one in program if isinstance(one, Pass)]
            (ran,) = result["steps"][place]
            assert [one[:3] for one in ran] == passes
            calls = [
                (one.send_next is not None, one.send_prev is not None, one.receive_prev, one.receive_next)
                for one in program
                if isinstance(one, Transfers)
            ]
            assert result["transfers"][place] == calls


@pytest.mark.slow
@pytest.mark.layouts
def test_sleeping_stages_take_as_long_as_predicted(report) -> None:
    """Interleaved: unequal micro-batches wait for calls that return late, which a free order of messages would not."""
    equal, unequal = [0.13] * 8, [0.2, 0.05, 0.3, 0.02, 0.2, 0.02, 0.2, 0.05]
    job = SleepingJob(plans=(plan_of(equal), plan_of(unequal)), stages=4, chunks=2, repeats=2)
    measured = step_seconds(run_ranks(job.processes, TRAIN, job))
    predicted = [makespan(run_one(forward, 4, 2, 4)) for forward in (equal, unequal)]
    free = [simulate_pipeline(forward, stages=4, chunks=2, group_size=4).makespan for forward in (equal, unequal)]
    ratio, expected = measured[1] / measured[0], predicted[1] / predicted[0]
    report(f"PP 4 x VPP 2, sleeping: {measured} s, predicted {predicted}; ratio {ratio:.3f}, predicted {expected:.3f}")
    assert ratio == pytest.approx(expected, rel=0.1)
    assert abs(free[1] / free[0] / expected - 1) > 0.15, "the case does not tell the two apart"


def test_plain_pipelines_take_about_as_long_as_in_a_separate_simulation() -> None:
    """There sends do not wait for their receivers. Here they may delay passes, and rarely the whole step."""
    random = np.random.default_rng(0)
    for stages, count in itertools.product((1, 2, 3, 8), (1, 2, 7, 16)):
        forward = random.lognormal(0, 0.8, count).tolist()
        timeline = run_one(forward, stages)
        other = simulate_pipeline(forward, stages=stages)
        assert other.makespan - 1e-9 <= makespan(timeline) <= other.makespan * 1.06
        equal = simulate_pipeline([1.0] * count, stages=stages).makespan
        assert makespan(run_one([1.0] * count, stages)) == pytest.approx(equal)
        for stage, passes in enumerate(timeline[0]):
            starts = sorted(one.start for one in other.intervals if one.stage == stage)
            assert all(one.start >= start - 1e-9 for one, start in zip(passes, starts, strict=True))


def test_warm_up_waits_for_the_next_stage_by_hand() -> None:
    passes = [JointPass((0,), seconds, 2.0 * seconds) for seconds in (3.0, 1.0, 1.0, 1.0, 1.0)]
    stage = execute([[0, 1, 2, 3, 4]], passes, stages=4)[0][0]
    # Stage 1 receives micro-batch 1 at 6, stage 2 sends micro-batch 0 on at 9.
    assert [one.start for one in stage[:4]] == [0, 3, 6, 9]


def test_calls_that_wait_never_shorten_an_interleaved_step() -> None:
    random = np.random.default_rng(1)
    longer = 0
    for stages, chunks, count, group in itertools.product((2, 4), (2, 3), (4, 8, 9), (4, 5)):
        if not is_admissible(count, stages, group) or group < stages:
            continue
        equal = [1.0] * count
        free = simulate_pipeline(equal, stages=stages, chunks=chunks, group_size=group).makespan
        assert makespan(run_one(equal, stages, chunks, group)) >= free - 1e-9
        forward = random.lognormal(0, 0.8, count).tolist()
        free = simulate_pipeline(forward, stages=stages, chunks=chunks, group_size=group).makespan
        blocking = makespan(run_one(forward, stages, chunks, group))
        assert blocking >= free - 1e-9
        longer += blocking > free * 1.01
    assert longer > 5


def test_a_transfer_delays_every_hop() -> None:
    # One micro-batch over three stages: two hops there, two back.
    (timeline,) = execute([[0]], [JointPass((0,), 1.0, 2.0, transfer=0.5)], stages=3)
    assert makespan([timeline]) == 3 + 6 + 4 * 0.5


def test_ranks_of_a_pack_wait_for_each_other() -> None:
    passes = [JointPass((0,), 1.0, 2.0), JointPass((1,), 3.0, 6.0), JointPass((0, 1), 1.0, 1.0)]
    timeline = execute([[0, 2], [1, 2]], passes)
    assert [(one.start, one.end) for one in timeline[0][0]] == [(0, 1), (1, 3), (9, 10), (10, 11)]
    assert [(one.start, one.end) for one in timeline[1][0]] == [(0, 3), (3, 9), (9, 10), (10, 11)]


def test_ranks_that_wait_in_a_circle_are_an_error() -> None:
    passes = [JointPass((0, 1), 1.0, 1.0), JointPass((0, 1), 1.0, 1.0)]
    with pytest.raises(PlanError, match="waits forever"):
        execute([[0, 1], [1, 0]], passes)
