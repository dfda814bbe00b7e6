"""ROLL's files of distillation: over given texts, and on-policy, where a divergence is the advantage."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.job import JobConfig
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file

pytestmark = pytest.mark.config

TEXTS = """
exp_name: distill
student_pretrain: models/small
teacher_pretrain: models/large
kd_objective: js_divergence
kd_temperature: 2.0
distill_on_prompt: false
logits_transfer_backend: nccl-only
sequence_length: 2048
question_key: question_zh
answer_key: answer_zh
eval_steps: 50
validation: {data_args: {file_name: held.jsonl}}
student:
  model_args: {dtype: bf16}
  training_args: {learning_rate: 2.0e-5, per_device_train_batch_size: 8, num_train_epochs: 2}
  data_args: {file_name: [texts.jsonl]}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  use_sequence_packing: true
  device_mapping: list(range(0,8))
teacher:
  model_args: {dtype: bf16}
  training_args: {per_device_train_batch_size: 4}
  strategy_args: {strategy_name: megatron_infer, strategy_config: {pipeline_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
"""
ON_POLICY = """
exp_name: opd
rollout_batch_size: 16
num_return_sequences_in_group: 4
prompt_length: 512
response_length: 512
max_steps: 10
adv_estimator: reinforce
pretrain: models/small
student_train:
  training_args: {learning_rate: 5.0e-7, per_device_train_batch_size: 16, gradient_accumulation_steps: 1}
  data_args: {file_name: [prompts.jsonl], messages: messages}
  strategy_args: {strategy_name: megatron_train, strategy_config: {context_parallel_size: 2}}
  device_mapping: list(range(0,8))
student_infer:
  generating_args: {max_new_tokens: 512, temperature: 0.99}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.8}}
  device_mapping: list(range(0,8))
teacher:
  model_args: {model_name_or_path: models/large}
  strategy_args: {strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 4}}
  device_mapping: list(range(0,8))
  opd_kl_coef: 1.0
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
"""


def converted(folder: Path, text: str) -> tuple[Conversion, JobConfig]:
    (folder / "file.yaml").write_text(text)
    done = convert_file(folder / "file.yaml", ORIGINS["roll"])
    (folder / "job.yaml").write_text(done.to_yaml())
    return done, load_config(folder / "job.yaml")


def test_given_texts(tmp_path: Path) -> None:
    done, job = converted(tmp_path, TEXTS)
    assert (job.task, job.loss_function, job.kd_objective, job.kd_temperature) == ("sft", "distill", "js_divergence", 2)
    assert (job.distill_loss_weight, job.logits_topk, job.num_train_epochs) == (0.5, 64, 2)
    data = job.actor_train.data_args
    assert (data.prompt, data.response, data.chat, data.eval_file_name) == (
        "question_zh",
        "answer_zh",
        True,
        "held.jsonl",
    )
    assert job.actor_train.model_args.model_name_or_path == "models/small"
    teacher = job.teacher
    assert teacher is not None and teacher.model_args.model_name_or_path == "models/large"
    assert teacher.infer_batch_size == 4
    assert teacher.strategy_args.strategy_config.pipeline_model_parallel_size == 2
    assert not done.left_out_as("refused", "unknown")


def test_a_prompt_before_the_question_and_loss_on_the_prompt(tmp_path: Path) -> None:
    text = TEXTS.replace("distill_on_prompt: false", "distill_on_prompt: true\nprompt_key: task\nsystem_key: system")
    done, job = converted(tmp_path, text)
    data = job.actor_train.data_args
    assert (data.prompt, data.query, data.system) == ("task", "question_zh", "system")
    assert {one.key for one in done.left_out_as("refused")} == {"distill_on_prompt"}


def test_on_policy(tmp_path: Path) -> None:
    done, job = converted(tmp_path, ON_POLICY)
    assert (job.task, job.loss_function, job.kd_objective, job.group_size) == ("distill", "distill", "reverse_kl", 4)
    assert job.actor_infer.strategy_args.strategy_name == "vllm" and job.logprob_temperature == 1
    assert job.teacher is not None and job.teacher.strategy_args.strategy_config.tensor_model_parallel_size == 4
    assert not done.left_out_as("refused", "unknown")
    changed = {one.to: one.meaning for one in done.changed}
    assert "from the sampled token alone" in changed["kd_objective"]


def test_weights_of_the_divergence_and_several_teachers_have_a_reason(tmp_path: Path) -> None:
    done, _ = converted(tmp_path, ON_POLICY.replace("opd_kl_coef: 1.0", "opd_kl_coef: 0.5"))
    assert [one.key for one in done.left_out_as("refused")] == ["teacher.opd_kl_coef"]
    several = ON_POLICY.partition("teacher:")[0] + "teacher:\n  math: {model_args: {model_name_or_path: a}}\n"
    (tmp_path / "file.yaml").write_text(several)
    done = convert_file(tmp_path / "file.yaml", ORIGINS["roll"])
    assert any(one.key == "teacher" and "one teacher" in one.why for one in done.left_out)
