"""The timeline of a plan: every sample once, bubbles where ranks wait, the planner's own makespan."""

from __future__ import annotations

import json

import numpy as np
import pytest

from roll_batching.errors import PlanError
from roll_batching.jobs.observe import run_files
from roll_batching.jobs.observe.run_files import read_plan, write_plan
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.planning.pipeline.ordering import pipeline_makespan
from roll_batching.tools.report.plan_section import _timeline_chart, make_timeline
from tests.planning.dynamic_cp.test_search import times_of

pytestmark = pytest.mark.planning


def plan_of(count: int = 60, **constraints):
    lengths = np.random.default_rng(0).integers(10, 900, count)
    return plan_step(lengths, PlanConstraints(max_tokens=2048, **constraints))


def test_ranks_that_wait_once_have_one_bubble_at_the_end_but_the_costliest():
    plan = plan_of(dp_size=3)
    timeline = make_timeline(plan, 3)
    work = plan.by_rank(plan.costs).sum(axis=1)
    assert timeline.end == pytest.approx(work.max() / work.mean())
    waits = {row: duration for row, _, duration in timeline.bubbles}
    for row in range(3):
        assert waits.get(row, 0.0) == pytest.approx((work.max() - work[row]) / work.mean(), abs=1e-6)
    assert timeline.bubble_share == pytest.approx(1 - work.mean() / work.max(), abs=1e-6)


def test_lockstep_ranks_begin_every_micro_batch_together():
    plan = plan_of(dp_size=4, objective="lockstep")
    timeline = make_timeline(plan, 4)
    for index in range(plan.num_micro_batches):
        assert len({box.start for box in timeline.boxes if box.index == index}) == 1
    costs = plan.by_rank(plan.costs)
    assert timeline.end == pytest.approx(costs.max(axis=0).sum() / costs.sum(axis=1).mean())


@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (4, 1), (2, 2)])
def test_a_pipelines_end_is_the_planners_makespan(pp, vpp):
    plan = plan_of(dp_size=2, pp_size=pp, vpp_size=vpp)
    timeline = make_timeline(plan, 2)
    costs = plan.by_rank(plan.costs)
    slowest = max(
        pipeline_makespan(row, stages=pp, chunks=vpp, group_size=plan.group_size) / vpp for row in costs.tolist()
    )
    assert timeline.end == pytest.approx(slowest / (3 * costs.sum(axis=1).mean()))
    assert len(timeline.boxes) == 2 * pp * 2 * plan.num_micro_batches * vpp
    for row in range(2 * pp):
        boxes = sorted((b for b in timeline.boxes if b.row == row), key=lambda b: b.start)
        assert all(a.start + a.duration <= b.start + 1e-9 for a, b in zip(boxes, boxes[1:], strict=False))


def test_packs_on_blocks_of_ranks_begin_together_and_overlap_nothing():
    lengths = np.r_[np.full(3, 7000), np.random.default_rng(1).integers(50, 900, 60)]
    plan = plan_step(lengths, PlanConstraints(dp_size=4, max_tokens=2048, max_cp_size=4), times=times_of())
    assert plan.blocks is not None and plan.cp_sizes.max() > 1
    timeline = make_timeline(plan, 4)
    for pack in range(len(plan.tokens)):
        boxes = [box for box in timeline.boxes if box.pack == pack]
        assert len(boxes) == plan.cp_sizes[pack] and len({(box.start, box.duration) for box in boxes}) == 1
    for row in range(4):
        boxes = sorted((b for b in timeline.boxes if b.row == row), key=lambda b: b.start)
        assert [box.pack for box in boxes] == plan.blocks.lists[row]
        assert all(a.start + a.duration <= b.start + 1e-9 for a, b in zip(boxes, boxes[1:], strict=False))


def test_the_chart_shows_each_sample_with_its_length_and_says_what_it_leaves_out():
    plan = plan_of(dp_size=3)
    samples, frames, bubbles = _timeline_chart(plan, "rl, step 1").traces
    assert len(frames["x"]) == len(plan.tokens)
    assert sorted(samples["marker"]["color"]) == sorted(plan.lengths.tolist())
    assert {text.split(":")[0] for text in samples["hovertext"]} == {f"sample {i}" for i in range(60)}
    assert all("lengths: " in text and "of the cap" in text for text in samples["hovertext"])
    assert all(text.startswith("waits ") for text in bubbles["hovertext"])
    many = plan_step(np.full(900, 100), PlanConstraints(dp_size=90, max_tokens=2048))
    chart = _timeline_chart(many, "rl, step 1")
    assert "26 more ranks are not drawn" in chart.note
    assert {*chart.traces[0]["y"]} == set(range(64))
    crowd = plan_step(np.full(4000, 100), PlanConstraints(dp_size=4, max_tokens=2048))
    assert len(_timeline_chart(crowd, "rl, step 1").traces[0]["y"]) == len(crowd.tokens)


def test_a_written_plan_is_read_again_and_a_large_one_is_counted(tmp_path, monkeypatch):
    plan = plan_of(dp_size=2)
    write_plan(tmp_path, plan, phase="rl", step=7)
    last = read_plan((tmp_path / "last_plan.json").read_text())
    assert (last.phase, last.step, last.samples) == ("rl", 7, 60) and last.plan == plan
    monkeypatch.setattr(run_files, "MOST_SAMPLES", 59)
    write_plan(tmp_path, plan, phase="rl", step=8)
    last = read_plan((tmp_path / "last_plan.json").read_text())
    assert (last.step, last.samples, last.plan) == (8, 60, None)


@pytest.mark.bad_input
def test_a_broken_plan_is_an_error_of_ours(tmp_path):
    write_plan(tmp_path, plan_of(dp_size=2), phase="rl", step=7)
    good = json.loads((tmp_path / "last_plan.json").read_text())
    texts = ["", "[]", "{}", "[" * 100_000, json.dumps(good)[:-40], json.dumps(good | {"step": None})]
    texts.append(json.dumps(good | {"plan": good["plan"] | {"tokens": [1e400]}}))
    texts.append(json.dumps(good | {"plan": good["plan"] | {"samples": good["plan"]["samples"][::-1]}}))
    texts.append(json.dumps(good | {"plan": good["plan"] | {"offsets": "<script>"}}))
    for text in texts:
        with pytest.raises(PlanError):
            read_plan(text)
