"""Rehearsals of jobs that freeze modules, against real steps."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.rehearsal.job import rehearse_job
from tests.rehearsal.jobs import job_of, task_of
from tests.rehearsal.test_accuracy import PP2, of_the_model, rehearsed
from tests.rehearsal.test_images import RL, vision_job
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.rehearse


def frozen(job: dict[str, Any], prefix: str) -> dict[str, Any]:
    job["actor_train"]["model_args"]["freeze_module_prefix"] = prefix
    return job


JOBS = {
    "embedding and a layer": frozen(job_of(), "embedding,decoder.layers.0"),
    "vision encoder": frozen(vision_job(**RL), "vision_model"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * ("vision" in name)) for name in JOBS])
def test_memory_and_flops_equal_those_of_the_real_step(name, report):
    (truth,) = run_ranks(1, "tests.rehearsal.jobs:measured", task_of(JOBS[name], 1))
    found = rehearsed(task_of(JOBS[name], 1))
    phases = set(truth.peaks) - {"build", "gradient sync"}
    worst = max(abs(found.peaks[phase].bytes / truth.peaks[phase].bytes - 1) for phase in phases)
    report(f"{name} frozen: peaks of memory within {worst:.4%} of the real step")
    assert worst < 1e-3
    assert found.kept == truth.kept
    assert of_the_model(found) == of_the_model(truth) != {}
    assert found.flops == truth.flops


@pytest.mark.slow
def test_frozen_parameters_have_neither_gradients_nor_optimizer_state():
    whole, part = (rehearsed(task_of(job, 1)) for job in (job_of(), frozen(job_of(), "decoder.layers.0")))
    for kind in ("gradients", "optimizer"):
        assert part.kept[kind] < whole.kept[kind]


@pytest.mark.bad_input
def test_a_pipeline_with_frozen_modules_is_refused(report):
    with pytest.raises(ConfigFileError, match="freeze_module_prefix.*in one pipeline stage only") as caught:
        rehearse_job(config_from_dict(frozen(job_of(megatron=PP2), "embedding")), world_size=2)
    report(str(caught.value))
