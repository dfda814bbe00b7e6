"""Auto caps: the largest that fit, against real steps; agreed by ranks, kept by checkpoints, refused elsewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from roll_batching.jobs.config import config_from_dict
from roll_batching.tools.rehearsal.advice import caps_of
from roll_batching.tools.rehearsal.caps import find_caps
from roll_batching.tools.rehearsal.job import rehearse_job
from roll_batching.tools.rehearsal.task import RankTask
from tests.support.ranks import run_ranks
from tests.tools.rehearsal.jobs import EXPERTS, job_of
from tests.tools.rehearsal.test_accuracy import ADAPTERS, KL, PP2
from tests.tools.rehearsal.test_images import vision_job

pytestmark = pytest.mark.rehearse

MIB = 1 << 20
TRAIN = "actor_train.sequence_packing_args.max_packed_sequence_length_train"
AUTO = {"use_sequence_packing": True, "sequence_packing_args": {"max_packed_sequence_length_train": "auto"}}
BOTH = {"max_packed_sequence_length_train": "auto", "max_packed_sequence_length_forward": "auto"}
CRITIC = AUTO | {"sequence_packing_args": BOTH, "training_args": {"per_device_train_batch_size": 64}}
SFT: dict[str, Any] = {"task": "sft", "sequence_length": 200}
ROWS = {"training_args": {"per_device_train_batch_size": 64, "learning_rate": 1e-3}}
FEW_ROLLOUTS = {"rollout_batch_size": 4}

JOBS: dict[str, tuple[dict[str, Any], int, int]] = {
    "dense": (job_of(batching=AUTO, train=ROWS, **SFT), 1, 110),
    "experts": (job_of(batching=AUTO, train=ROWS, architecture=EXPERTS, **SFT), 1, 110),
    "LoRA": (job_of(batching=AUTO, train=ROWS | ADAPTERS, **FEW_ROLLOUTS, **KL), 1, 110),
    "critic": (job_of(batching=AUTO, train=ROWS, adv_estimator="gae", critic=CRITIC, **FEW_ROLLOUTS), 1, 110),
    "images": (vision_job(batching=AUTO, train=ROWS, **SFT), 1, 110),
    "pipeline": (job_of(batching=AUTO, train=ROWS, megatron=PP2, **SFT), 2, 110),
}
"""Jobs with their number of processes and MiB of memory."""


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_found_caps_are_within_5_percent_of_the_largest_that_run(name: str, report: Any) -> None:
    job, world, memory = JOBS[name]
    config, limit = config_from_dict(job), memory * MIB
    found = find_caps(config, limit, partial(rehearse_job, world_size=world, device="cpu"))

    def measure(scale: float) -> dict[str, float]:
        """Largest real peak of all ranks over the phases that each cap bounds, with caps times `scale`."""
        scaled = config.with_resolved_caps({key: round(scale * cap / 4) * 4 for key, cap in found.caps.items()})
        task = RankTask(config=scaled, rank=0, world_size=world, device="cpu")
        reports = run_ranks(world, "tests.tools.rehearsal.jobs:measured", task)
        return {
            cap.key: max(one.peaks[phase].bytes for one in reports for phase in cap.phases if phase in one.peaks)
            for cap in caps_of(scaled, found.rehearsal.dims)
            if cap.key in found.caps
        }

    below, above = measure(0.95), measure(1.05)
    assert set(below) == set(found.caps)
    for key, cap in found.caps.items():
        real = cap * (0.95 + 0.1 * (limit - below[key]) / (above[key] - below[key]))
        report(f"{name}: {key} = {cap}, {cap / real - 1:+.1%} of the largest that runs, in {found.probes} rehearsals")
        assert below[key] <= limit < above[key]
