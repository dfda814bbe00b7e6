"""Rehearsals of jobs that freeze modules, against real steps."""

from __future__ import annotations

from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.jobs.config.diagnostics import ConfigFileError
from roll_batching.tools.rehearsal.job import rehearse_job
from tests.tools.rehearsal.jobs import job_of, task_of
from tests.tools.rehearsal.test_accuracy import PP2, rehearsed
from tests.tools.rehearsal.test_images import RL, compare_with_real_step, vision_job

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
    compare_with_real_step(f"{name} frozen", JOBS[name], 1, report)


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
