"""Jobs of converted files whose rewards have the contracts of verl and slime, in their worker processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from roll_batching.jobs.observe.run_files import read_metrics
from roll_batching.tools.conversion import ORIGINS, convert_file
from tests.jobs.rl.jobs import settings
from tests.support.ranks import run_ranks

FUNCTIONS = """
def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    assert data_source == "sums" and ground_truth["digits"] == extra_info["digits"]
    return {"score": scale * len(solution_str) / 24, "short": len(solution_str) < 24}


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [len(text) / 24 for text in solution_strs]


def raising(data_source, solution_str, ground_truth, extra_info):
    return 1 / (extra_info["digits"] % 2)


def hanging(data_source, solution_str, ground_truth, extra_info):
    import time
    time.sleep(60 * (extra_info["digits"] % 2))
    return len(solution_str) / 24


async def reward_func(args, sample, **kwargs):
    return {"score": sample.metadata["digits"] + sample.label["digits"]}
"""
VERL = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=/m data.train_files=/d {}"
SLIME = "python3 train.py --hf-checkpoint /m --label-key reward_model.ground_truth --custom-rm-path own_rewards.{}"
FUNCTION = "custom_reward_function.path=$PWD_OF_JOB/own_rewards.py custom_reward_function.name="


@pytest.fixture
def folder(tmp_path):
    """Data as verl's, whose right answers lie in a section, and a file of rewards beside it."""
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    lines = [
        {
            "data_source": "sums",
            "prompt": f"a+{i}b=",
            "reward_model": {"style": "rule", "ground_truth": {"digits": i}},
            "extra_info": {"digits": i},
            "metadata": {"digits": i},
        }
        for i in range(8)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def job(folder: Path, origin: str, script: str, **changes):
    """The reward, and the key of answers, of a converted script in a tiny job."""
    (folder / "run.sh").write_text(f"PWD_OF_JOB={folder}\n{script}\n")
    theirs = convert_file(folder / "run.sh", ORIGINS[origin]).settings
    answers = theirs["actor_train"]["data_args"]["response"]
    assert answers == "reward_model.ground_truth"
    changes |= {"reward_function": theirs["reward_function"], "reward_args": theirs["reward_args"]}
    job = settings(folder, warmup=None, eval_samples=0, actor_train__data_args__response=answers, **changes)
    del job["actor_train"]["data_args"]["eval_file_name"]
    return job


def rows(folder: Path):
    return [row for row in read_metrics(folder / "runs" / "tiny" / "metrics.jsonl") if row["phase"] == "rl"]


def test_a_converted_job_trains_with_verls_function(folder):
    run_ranks(2, "tests.jobs.rl.jobs:run", job(folder, "verl", VERL.format(FUNCTION + "compute_score")))
    for row in rows(folder):
        assert 0 < row["reward"] <= 1 and "mark/short" in row and not row["reward_failures"]
    answers = [json.loads(line)["answer"] for line in (folder / "runs/tiny/rollouts.jsonl").read_text().splitlines()]
    assert answers and all("digits" in answer for answer in answers)


def test_the_batch_form_and_slimes_contract_train(folder):
    run_ranks(1, "tests.jobs.rl.jobs:run", job(folder, "verl", VERL.format(FUNCTION + "batched")))
    assert all(0 < row["reward"] <= 1 for row in rows(folder))
    other = job(folder, "slime", SLIME.format("reward_func --reward-key score"), exp_name="slime")
    paths = os.pathsep.join((str(folder), *sys.path))
    run_ranks(1, "tests.jobs.rl.jobs:run", other, fresh=True, env={"PYTHONPATH": paths})
    found = read_metrics(folder / "runs" / "slime" / "metrics.jsonl")
    assert sum(row["reward"] for row in found) == pytest.approx(2 * 2 * sum(range(8)) / 8), "2 x digits, each once"


def test_a_raising_function_ends_the_job_with_its_line_or_is_dropped(folder):
    script = VERL.format(FUNCTION + "raising")
    (refusal,) = run_ranks(1, "tests.jobs.rl.jobs:refusal", job(folder, "verl", script))
    assert "verl_compute_score failed on sample" in refusal and "own_rewards.py:12" in refusal
    assert "ZeroDivisionError" in refusal
    dropped = job(folder, "verl", script, reward_failure="drop")
    run_ranks(1, "tests.jobs.rl.jobs:run", {**dropped, "exp_name": "dropped"})
    found = read_metrics(folder / "runs" / "dropped" / "metrics.jsonl")
    assert sum(row["reward_failures"] for row in found) == 4 * 3, "4 prompts of 8, in groups of 3"


def test_a_hanging_function_ends_at_its_limit(folder):
    hangs = job(folder, "verl", VERL.format(FUNCTION + "hanging"), reward_failure="zero", reward_timeout=1.0)
    run_ranks(1, "tests.jobs.rl.jobs:run", {**hangs, "max_steps": 1, "reward_workers": 4})
    (row,) = rows(folder)
    assert row["reward_failures"] in (3, 6, 9, 12) and row["reward"] < 1


def test_a_line_without_a_ground_truth_is_named_at_the_start(folder):
    with (folder / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"data_source": "sums", "prompt": "a", "extra_info": {}}) + "\n")
    (refusal,) = run_ranks(
        1, "tests.jobs.rl.jobs:refusal", job(folder, "verl", VERL.format(FUNCTION + "compute_score"))
    )
    assert "prompts.jsonl:9: no ground truth" in refusal
