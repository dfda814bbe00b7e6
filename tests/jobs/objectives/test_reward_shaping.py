"""Rewards as advantages read them: values of NeMo-RL's and DAPO's formulas, a job, files of NeMo-RL, wrong settings."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from roll_batching.jobs.config import ConfigFileError, config_from_dict
from roll_batching.jobs.objectives.advantages import shape_rewards
from roll_batching.jobs.observe.run_files import read_metrics
from tests.jobs.rl.jobs import settings, write_data
from tests.support.ranks import run_ranks
from tests.tools.conversion import test_nemo_rl

SCALING = {"source_min": 0, "source_max": 1, "target_min": -1, "target_max": 1}


def shaped(tmp_path, rewards: list[float], tokens: list[int], **changes: Any) -> list[float]:
    write_data(tmp_path)
    config = config_from_dict(settings(tmp_path, **changes))
    return shape_rewards(config, np.array(rewards, dtype=float), np.array(tokens)).tolist()


def test_the_formulas(tmp_path):
    rewards = [0.0, 0.25, 1.0, -3.0, 7.0]
    assert shaped(tmp_path, rewards, [1] * 5, reward_scaling=SCALING) == [-1, -0.5, 1, -1, 1]
    tokens = [0, 16, 20, 24, 18]
    buffer = {"length": 8, "penalty": 2.0}
    assert shaped(tmp_path, [1.0] * 5, tokens, overlong_buffer=buffer) == [1, 1, 0, -1, 0.5], "whole at 24 tokens"
    both = shaped(
        tmp_path, [1.0, 0.0], [24, 24], overlong_buffer=buffer | {"response_length": 32}, reward_scaling=SCALING
    )
    assert both == [1, -1], "no penalty up to 24 of 32 tokens"


def test_a_job_on_two_ranks_trains_on_them_and_reports_both(tmp_path):
    write_data(tmp_path)
    changes: dict[str, Any] = {"warmup": None, "max_steps": 1, "eval_samples": 0, "rollout_samples": -1}
    changes |= {"reward_function": "tests.jobs.rl.jobs:length", "overlong_buffer": {"length": 24, "penalty": 2.4}}
    changes |= {"reward_scaling": {"source_min": 0, "source_max": 10, "target_min": 0, "target_max": 1}}
    job = settings(tmp_path, **changes, adv_estimator="reinforce", norm_mean_type="group")
    kept = run_ranks(2, "tests.jobs.rl.jobs:run_and_keep", job)
    (row,) = read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "rollouts.jsonl").read_text().splitlines()]
    tokens = np.array([line["response_tokens"] for line in sorted(lines, key=lambda line: line["id"])])
    rewards = tokens / 100 - tokens / 10
    assert row["reward"] == pytest.approx(np.mean(tokens / 10)) and row["shaped_reward"] == pytest.approx(
        rewards.mean()
    )
    advantages = (rewards.reshape(-1, 3) - rewards.reshape(-1, 3).mean(1, keepdims=True)).ravel()
    for number, values in {number: values for part in kept for number, values in part.items()}.items():
        assert values == pytest.approx([advantages[number]] * len(values), abs=1e-5)


@pytest.mark.config
def test_of_nemo_rl(tmp_path):
    scaling = {"enabled": True, "target_min": -1.0}
    shaping = {"enabled": True, "overlong_buffer_length": 8, "overlong_buffer_penalty": 1, "max_response_length": 64}
    grpo = {"reward_scaling": scaling, "reward_shaping": shaping}
    done = test_nemo_rl.converted(tmp_path, f"defaults: base.yaml\ngrpo: {json.dumps(grpo)}\n")
    assert done.settings["reward_scaling"]["target_min"] == -1
    assert done.settings["overlong_buffer"] == {"length": 8, "penalty": 1, "response_length": 64}
    grpo = {"reward_scaling": {"enabled": False}, "reward_shaping": shaping | {"stop_properly_penalty_coef": 0.1}}
    done = test_nemo_rl.converted(tmp_path, f"defaults: base.yaml\ngrpo: {json.dumps(grpo)}\n")
    assert not {"reward_scaling", "overlong_buffer"} & done.settings.keys()
    assert any(one.key.startswith("grpo.reward_shaping") for one in done.left_out_as("refused"))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_scaling": {"source_min": 1, "source_max": 1}}, "source_min"),
        ({"reward_scaling": {"target_min": 2}}, "not below target_max"),
        ({"reward_scaling": {"target_max": float("nan")}}, "target_m"),
        ({"reward_scaling": {"source_max": float("inf")}}, "source_m"),
        ({"reward_scaling": {"low": 1}}, "low"),
        ({"overlong_buffer": {}}, "length"),
        ({"overlong_buffer": {"length": 25}}, "more than the 24 of a response"),
        ({"overlong_buffer": {"length": 8, "penalty": -1}}, "penalty"),
        ({"overlong_buffer": {"length": 8, "penalty": float("nan")}}, "penalty"),
        ({"overlong_buffer": {"length": True}}, "length"),
        ({"overlong_buffer": {"length": 8}, "adv_estimator": "remax"}, "greedy responses that remax"),
    ],
)
def test_wrong_settings(tmp_path, changes, message):
    write_data(tmp_path)
    with pytest.raises(ConfigFileError) as caught:
        config_from_dict(settings(tmp_path, **changes))
    assert message in str(caught.value)
