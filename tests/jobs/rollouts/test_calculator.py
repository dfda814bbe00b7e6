"""The example of a rollout function: its commands' job runs, with two calls of the calculator in a sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from roll_batching.jobs.observe.metrics_file import read_metrics

ROOT = Path(__file__).resolve().parents[3]
FEW = (
    "max_steps=1",
    "warmup.training_args.max_steps=60",
    "eval_samples=16",
    "rollout_samples=-1",
    "actor_train.training_args.gradient_accumulation_steps=1",
)


@pytest.mark.slow
def test_the_model_calls_the_calculator_twice_in_a_sample(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in (
        ["examples/calculator/make_data.py"],
        ["-m", "roll_batching.cli", "train", "--config", "examples/calculator/config.yaml", *FEW],
    ):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "calculator"
    samples = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    twice = [one for one in samples if one["marks"]["two_calls"]]
    assert twice and all(one["turns"] >= 3 and one["response"].count("?") >= 2 for one in twice)
    for one in twice:  # the replies are the calculator's, not the model's
        for call in one["response"].split("?")[1:3]:
            question, reply, *_ = call.split(";")
            assert int(reply) == sum(map(int, question.split("+"))), one
    row = next(row for row in read_metrics(run / "metrics.jsonl") if row["phase"] == "rl")
    assert row["turns_mean"] > 1
