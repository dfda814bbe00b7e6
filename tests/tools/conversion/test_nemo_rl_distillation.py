"""NeMo-RL's files of distillation as `task: distill`: student, teacher, objective, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.jobs.config import load_config
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file

pytestmark = pytest.mark.config

FILE = """
distillation: {num_prompts_per_step: 32, num_generations_per_prompt: 1, max_num_steps: 20, topk_logits_k: 16,
  max_rollout_turns: 1, max_num_epochs: 10, val_period: 5, val_batch_size: 8, max_val_samples: 20}
loss_fn: {kl_type: mixed, mixed_kl_weight: 0.25, zero_outside_topk: true}
policy: &policy
  model_name: models/small
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 16
  train_micro_batch_size: 1
  logprob_batch_size: 2
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg: {enabled: false}
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    context_parallel_size: 1
    optimizer: {lr: 2.0e-5, min_lr: 2.0e-5}
    scheduler: {lr_decay_style: constant, lr_warmup_iters: 10}
  sequence_packing:
    enabled: true
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.logprob_batch_size}}
  generation: {backend: vllm, max_new_tokens: "${policy.max_total_sequence_length}", temperature: 1.0}
teacher:
  <<: *policy
  model_name: models/large
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2}
data: {train: {dataset_name: math}, default: {env_name: math}}
env: {math: {num_workers: 8}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""


def converted(folder: Path, text: str = FILE) -> Conversion:
    (folder / "file.yaml").write_text(text)
    return convert_file(folder / "file.yaml", ORIGINS["nemo_rl"])


def test_student_teacher_and_objective(tmp_path: Path) -> None:
    done = converted(tmp_path)
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    job = load_config(tmp_path / "job.yaml")
    assert (job.task, job.loss_function, job.kd_objective) == ("distill", "distill", "mixed_kl")
    assert (job.mixed_kl_weight, job.zero_outside_topk, job.logits_topk) == (0.25, True, 16)
    assert (job.rollout_batch_size, job.group_size, job.max_steps, job.mini_batch_size(4)) == (32, 1, 20, 16)
    assert (job.eval_steps, job.eval_samples, job.reward_function) == (5, 16, "math_verify")
    assert job.use_kl_loss is False and job.reference is None, "the policy loss has defaults that this one has not"
    teacher = job.teacher
    assert teacher is not None and teacher.model_args.model_name_or_path == "models/large"
    layout = teacher.strategy_args.strategy_config
    assert (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size) == (4, 2)
    assert teacher.sequence_packing_args.max_packed_sequence_length_forward == 1024
    assert job.actor_train.strategy_args.strategy_config.tensor_model_parallel_size == 2
    assert {one.key for one in done.left_out_as("refused", "unknown")} == {"data.train"}
    assert not [notice for notice in job.notices if notice.path.startswith("teacher")]


@pytest.mark.parametrize(("kind", "ours"), [("forward", "forward_kl"), ("reverse", "reverse_kl")])
def test_the_other_divergences(kind: str, ours: str, tmp_path: Path) -> None:
    done = converted(tmp_path, FILE.replace("kl_type: mixed, mixed_kl_weight: 0.25", f"kl_type: {kind}"))
    assert done.settings["kd_objective"] == ours and "mixed_kl_weight" not in done.settings


def test_defaults_are_those_of_nemo_rl(tmp_path: Path) -> None:
    lines = FILE.splitlines()
    text = "\n".join(["distillation: {val_period: 0}", "loss_fn: {}", *lines[4:]])
    settings = converted(tmp_path, text).settings
    assert (settings["kd_objective"], settings["max_steps"]) == ("mixed_kl", 1000)
    ours = {"rollout_batch_size": 128, "num_return_sequences_in_group": 1, "logits_topk": 64}
    assert {key: settings.get(key, value) for key, value in ours.items()} == ours
    assert settings["eval_samples"] == 0


def test_turns_and_several_teachers_are_left_out_with_a_reason(tmp_path: Path) -> None:
    text = FILE.replace("max_rollout_turns: 1", "max_rollout_turns: 3") + "teachers: [{model_name: a}]\n"
    reasons = {one.key: one.why for one in converted(tmp_path, text).left_out_as("refused", "unknown")}
    assert "one turn" in reasons["distillation.max_rollout_turns"]
    assert "one teacher" in reasons["teachers"]


def test_sampling_temperatures_divide_the_logits_of_the_loss_as_well(tmp_path: Path) -> None:
    warm = FILE.replace("temperature: 1.0", "temperature: 0.5")
    settings = converted(tmp_path, warm).settings
    assert settings["kd_temperature"] == 0.5 and "teacher_temperature" not in settings
    teacher = "  generation: {backend: vllm, temperature: 2.0}\n"
    settings = converted(tmp_path, warm.replace("data: {train", teacher + "data: {train")).settings
    assert (settings["kd_temperature"], settings["teacher_temperature"]) == (0.5, 4.0)
    assert "kd_temperature" not in converted(tmp_path).settings
