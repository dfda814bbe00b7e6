"""Rehearsal of pipelines with stages of unequal size: each kind of stage, by its own layers."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.settings import ArchitectureConfig
from roll_batching.tools.rehearsal.advice import candidate_changes
from roll_batching.tools.rehearsal.job import StageReport, rehearse_job, totals_of
from roll_batching.tools.rehearsal.process import run_tasks
from roll_batching.tools.rehearsal.rank import with_layers
from roll_batching.tools.rehearsal.stages import letters_of, stages_of
from roll_batching.tools.rehearsal.task import RankTask
from tests.tools.rehearsal.jobs import job_of

pytestmark = pytest.mark.rehearse

PP3 = {"pipeline_model_parallel_size": 3}


def test_stages_are_represented_by_those_with_equal_layers() -> None:
    def names(*counts: int) -> list[tuple[str, int, int]]:
        return [(kind.name, kind.stage, kind.stages) for kind in stages_of(tuple((count,) for count in counts))]

    assert names(4) == [("the only stage", 0, 1)]
    assert names(4, 4) == [("stage 0", 0, 1), ("stage 1", 1, 1)]
    assert names(4, 4, 4) == [("stage 0", 0, 1), ("stage 1", 1, 1), ("stage 2", 2, 1)]
    assert names(3, 4, 4, 3) == [("stage 0", 0, 1), ("stages 1 to 2 (1)", 1, 2), ("stage 3", 3, 1)]
    assert names(3, 4, 5, 4, 5, 0) == [
        ("stage 0", 0, 1),
        ("stages 1, 3 (1)", 1, 2),
        ("stages 2, 4 (2)", 2, 2),
        ("stage 5", 5, 1),
    ]


def test_stages_with_other_parts_are_other_kinds() -> None:
    """Four stages of two chunks; the middle ones have as many layers, and not the same letters."""
    hybrid = {"pattern": "MMM*MM*M" + "MMMMMMMM", "mamba_num_heads": 4, "mamba_head_dim": 4, "mamba_num_groups": 2}
    shape = {"vocab_size": 9, "hidden_size": 8, "num_layers": 16, "num_attention_heads": 2}
    architecture = ArchitectureConfig.model_validate({**shape, "hybrid": {**hybrid, "mamba_state_dim": 4}})
    split = ((2, 2),) * 4
    assert letters_of(split, architecture) == ("MM|MM|", "*M|MM|", "MM|MM|", "*M|MM|")
    names = [kind.name for kind in stages_of(split, letters_of(split, architecture))]
    assert names == ["stage 0", "stage 1", "stage 2", "stage 3"]


def _by_name(stages: tuple[StageReport, ...]) -> dict[str, Any]:
    return {stage.name: stage.report for stage in stages}


@pytest.mark.slow
def test_each_stage_is_extrapolated_to_its_own_layers() -> None:
    """Against a rehearsal of the whole job: stages of 6, 9 and 0 layers, the last one with the head alone."""
    split = {**PP3, "pipeline_model_parallel_layout": "Et*6|t*9|L"}
    config = config_from_dict(job_of(megatron=split, architecture={"num_layers": 15}, task="sft", sequence_length=200))
    found = rehearse_job(config, world_size=3, device="cpu")
    assert [stage.name for stage in found.stages] == ["stage 0", "stage 1", "stage 2"]
    tasks = [RankTask(config=config, rank=rank, world_size=3, device="cpu") for rank in range(3)]
    for stage, truth in zip(found.stages, run_tasks(tasks), strict=True):
        report = stage.report
        assert report.kept == pytest.approx(truth.kept) and report.parameters == truth.parameters
        for phase, peak in truth.peaks.items():
            assert report.peaks[phase].bytes == pytest.approx(peak.bytes, rel=0.01), (stage.name, phase)
        assert report.flops == pytest.approx(truth.flops)
        assert report.training.model_flops == pytest.approx(truth.training.model_flops)
    totals = totals_of(found)
    assert totals.model == pytest.approx(found.stages[0].report.training.model_flops)
    assert 0.5 < totals.useful < 1


def test_shallow_models_have_equal_stages_of_the_same_chunks() -> None:
    layout = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|t|tL"}
    config = config_from_dict(job_of(megatron=layout, architecture={"num_layers": 5}, task="sft", sequence_length=200))
    shallow = with_layers(config, 8).actor_train
    strategy = shallow.strategy_args.strategy_config
    assert strategy.chunk_layers(8) == ((2, 2), (2, 2)) and not strategy.has_uneven_stages
    assert shallow.model_args.architecture is not None and shallow.model_args.architecture.num_layers == 8


def test_advice_keeps_the_number_of_stages_of_an_uneven_pipeline() -> None:
    def pipelines(**keys: Any) -> int:
        megatron = {"pipeline_model_parallel_size": 2, **keys}
        config = config_from_dict(
            job_of(megatron=megatron, architecture={"num_layers": 8}, task="sft", sequence_length=200)
        )
        changes = [str(one) for many in candidate_changes(config, 8) for one in many]
        return sum("pipeline_model_parallel_size" in change for change in changes)

    assert pipelines() > 0 == pipelines(num_layers_in_first_pipeline_stage=3)
