from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from roll_batching.jobs.observe.run_files import MetricsWriter, read_metrics


def test_each_row_is_on_disk_before_write_returns(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write({"step": step, "phase": "rl", "reward": 0.5})
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step


def test_numbers_of_numpy_and_torch_become_json_and_non_finite_ones_null(tmp_path):
    writer = MetricsWriter(tmp_path)
    row = {"a": np.float32(0.5), "b": torch.tensor(3), "c": float("nan"), "d": np.inf, "e": None, "f": "text"}
    writer.write({"step": 1, "phase": "warmup", **row})
    writer.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line == dict(step=1, phase="warmup", a=0.5, b=3, c=None, d=None, e=None, f="text")


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write({"step": step, "phase": "rl", "reward": step / 4, "eval_reward": None})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["rl/reward"]
    assert [(e.step, e.value) for e in events.Scalars("rl/reward")] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_only_the_enabled_process_writes(tmp_path):
    writer = MetricsWriter(tmp_path / "run", enabled=False)
    writer.write({"step": 1, "phase": "rl"})
    writer.close()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("after", "kept"),
    [(("rl", 2), ["w1", "w2", "r1", "r2"]), (("warmup", 1), ["w1"]), (("rl", 0), ["w1", "w2"])],
)
def test_resuming_cuts_off_what_came_after_the_resumed_state(tmp_path, after, kept):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    for phase, steps in (("warmup", 2), ("rl", 4)):
        for step in range(1, steps + 1):
            writer.write({"step": step, "phase": phase})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "pha')  # killed while writing
    writer = MetricsWriter(tmp_path, tensorboard=False, resume_after=after)
    assert [f"{r['phase'][0]}{r['step']}" for r in read_metrics(tmp_path / "metrics.jsonl")] == kept
    writer.write({"step": 99, "phase": "rl"})
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 99


FULL_DISK = """
import errno, pathlib, sys
from tensorboard.summary.writer.record_writer import RecordWriter
from roll_batching.errors import RollBatchingError
from roll_batching.jobs.observe.run_files import MetricsWriter

def full(self, data):
    raise OSError(errno.ENOSPC, "No space left on device")

writer = MetricsWriter(pathlib.Path(sys.argv[1]))
RecordWriter.write = full
try:
    writer.write({"step": 1, "phase": "rl", "loss": 0.5})
except RollBatchingError as error:
    print(error)
writer.close()
"""


def test_events_that_cannot_be_written_are_one_error_without_a_traceback(tmp_path):
    """In a process of its own: pytest takes the exceptions of threads."""
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "cannot be written: No space left on device" in done.stdout
    assert "Traceback" not in done.stderr
