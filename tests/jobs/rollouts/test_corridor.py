"""The example of GiGPO learns, and its control does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rollouts.examples import run_example


def rewards(folder: Path, *overrides: str) -> list[float]:
    """Mean rewards of the steps of the example."""
    run_example("corridor", folder, *overrides)
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
