"""A job in fp16 learns, a control does not, and its rows tell the loss scale and the steps that it skips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.run.test_muon import RUN, job, rows_of
from tests.support.ranks import run_ranks

HALF = {"learning_rate": 1e-2, "per_device_train_batch_size": 16, "initial_loss_scale": 2.0**24, "hysteresis": 1}


@pytest.mark.slow
def test_a_job_learns_and_answers_without_sense_teach_nothing(tmp_path: Path, report: Any) -> None:
    """Judged by the right answers; the control is trained on random ones."""
    losses, changes = {}, {"actor_train__training_args": HALF, "actor_train__model_args__dtype": "fp16"}
    for name in ("learns", "control"):
        run_ranks(1, RUN, job(tmp_path, name, right=name == "learns", max_steps=60, **changes))
        rows = rows_of(tmp_path, name)
        losses[name] = rows[-1]["eval_loss"]
        scales = [row["loss_scale"] for row in rows]
        assert scales[0] == 2.0**24 and scales == sorted(scales, reverse=True) and scales[-1] < scales[0]
    report(
        f"held-out loss in fp16: {losses['learns']:.2f}; control {losses['control']:.2f}; loss scales {scales[::20]}"
    )
    assert losses["learns"] < 0.6 < 1.2 < losses["control"]
