"""Files in NeMo-RL's shape, which inherit from each other, as ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_batching.config import load_config
from roll_batching.conversion import ORIGINS, Conversion, convert_file, origin_of
from roll_batching.errors import ConfigError

BASE = """
grpo:
  num_prompts_per_step: 16
  num_generations_per_prompt: 8
  max_num_steps: 30
  normalize_rewards: false
  use_leave_one_out_baseline: true
  async_grpo: {enabled: false}
loss_fn: {reference_policy_kl_penalty: 0.01, reference_policy_kl_type: k3, ratio_clip_min: 0.2, ratio_clip_max: 0.28}
policy:
  model_name: models/small
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 64
  train_micro_batch_size: 2
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, lora_cfg: {enabled: false, dim: 8}}
  megatron_cfg:
    enabled: false
    tensor_model_parallel_size: 2
    expert_tensor_parallel_size: 1
    freeze_moe_router: true
    optimizer: {lr: 5.0e-6, min_lr: 5.0e-7}
    scheduler: {lr_decay_style: constant, lr_warmup_iters: 13}
  sequence_packing:
    enabled: false
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    logprob_mb_tokens: ${div:${policy.sequence_packing.train_mb_tokens}, 2}
  generation: {backend: vllm, max_new_tokens: "${policy.max_total_sequence_length}", temperature: 0.8, top_k: null}
data: {max_input_seq_length: "${policy.max_total_sequence_length}", train: {dataset_name: math}}
env: {math: {num_workers: 8}}
cluster: {gpus_per_node: 8, num_nodes: 1}
logger: {wandb_enabled: false, log_dir: logs}
reward_penalties: {penalize_unwanted_tokens: false}
"""
SAVING = """
defaults: base.yaml
checkpointing: {enabled: ENABLED, checkpoint_dir: results, save_period: 10, keep_top_k: 3}
policy:
  dtensor_cfg: {_override_: true, enabled: false}
  megatron_cfg: {enabled: true, checkpoint: {async_save: true, ckpt_assume_constant_structure: true}}
"""
CHILD = """
defaults: base.yaml
policy:
  dtensor_cfg: {_override_: true, enabled: false}
  megatron_cfg: {enabled: true}
  sequence_packing: {enabled: true}
grpo: {max_num_steps: 40}
"""


def converted(folder: Path, child: str = CHILD) -> Conversion:
    (folder / "base.yaml").write_text(BASE)
    (folder / "child.yaml").write_text(child)
    assert origin_of(folder / "child.yaml").name == "nemo_rl"
    return convert_file(folder / "child.yaml", ORIGINS["nemo_rl"])


@pytest.mark.config
def test_a_file_inherits_and_its_numbers_are_computed(tmp_path):
    done = converted(tmp_path)
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    job = load_config(tmp_path / "job.yaml")
    packing = job.actor_train.sequence_packing_args
    assert packing.max_packed_sequence_length_train == 1024 and packing.algorithm == "modified_first_fit_decreasing"
    idle = {one.key: one.why for one in done.left_out_as("idle")}
    assert "logprob_plan" in idle["policy.sequence_packing.logprob_mb_tokens"]
    assert job.actor_train.strategy_args.strategy_config.tensor_model_parallel_size == 2
    assert job.mini_batch_size(job.dp_size(8)) == 64
    assert (job.rollout_batch_size, job.group_size, job.max_steps, job.adv_estimator) == (16, 8, 40, "rloo")
    assert job.clip_range == (0.2, 0.28) and job.kl_coef == 0.01 and job.reference is not None
    assert job.prompt_length + job.response_length == job.sequence_length == 512
    assert job.actor_train.training_args.learning_rate == 5e-6
    assert {one.key for one in done.left_out_as("refused", "unknown")} == {
        "data",
        "env",
        "policy.megatron_cfg.freeze_moe_router",
    }


@pytest.mark.config
@pytest.mark.parametrize("enabled", [True, False])
def test_checkpoints_are_written_as_there(tmp_path, enabled):
    settings = converted(tmp_path, SAVING.replace("ENABLED", str(enabled).lower())).settings
    found = {key: settings[key] for key in ("save_steps", "save_total_limit", "async_save") if key in settings}
    assert found == ({"save_steps": 10, "save_total_limit": 3, "async_save": True} if enabled else {})


def test_dtensors_layout_and_what_is_not_done_here(tmp_path):
    child = "defaults: base.yaml\ngrpo: {async_grpo: {enabled: true}}\nloss_fn: {force_on_policy_ratio: true}\n"
    done = converted(tmp_path, child)
    assert done.settings["actor_train"]["strategy_args"]["strategy_config"] == {"tensor_model_parallel_size": 1}
    assert {"grpo.async_grpo", "loss_fn.force_on_policy_ratio"} <= {
        one.key for one in done.left_out_as("refused", "unknown")
    }


TIS = "use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 5.0"
LOSSES = {
    "ratio_clip_c: 3": {"dual_clip": 3.0},
    "use_cispo: true, ratio_clip_c: null": {"clip_high": 0.28},
    f"{TIS}, truncated_importance_sampling_type: tis": {"engine_ratio_cap": 5.0, "engine_correction": "truncate"},
    f"{TIS}, truncated_importance_sampling_type: icepop, truncated_importance_sampling_ratio_min: 0.5": {
        "engine_ratio_cap": 5.0,
        "engine_ratio_min": 0.5,
        "engine_correction": "mask",
    },
    f"{TIS}, truncated_importance_sampling_type: seq-mask-tis, truncated_importance_sampling_ratio_min: 0.9": {
        "engine_correction": "mask_sequences"
    },
    "use_on_policy_kl_approximation: true": {"kl_gradient": "importance"},
    "use_on_policy_kl_approximation: false": {"kl_gradient": "score_function"},
}


@pytest.mark.config
@pytest.mark.parametrize("given", LOSSES)
def test_its_loss_is_ours(tmp_path, given):
    from roll_batching.rl.from_config import loss_of

    done = converted(tmp_path, CHILD + f"loss_fn: {{{given}}}\n")
    assert not [one.key for one in done.left_out_as("refused", "unknown") if one.key.startswith("loss_fn")]
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    loss = loss_of(load_config(tmp_path / "job.yaml"))
    assert type(loss).__name__ == ("CISPOLoss" if "cispo" in given else "PolicyLoss")
    assert {name: getattr(loss, name) for name in LOSSES[given]} == LOSSES[given]


@pytest.mark.config
@pytest.mark.bad_input
def test_files_that_inherit_from_each_other_are_an_error(tmp_path):
    (tmp_path / "base.yaml").write_text("defaults: child.yaml\n")
    (tmp_path / "child.yaml").write_text(CHILD)
    with pytest.raises(ConfigError, match="inherit from each other"):
        convert_file(tmp_path / "child.yaml", ORIGINS["nemo_rl"])
