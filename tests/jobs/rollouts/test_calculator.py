"""The example of a rollout function: its commands' job runs, with two calls of the calculator in a sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rollouts.examples import run_example

FEW = (
    "max_steps=1",
    "warmup.training_args.max_steps=60",
    "eval_samples=16",
    "rollout_samples=-1",
    "actor_train.training_args.gradient_accumulation_steps=1",
)


@pytest.mark.slow
def test_the_model_calls_the_calculator_twice_in_a_sample(tmp_path: Path) -> None:
    run_example("calculator", tmp_path, *FEW)
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
