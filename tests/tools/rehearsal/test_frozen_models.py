"""Rehearsed jobs with a teacher, and of KTO: passes of frozen models, also in another layout, against real steps."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.tools.rehearsal.advice import candidate_changes, caps_of
from roll_batching.tools.rehearsal.stages import rank_kinds, stages_of
from roll_batching.tools.rehearsal.task import MISMATCHED, MISMATCHED_REFERENCE, REFERENCE, TEACHER
from tests.support.ranks import run_ranks
from tests.tools.rehearsal.jobs import ARCHITECTURE, LIMIT, job_of, task_of, worst_peak
from tests.tools.rehearsal.test_accuracy import of_the_model, rehearsed

pytestmark = pytest.mark.rehearse

CAPS = {"max_packed_sequence_length_train": 400, "max_packed_sequence_length_forward": 600}
OWN = {"use_sequence_packing": True, "sequence_packing_args": CAPS}
WIDE = {**ARCHITECTURE, "hidden_size": 192, "num_layers": 6}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}


def taught(layout: dict[str, Any] | None = None, k: int = 8, **keys: Any) -> dict[str, Any]:
    teacher = {"model_args": {"model_name_or_path": "no/teacher", "architecture": WIDE}, **OWN}
    if layout is not None:
        teacher["strategy_args"] = {"strategy_name": "megatron_infer", "strategy_config": layout}
    return job_of(task="distill", logits_topk=k, teacher=teacher, **keys)


def kto(**keys: Any) -> dict[str, Any]:
    train = {"sequence_packing_args": {**CAPS, "max_packed_sequence_length_train": 512}}
    return job_of(task="kto", loss_function="kto", sequence_length=200, reference=OWN, train=train, **keys)


JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "a teacher": (taught(k=0), 1),  # its fields of the whole vocabulary are large enough to be missed
    "a teacher in TP2 of a student in PP2": (taught({**TP2, "pipeline_model_parallel_size": 1}, megatron=PP2), 2),
    "a teacher in PP2 over texts": (
        {**taught(PP2), "task": "sft", "loss_function": "distill", "sequence_length": 200, "distill_loss_weight": 0.5},
        2,
    ),
    "KTO": (kto(), 1),
    "KTO, reference in TP2": (kto(), 2),
}
JOBS["KTO, reference in TP2"][0]["reference"] = {**OWN, "strategy_args": {"strategy_config": TP2}}
"""Jobs with their number of processes."""
FAST = ("a teacher", "KTO")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in JOBS])
def test_memory_flops_and_collectives_equal_those_of_the_real_step(name: str, report: Any) -> None:
    job, world = JOBS[name]
    target, task = "tests.tools.rehearsal.jobs:measured", task_of(job, world)
    real = run_ranks(world, target, task)
    for rank in {0, world - 1}:
        found, truth = rehearsed(task_of(job, world, rank)), real[rank]
        frozen = {REFERENCE, MISMATCHED, MISMATCHED_REFERENCE} if name.startswith("KTO") else {TEACHER}
        assert set(found.peaks) == set(truth.peaks) > {*frozen, "forward", "backward"}
        worst = worst_peak(found, truth, lambda rank=rank: run_ranks(world, target, task)[rank])
        report(f"{name}, rank {rank}: peaks of memory within {worst:.2%} of the real step")
        assert worst < LIMIT
        assert found.kept == truth.kept and (REFERENCE if name.startswith("KTO") else TEACHER) in found.kept
        assert of_the_model(found) == of_the_model(truth)
        assert found.flops == truth.flops
        assert found.tokens[TEACHER if TEACHER in frozen else MISMATCHED_REFERENCE] == 600


def test_kinds_of_ranks_are_those_of_all_pipelines() -> None:
    def kinds(policy: int, teacher: int, world: int) -> list[tuple[str, int, int]]:
        stages = [stages_of(((2,),) * size) for size in (policy, teacher)]
        return [(kind.name, kind.rank, kind.stages) for kind in rank_kinds(stages[0], {"teacher": stages[1]}, world)]

    assert kinds(1, 1, 4) == [("the only stage", 0, 1)]
    assert kinds(2, 1, 4) == [("stage 0", 0, 1), ("stage 1", 2, 1)]
    assert kinds(2, 2, 4) == [("stage 0", 0, 1), ("stage 1", 2, 1)]
    assert kinds(1, 2, 4) == [("the only stage, teacher's stage 0", 0, 1), ("the only stage, teacher's stage 1", 2, 0)]
    assert kinds(4, 2, 8) == [
        ("stage 0, teacher's stage 0", 0, 1),
        ("stage 1, teacher's stage 0", 2, 1),
        ("stage 2, teacher's stage 1", 4, 1),
        ("stage 3, teacher's stage 1", 6, 1),
    ]


@pytest.mark.config
def test_caps_and_layouts_of_frozen_models_are_searched() -> None:
    def caps(job: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        config = config_from_dict(job)
        dims = config.actor_train.strategy_args.strategy_config.parallel_dims(4)
        return {cap.key: cap.phases for cap in caps_of(config, dims)}

    forward = "sequence_packing_args.max_packed_sequence_length_forward"
    assert caps(taught())[f"teacher.{forward}"] == (TEACHER,)
    of_kto = caps(kto())
    assert of_kto[f"actor_train.{forward}"] == (MISMATCHED,)
    assert of_kto[f"reference.{forward}"] == (MISMATCHED_REFERENCE,)
    assert REFERENCE in next(iter(of_kto.values()))
    for layout, followed in ((None, 2), ({"tensor_model_parallel_size": 1, **PP2}, 1)):
        config = config_from_dict(taught(layout))
        wider = next(one for kind in candidate_changes(config, 4) for one in kind if "tensor_model" in str(one))
        teacher = wider.of(config).teacher
        assert teacher is not None and teacher.strategy_args.strategy_config.tensor_model_parallel_size == followed


@pytest.mark.slow
def test_a_teacher_in_a_pipeline_is_reported_for_the_ranks_of_its_stages() -> None:
    from roll_batching.tools.rehearsal.job import rehearse_job, totals_of
    from roll_batching.tools.rehearsal.report import lines_of

    job = taught({"tensor_model_parallel_size": 1, **PP2})
    rehearsal = rehearse_job(config_from_dict(job), world_size=2, device="cpu")
    assert [(stage.name, stage.stages) for stage in rehearsal.stages] == [
        ("the only stage, teacher's stage 0", 1),
        ("the only stage, teacher's stage 1", 0),
    ]
    report = rehearsal.stages[0].report
    passes = (report.flops["forward"] + report.flops["backward"]) / report.micro_batches
    assert totals_of(rehearsal).computed == passes, "the student's work once"
    text = "\n".join(lines_of(rehearsal, 80 << 30))
    assert "teacher: 8 likely tokens of each position, 64 bytes" in text and "600 tokens (teacher)" in text
