"""All processes of a job end with its launcher, also when that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.jobs.launch.commands import kill, processes, started, train, wait_for, write_job

LONG = {"max_steps": 0, "warmup__training_args__max_steps": 100_000, "logging_steps": 1000}


def training(folder: Path) -> bool:
    metrics = folder / "runs" / "tiny" / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") > 2


def writing(folder: Path) -> bool:
    """A checkpoint is being written."""
    return bool(list(folder.glob("runs/tiny/checkpoints/*.partial")))


@pytest.mark.parametrize(("when", "saved"), [pytest.param(training, 0, marks=pytest.mark.slow), (writing, 1)])
def test_nothing_outlives_a_killed_launcher(when, saved, tmp_path):
    job = write_job(tmp_path, **LONG, save_steps=saved, save_total_limit=1 if saved else None)
    with started(tmp_path, *train(job)) as launcher:
        wait_for(lambda: when(tmp_path), 150)
        kill(launcher)
        wait_for(lambda: not processes(tmp_path), 5)


@pytest.mark.slow
def test_a_key_pressed_ends_a_job_with_one_line(tmp_path):
    """As a terminal does, the whole process group of the command gets the signal."""
    with started(tmp_path, *train(write_job(tmp_path, **LONG))) as launcher:
        wait_for(lambda: training(tmp_path), 150)
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=15) == 1
        assert not processes(tmp_path)
    said = [line for line in (tmp_path / "said").read_text().splitlines() if not line.startswith("warmup ")]
    assert len(said) == 1 and said[0].startswith("error: stopped by SIGINT; all ranks were ended. No checkpoint was")
