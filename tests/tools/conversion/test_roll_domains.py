"""Prompts of unknown tags and a critic without settings in ROLL's files, and NeMo-RL's environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file
from tests.tools.conversion import test_nemo_rl_defaults as nemo_rl

pytestmark = pytest.mark.config

FILE = """
response_length: 64
prompt_length: 64
max_steps: 4
rollout_batch_size: 8
num_return_sequences_in_group: 2
adv_estimator: {estimator}
actor_train:
  data_args: {{file_name: [prompts.jsonl]}}
  training_args: {{per_device_train_batch_size: 2, gradient_accumulation_steps: 2}}
  strategy_args: {{strategy_name: megatron_train}}
actor_infer: {{strategy_args: {{strategy_name: vllm}}}}
rewards:
  math_rule: {{worker_cls: a.b.MathRuleRewardWorker, tag_included: [aime]}}
  {second}
"""
CODE = "code: {worker_cls: a.b.CodeSandboxRewardWorker, use_local: true, tag_included: [KodCode]}"
DROPPED = "seen: {worker_cls: a.b.DetectionRewardWorker, tag_included: [boxes]}"


def converted(folder: Path, estimator: str = "reinforce", second: str = CODE) -> Conversion:
    (folder / "roll.yaml").write_text(FILE.format(estimator=estimator, second=second))
    return convert_file(folder / "roll.yaml", ORIGINS["roll"])


def test_prompts_of_unknown_tags_are_of_math_rule(tmp_path: Path) -> None:
    rewards = converted(tmp_path).settings["rewards"]
    assert "tag_included" not in rewards["math_rule"] and rewards["code"]["tag_included"] == ["KodCode"]


def test_prompts_of_a_reward_that_is_left_out_are_not_scored_by_another(tmp_path: Path) -> None:
    assert converted(tmp_path, second=DROPPED).settings["rewards"]["math_rule"]["tag_included"] == ["aime"]


def test_a_critic_that_the_file_does_not_describe_has_rolls_defaults(tmp_path: Path) -> None:
    done = converted(tmp_path, estimator="gae")
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    job = load_config(tmp_path / "job.yaml")
    assert job.adv_estimator == "gae" and job.critic is not None
    assert any(text.startswith("critic: is missing") for text in done.missing)


@pytest.mark.parametrize(("environment", "words"), [("math_multi_reward", "GDPO"), ("x", "function")])
def test_environments_of_nemo_rl_are_left_out_with_what_to_do(tmp_path: Path, environment: str, words: str) -> None:
    file = nemo_rl.file_of("grpo")
    file["data"]["default"]["env_name"] = environment
    left = {one.key: one.why for one in nemo_rl.converted(tmp_path, file).left_out}
    assert environment in left["data.default.env_name"] and words in left["data.default.env_name"]
