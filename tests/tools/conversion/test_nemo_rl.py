"""Files in NeMo-RL's shape, which inherit from each other, as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll_batching.errors import ConfigError
from roll_batching.jobs.config import load_config
from roll_batching.jobs.config.job_keys import NOT_EVALUATED
from roll_batching.tools.conversion import ORIGINS, Conversion, convert_file, origin_of

BASE = """
grpo:
  num_prompts_per_step: 16
  num_generations_per_prompt: 8
  max_num_steps: 30
  normalize_rewards: false
  use_leave_one_out_baseline: true
  async_grpo: {enabled: false}
  adv_estimator:
    name: grpo
    normalize_rewards: ${grpo.normalize_rewards}
    use_leave_one_out_baseline: ${grpo.use_leave_one_out_baseline}
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
    moe_router_dtype: fp64
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
    assert (packing.max_packed_sequence_length_forward, job.actor_train.logprob_plan) == (512, "own")
    assert job.actor_train.strategy_args.strategy_config.tensor_model_parallel_size == 2
    assert job.mini_batch_size(job.dp_size(8)) == 64
    assert (job.rollout_batch_size, job.group_size, job.max_steps, job.adv_estimator) == (16, 8, 40, "rloo")
    assert job.clip_range == (0.2, 0.28) and job.kl_coef == 0.01 and job.reference is not None
    assert job.prompt_length + job.response_length == job.sequence_length == 512
    assert job.actor_train.training_args.learning_rate == 5e-6
    assert {one.key for one in done.left_out_as("refused", "unknown")} == {
        "data.train",
        "data.default.env_name",
        "env",
    }
    assert job.actor_train.strategy_args.strategy_config.freeze_moe_router


@pytest.mark.config
@pytest.mark.parametrize("enabled", [True, False])
def test_checkpoints_are_written_as_there(tmp_path, enabled):
    settings = converted(tmp_path, SAVING.replace("ENABLED", str(enabled).lower())).settings
    found = {key: settings[key] for key in ("save_steps", "save_total_limit", "async_save") if key in settings}
    assert found == ({"save_steps": 10, "save_total_limit": 3, "async_save": True} if enabled else {})


def test_dtensors_layout_and_what_is_not_done_here(tmp_path):
    done = converted(tmp_path, "defaults: base.yaml\ngrpo: {max_rollout_turns: 3}\n")
    assert done.settings["actor_train"]["strategy_args"]["strategy_config"] == {"tensor_model_parallel_size": 1}
    assert "grpo.max_rollout_turns" in {one.key for one in done.left_out_as("refused")}


def test_adapters_are_those_of_the_file(tmp_path):
    cfg = "enabled: true, dim: 16, alpha: 64, match_all_linear: true, target_modules: [], dropout: 0.1"
    child = f"defaults: base.yaml\npolicy: {{dtensor_cfg: {{lora_cfg: {{{cfg}, lora_A_init: xavier}}}}}}\n"
    done = converted(tmp_path, child)
    model = done.settings["actor_train"]["model_args"]
    assert (model["lora_target"], model["lora_rank"], model["lora_alpha"]) == ("all-linear", 16, 64)
    refused = {one.key: one.why for one in done.left_out_as("refused")}
    assert "no dropout" in refused["policy.dtensor_cfg.lora_cfg.dropout"]
    named = "enabled: true, target_modules: [linear_qkv, down_proj], exclude_modules: [k_proj, '*.layers.0.*']"
    done = converted(tmp_path, f"defaults: base.yaml\npolicy: {{dtensor_cfg: {{lora_cfg: {{{named}}}}}}}\n")
    assert done.settings["actor_train"]["model_args"]["lora_target"] == "q_proj,v_proj,down_proj"
    assert "policy.dtensor_cfg.lora_cfg.exclude_modules" in {one.key for one in done.left_out_as("refused")}


RL = """
defaults: base.yaml
grpo:
  val_period: 10
  val_at_end: false
  max_val_samples: 40
  val_batch_size: 16
  val_num_generations_per_prompt: 4
  advantage_clip_low: -5
  advantage_clip_high: 5
  async_grpo: {enabled: AHEAD, max_trajectory_age_steps: 2, in_flight_weight_updates: true}
loss_fn: {use_importance_sampling_correction: AHEAD, force_on_policy_ratio: true}
policy:
  train_global_batch_size: BATCH
  dtensor_cfg: {_override_: true, enabled: false}
  megatron_cfg: {enabled: true}
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 9.0}}
  scheduler: [{name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 99}}]
  generation:
    backend: BACKEND
    val_temperature: 0
    val_top_k: null
    vllm_cfg:
      {tensor_parallel_size: 2, pipeline_parallel_size: 1, expert_parallel_size: 2, gpu_memory_utilization: 0.7,
       enforce_eager: true, precision: bfloat16, load_format: dummy, async_engine: true, kv_cache_dtype: auto}
    vllm_kwargs: {max_num_seqs: 64, compilation_config: {level: 3}}
    sglang_cfg:
      {model_path: models/small, tp_size: 2, dp_size: 1, mem_fraction_static: 0.6, sglang_server_config: {num_gpus: 2}}
    mcore_generation_config: {num_cuda_graphs: 4, tensor_model_parallel_size: 1}
    colocated: {enabled: SHARED, resources: {gpus_per_node: 2, num_nodes: null}}
data:
  shuffle: true
  train: {_override_: true, data_path: data/train.jsonl, input_key: question}
  validation: {data_path: data/held_out.jsonl, input_key: question}
  default: {dataset_name: ResponseDataset, processor: math_hf_data_processor, env_name: math, prompt_file: null}
env: {math: {num_workers: 8, math_verify_impl: dapo_math_verify}}
logger: {wandb_enabled: true, wandb: {project: mine, name: first, log_nemo_gym_full_result_tables: false}}
"""


def test_mlflow_is_converted(tmp_path):
    mlflow = "{experiment_name: sums, run_name: first, tracking_uri: 'http://here:5000'}"
    done = converted(tmp_path, f"defaults: base.yaml\nlogger: {{mlflow_enabled: true, mlflow: {mlflow}}}\n")
    options = {"experiment_name": "sums", "run_name": "first", "tracking_uri": "http://here:5000"}
    assert (done.settings["track_with"], done.settings["tracker_kwargs"]) == ("mlflow", options)


def rl(
    folder: Path, *, backend: str = "vllm", shared: bool = True, ahead: bool = False, batch: int = 128
) -> Conversion:
    values = {"BACKEND": backend, "BATCH": str(batch), "SHARED": str(shared).lower(), "AHEAD": str(ahead).lower()}
    text = RL
    for name, value in values.items():
        text = text.replace(name, value)
    done = converted(folder, text)
    loads_quietly(done, folder)
    return done


def data_args(**keys: str) -> dict[str, Any]:
    """The converted `data_args` of this file's data, with further `keys`."""
    return {"file_name": "data/train.jsonl", "eval_file_name": "data/held_out.jsonl", "chat": True, **keys}


def loads_quietly(done: Conversion, folder: Path) -> None:
    """What was written loads, and nothing of it is without effect but an evaluation that still lacks its data."""
    (folder / "job.yaml").write_text(done.to_yaml())
    idle = [notice.text for notice in load_config(folder / "job.yaml").notices if "no effect" in notice.text]
    assert [text for text in idle if not text.endswith(NOT_EVALUATED)] == []


@pytest.mark.config
def test_engine_data_reward_and_evaluation_are_kept(tmp_path):
    done = rl(tmp_path)
    settings = done.settings
    infer = settings["actor_infer"]
    assert infer["strategy_args"] == {
        "strategy_name": "vllm",
        "strategy_config": {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1,
            "gpu_memory_utilization": 0.7,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "enable_expert_parallel": True,
            "max_num_seqs": 64,
            "compilation_config": {"level": 3},
        },
    }
    assert settings["actor_train"]["device_mapping"] == "list(range(0,8))" and "device_mapping" not in infer
    assert settings["is_offload_states"] is True and "async_generation_ratio" not in settings
    assert infer["generating_args"]["temperature"] == 0.8
    assert settings["validation"]["generating_args"] == {"do_sample": False, "num_return_sequences": 4}
    assert (settings["eval_steps"], settings["eval_samples"], settings["advantage_clip"]) == (10, 32, 5)
    assert settings["actor_train"]["data_args"] == data_args(prompt="question", response="output", long_prompts="drop")
    assert (settings["reward_function"], settings["reward_args"]) == ("math_verify", {"after": "Answer:"})
    assert (settings["track_with"], settings["tracker_kwargs"]) == ("wandb", {"project": "mine", "name": "first"})
    assert settings["actor_train"]["logprob_plan"] == "none", "force_on_policy_ratio"
    training = settings["actor_train"]["training_args"]
    assert settings["actor_train"]["strategy_args"]["strategy_config"]["moe_router_dtype"] == "fp64"
    assert (training["learning_rate"], training["warmup_steps"]) == (5e-6, 13), "Megatron's, not DTensor's"
    assert not {one.key for one in done.left_out_as("unknown")}
    assert settings["actor_train"]["strategy_args"]["strategy_config"]["freeze_moe_router"] is True
    assert not done.left_out_as("refused")
    assert [text.split(":")[0] for text in done.missing] == ["pretrain"], "nothing but the model is missing"


@pytest.mark.config
@pytest.mark.parametrize("ahead", [False, True])
def test_a_ratio_of_one_is_kept_only_where_a_rollout_is_one_mini_batch(tmp_path, ahead):
    """NeMo-RL refuses such a file; ours would have had a ratio of 1 in every step."""
    done = rl(tmp_path, ahead=ahead, shared=not ahead, batch=64)
    assert "logprob_plan" not in done.settings["actor_train"]
    (left_out,) = [one for one in done.left_out_as("refused") if one.key == "loss_fn.force_on_policy_ratio"]
    assert "16 x 8" in left_out.why and "64" in left_out.why


@pytest.mark.config
def test_rollouts_ahead_of_training_on_devices_of_their_own(tmp_path):
    done = rl(tmp_path, shared=False, ahead=True)
    settings = done.settings
    assert settings["actor_train"]["device_mapping"] == "list(range(0,6))"
    assert settings["actor_infer"]["device_mapping"] == "list(range(6,8))"
    assert settings["async_generation_ratio"] == 2 and "is_offload_states" not in settings
    assert settings["loss_args"]["engine_ratio_cap"] > 4.9e8, "there is no cap there: exp(20) stays below this one"
    assert "logprob_plan" not in settings["actor_train"], "the ratio is to the weights that drew them"
    (ahead,) = [one.meaning for one in done.changed if one.to == "async_generation_ratio"]
    assert "old log-probs" not in ahead, "they are those of the weights in training, as in NeMo-RL"
    assert settings["in_flight_updates"] is True


@pytest.mark.config
def test_rollouts_ahead_without_a_correction_have_the_samplers_log_probs_and_the_report_says_so(tmp_path):
    text = RL.replace("use_importance_sampling_correction: AHEAD", "use_importance_sampling_correction: false")
    for name, value in (("BACKEND", "vllm"), ("BATCH", "128"), ("SHARED", "false"), ("AHEAD", "true")):
        text = text.replace(name, value)
    done = converted(tmp_path, text)
    loads_quietly(done, tmp_path)
    assert load_config(tmp_path / "job.yaml").actor_train.logprob_plan == "rollout"
    (ahead,) = [one.meaning for one in done.changed if one.to == "async_generation_ratio"]
    assert "old log-probs are the sampler's" in ahead


@pytest.mark.config
def test_other_engines(tmp_path):
    sglang = rl(tmp_path, backend="sglang").settings["actor_infer"]["strategy_args"]
    assert sglang == {
        "strategy_name": "sglang",
        "strategy_config": {"tp_size": 2, "dp_size": 1, "mem_fraction_static": 0.6},
    }
    own = rl(tmp_path, backend="megatron", shared=False).settings["actor_infer"]
    assert own["strategy_args"] == {
        "strategy_name": "megatron_infer",
        "strategy_config": {"tensor_model_parallel_size": 1},
    }
    assert own["device_mapping"] == "list(range(6,8))"
    done = rl(tmp_path, backend="trtllm")
    assert done.settings["actor_infer"]["strategy_args"] == {"strategy_name": "megatron_infer"}
    assert "trtllm" in {one.key: one.meaning for one in done.changed}["policy.generation.backend"]
    assert "device_mapping" not in done.settings["actor_infer"] and "is_offload_states" not in done.settings


@pytest.mark.config
def test_engines_on_several_machines_are_to_be_started(tmp_path):
    done = converted(tmp_path, CHILD + "cluster: {num_nodes: 2}\n")
    assert any(text.startswith("actor_infer.engine_args.urls") for text in done.missing)


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
def test_sequences_with_large_errors_are_filtered(tmp_path):
    kind = "truncated_importance_sampling_type: icepop, truncated_importance_sampling_ratio_min: 0.5"
    done = converted(
        tmp_path,
        CHILD.replace("steps: 40", "steps: 40, seq_logprob_error_threshold: 1.5") + f"loss_fn: {{{TIS}, {kind}}}\n",
    )
    assert done.settings["train_infer_correction"] == {
        "is_weight": {"weight_type": "token", "upper_bound": None},
        "filters": [
            {"agg_type": "token", "ratio_low": 0.5, "ratio_high": 5.0, "effect": "zero"},
            {"agg_type": "geometric", "error_high": 1.5},
        ],
    }
    assert "engine_ratio_cap" not in done.settings.get("loss_args", {})
    assert not [one.key for one in done.left_out_as("refused", "unknown") if "error_threshold" in one.key]
    (tmp_path / "job.yaml").write_text(done.to_yaml())
    assert load_config(tmp_path / "job.yaml").train_infer_correction is not None


@pytest.mark.config
@pytest.mark.parametrize("given", LOSSES)
def test_its_loss_is_ours(tmp_path, given):
    from roll_batching.jobs.objectives.from_config import loss_of

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
