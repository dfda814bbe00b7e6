"""The example of GiGPO learns, and its control does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_batching.jobs.observe.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[3]


def rewards(folder: Path, *overrides: str) -> list[float]:
    """Mean rewards of the steps of the example."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (
        ["examples/corridor/make_data.py"],
        ["-m", "roll_batching.cli", "train", "--config", "examples/corridor/config.yaml", *overrides],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stderr
    name = next((one.split("=")[1] for one in overrides if one.startswith("exp_name=")), "corridor")
    rows = [row for row in read_metrics(folder / "runs" / name / "metrics.jsonl") if row["phase"] == "rl"]
    assert all(row["shared_states"] > 0.5 and row["turns_per_state"] > 2 for row in rows)
    return [row["reward"] for row in rows]


@pytest.mark.slow
def test_the_walks_arrive_and_those_of_the_control_do_not(tmp_path: Path, report: object) -> None:
    learned = rewards(tmp_path, "max_steps=25")
    control = rewards(tmp_path, "max_steps=25", "control=shuffled", "exp_name=control")
    last, random = sum(learned[-5:]) / 5, sum(control[-5:]) / 5
    report(f"share of walks that arrive: {learned[0]:.2f} -> {last:.2f}, control {random:.2f}")  # type: ignore[operator]
    assert last > 0.6 and last > random + 0.25
