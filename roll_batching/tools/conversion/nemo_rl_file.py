"""The reasons for keys of a NeMo-RL file that the translation does not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, Place, Problem, shortened
from roll_batching.tools.conversion.foreign_file import ForeignFile
from roll_batching.tools.conversion.value_types import value_at, wrong_types

RL_TASKS = ("grpo", "distill")
"""Tasks that sample."""
REWARDS = "no such reward exists here: write a function, and name it in reward_function or rewards"
ENGINE = "is for NeMo-RL's own workers; actor_infer configures engines here"
MARKED = "tokens of tool calls and thoughts have no separate advantages: a reward function may score them"
BEST = "advantages compare all responses of a group; adv_estimator: pass_at_k is similar"
STOP = "a response ends at the tokenizer's end token, or the model's stop tokens"

_REASONS: tuple[tuple[str, str, str], ...] = (
    ("policy.generation", "idle", ENGINE),
    ("policy.dtensor_cfg", "idle", "training runs on Megatron-Core, whose settings are strategy_config"),
    ("policy.megatron_cfg.checkpoint", "idle", "checkpoints are written by save_steps and async_save"),
    (
        "policy.megatron_cfg.env_vars",
        "idle",
        "system_envs sets variables; these are for components that are not used",
    ),
    ("policy.generation_batch_size", "idle", ENGINE),
    ("policy.megatron_cfg.fp8_cfg", "idle", "FP8 is not enabled"),
    ("policy.megatron_cfg.mtp_", "refused", "each head of multi-token prediction has its own layer"),
    ("policy.megatron_cfg.train_iters", "idle", "max_steps is the job's length"),
    (
        "policy.megatron_cfg.scheduler.override_opt_param_scheduler",
        "idle",
        "a resumed job continues the schedule of its checkpoint",
    ),
    (
        "policy.optimizer.kwargs",
        "idle",
        "AdamW keeps fp32 parameters and moments, whichever of its kernels is used",
    ),
    ("policy.hf_config_overrides", "refused", "config.json of the model directory is read unchanged: change it there"),
    (
        "policy.tokenizer.chat_template_kwargs",
        "refused",
        "chat templates are called without arguments: write their values into chat_template.jinja",
    ),
    ("policy.refit_buffer_size_gb", "idle", ENGINE),
    ("policy.is_vlm", "idle", "the model directory tells; actor_train.data_args.images names the images"),
    ("policy.quant_", "refused", "quantised weights are not trained here"),
    ("async_rl", "idle", "engine_args, sampler_restarts and rollout_timeout handle failures of rollouts"),
    ("grpo.invalid_tool_call_", "refused", MARKED),
    ("grpo.malformed_thinking_", "refused", MARKED),
    ("grpo.penalize_", "refused", MARKED),
    ("grpo.best_at_k_", "refused", BEST),
    ("grpo.combined_training_", "refused", BEST),
    ("grpo.skip_reference_policy_logprobs_calculation", "idle", "without a weight there is no reference"),
    ("grpo.calculate_advantages_on_gpu", "idle", "changes speed or memory, not results"),
    ("policy.draft", "refused", "draft models are not trained for now"),
    ("logger", "idle", "metrics go to metrics.jsonl, TensorBoard and, with track_with: wandb, Weights & Biases"),
    ("cluster", "idle", "one process per device of device_mapping; Ray or torchrun starts them on several machines"),
    ("data_plane", "idle", "samples travel between ranks directly"),
    (
        "checkpointing",
        "idle",
        "save_steps and save_total_limit replace it; the model is exported at the end",
    ),
    ("env", "refused", REWARDS),
    ("data.custom_dataloader", "refused", "texts are drawn in shuffled order from all files alike"),
    ("data.num_prompts_per_dataloader", "refused", "texts are drawn in shuffled order from all files alike"),
    ("data.use_multiple_dataloader", "refused", "texts are drawn in shuffled order from all files alike"),
    ("dpo.preference_loss", "refused", "dpo is the loss of NeMo-RL's own; loss_function names others"),
    ("rm", "refused", "reward models are not trained here"),
    ("value", "idle", "there is no critic without the section `ppo`"),
    ("value_loss_fn", "idle", "there is no critic without the section `ppo`"),
    ("loss_fn.kl_type", "refused", "belongs to distillation, and the file has no section `distillation`"),
    ("loss_fn.mixed_kl_weight", "refused", "belongs to distillation, and the file has no section `distillation`"),
    ("on_policy_distillation", "refused", "task: distill has a teacher's distributions; rewards from it do not exist"),
    ("teacher", "idle", "a frozen model: model_name, precision, parallel sizes and batching are read"),
    ("teachers", "refused", "distillation has one teacher with the student's tokenizer (docs/distillation.md)"),
)
"""By prefix of a key: kind and reason for leaving out the keys below it."""

_SPEED = frozenset(
    (
        "cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps data_parallel_sharding_strategy defer_fp32_logits "
        "empty_unused_memory_level force_reconvert_from_hf fused_linear_logprobs_chunk_size "
        "gradient_accumulation_fusion moe_enable_deepep moe_flex_dispatcher_backend moe_hybridep_num_sms "
        "moe_per_layer_logging optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d "
        "pipeline_dtype track_moe_metrics use_custom_fsdp use_fused_linear_logprobs use_gloo_process_groups "
        "fine_grained_activation_offloading offload_modules use_fused_weighted_squared_relu"
    ).split()
)
"""Settings of Megatron that change speed or memory, not results."""


class NemoRlFile(ForeignFile):
    """Settings of a NeMo-RL file."""

    reasons = _REASONS
    speed = _SPEED


# ---- nemo rl types


_SECTIONS = (
    "policy policy.tokenizer policy.megatron_cfg policy.megatron_cfg.optimizer policy.megatron_cfg.scheduler "
    "policy.dtensor_cfg policy.generation policy.generation.vllm_cfg policy.generation.vllm_kwargs "
    "policy.generation.sglang_cfg policy.generation.colocated policy.generation.colocated.resources grpo "
    "grpo.adv_estimator loss_fn sft dpo data data.default env env.nemo_gym cluster checkpointing logger async_rl"
).split()
_COUNTS = (
    "cluster.gpus_per_node cluster.num_nodes policy.train_global_batch_size policy.train_micro_batch_size "
    "policy.max_total_sequence_length policy.megatron_cfg.tensor_model_parallel_size "
    "policy.megatron_cfg.pipeline_model_parallel_size policy.megatron_cfg.context_parallel_size "
    "policy.megatron_cfg.max_seqlen_per_dp_cp_rank "
    "policy.dtensor_cfg.tensor_parallel_size policy.dtensor_cfg.context_parallel_size "
    "policy.generation.colocated.resources.gpus_per_node policy.generation.colocated.resources.num_nodes "
    "policy.generation.vllm_cfg.expert_parallel_size"
).split()
_NUMBERS = (
    "grpo.dynamic_sampling_max_gen_batches grpo.batch_multiplier grpo.val_period grpo.max_val_samples "
    "grpo.val_batch_size grpo.advantage_clip_low grpo.advantage_clip_high "
    "grpo.async_grpo.max_trajectory_age_steps async_rl.sampler.max_lookahead_versions "
    "async_rl.sampler.max_staleness_versions sft.val_period sft.val_batches sft.val_global_batch_size dpo.val_period "
    "dpo.val_batches dpo.val_global_batch_size dpo.preference_loss_weight dpo.sft_loss_weight"
).split()
CORRECTIONS = {None: "truncate", "tis": "truncate", "icepop": "mask", "seq-mask-tis": "mask_sequences"}
"""By `truncated_importance_sampling_type`, our `engine_correction`."""


def check_types(data: Mapping[str, Any], source: str) -> None:
    """Raises ConfigFileError with all values of a wrong type."""
    sections, counts, numbers = ((*names, *_of_ppo(names)) for names in (_SECTIONS, _COUNTS, _NUMBERS))
    numbers += ("value_loss_fn.scale", "value_loss_fn.cliprange")
    problems = list(wrong_types(data, (*sections, "value_loss_fn"), (*counts, "ppo.ppo_epochs"), numbers))
    kind = value_at(data, "loss_fn.truncated_importance_sampling_type")
    if not isinstance(kind, str | None) or kind not in CORRECTIONS:
        known = ", ".join(name for name in CORRECTIONS if name)
        text = f"is {shortened(repr(kind))}; NeMo-RL knows {known}"
        problems.append((("loss_fn", "truncated_importance_sampling_type"), text))
    if problems:
        raise ConfigFileError([Problem(path, text, Place(source)) for path, text in problems])


def _of_ppo(names: Sequence[str]) -> list[str]:
    """The keys of a PPO file that are those of `policy` and `grpo` in `names`."""
    value = [f"value{name.removeprefix('policy')}" for name in names if name.partition(".")[0] == "policy"]
    own = [name.replace("async_grpo", "async_ppo") for name in names if name.partition(".")[0] == "grpo"]
    return [*value, *(f"ppo{name.removeprefix('grpo')}" for name in own)]
