"""The settings of a NeMo-RL file, and the reasons for keys that the translation does not read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roll_batching.jobs.conversion.draft import Draft

REWARDS = "no such reward exists here: write a function, and name it in reward_function or rewards"
ENGINE = "is for NeMo-RL's own workers; actor_infer configures engines here"
MARKED = "tokens of tool calls and thoughts have no separate advantages: a reward function may score them"
BEST = "advantages compare all responses of a group; adv_estimator: pass_at_k is similar"
STOP = "a response ends at the tokenizer's end token, or the model's stop tokens"
ROUTERS = "of a mixture of experts, whose routers"

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
    ("policy.megatron_cfg.peft", "refused", "LoRA is not supported for now"),
    ("policy.megatron_cfg.fp8_cfg", "refused", "FP8 is not supported for now"),
    ("policy.megatron_cfg.freeze_moe_router", "refused", f"{ROUTERS} are trained like all parameters"),
    ("policy.megatron_cfg.moe_router_dtype", "refused", f"{ROUTERS} compute in the precision of the model"),
    ("policy.megatron_cfg.moe_router_load_balancing_type", "refused", f"{ROUTERS} have model_args.architecture's loss"),
    ("policy.megatron_cfg.moe_router_enable_expert_bias", "refused", f"{ROUTERS} are as the model's config.json says"),
    ("policy.megatron_cfg.moe_router_bias_update_rate", "refused", f"{ROUTERS} are as the model's config.json says"),
    ("policy.megatron_cfg.num_layers_in_first_pipeline_stage", "refused", "stages have equal numbers of layers"),
    ("policy.megatron_cfg.num_layers_in_last_pipeline_stage", "refused", "stages have equal numbers of layers"),
    ("policy.megatron_cfg.mtp_", "refused", "multi-token prediction (MTP) is not supported for now"),
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
    ("policy.is_vlm", "refused", "vision-language models are not supported for now"),
    ("policy.router_replay", "refused", "router replay is not supported for now"),
    ("policy.quant_", "refused", "quantised weights are not trained here"),
    ("async_rl", "idle", "engine_args, sampler_restarts and rollout_timeout handle failures of rollouts"),
    ("grpo.seq_logprob_error_threshold", "refused", "loss_args.engine_correction: mask_sequences is similar"),
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
    ("ppo", "refused", "critics and value heads are not supported for now"),
    ("value", "refused", "critics and value heads are not supported for now"),
    ("value_loss_fn", "refused", "critics and value heads are not supported for now"),
    ("loss_fn.kl_type", "refused", "distillation is not supported for now"),
    ("loss_fn.mixed_kl_weight", "refused", "distillation is not supported for now"),
    ("distillation", "refused", "distillation is not supported for now"),
    ("on_policy_distillation", "refused", "distillation is not supported for now"),
    ("teacher", "refused", "distillation is not supported for now"),
    ("teachers", "refused", "distillation is not supported for now"),
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


class NemoRlFile:
    """Settings of a file, which the translation takes out one by one, and the draft of the result."""

    def __init__(self, data: dict[str, Any], draft: Draft) -> None:
        self.data, self.draft = data, draft

    def peek(self, key: str, default: Any = None) -> Any:
        """The value of `key`, which still counts as unread."""
        here: Any = self.data
        for part in key.split("."):
            if not isinstance(here, dict) or part not in here:
                return default
            here = here[part]
        return here

    def take(self, key: str, default: Any = None) -> Any:
        """The value of `key`, which then counts as read."""
        value = self.peek(key, default)
        *sections, last = key.split(".")
        section = self.peek(".".join(sections)) if sections else self.data
        if isinstance(section, dict):
            section.pop(last, None)
        return value

    def move(
        self, key: str, path: tuple[str, ...], change: Callable[[Any], Any] = lambda value: value, meaning: str = ""
    ) -> None:
        """Puts the value of `key`, where there is one, at `path`."""
        value = self.take(key)
        if value is not None:
            self.draft.put(path, change(value), key, meaning)

    def expect_off(self, *keys: str, why: str) -> None:
        """Leaves out keys that must be off; as refused, with the reason `why`, where one is on."""
        for key in keys:
            value = self.take(key)
            if value is not None:
                off = _is_off(value)
                self.draft.leave_out(key, "idle" if off else "refused", "is off, as here" if off else why)

    def leave_out_rest(self) -> None:
        """Leaves out all keys that were not taken, by section."""
        self._rest(self.data, "")

    def _rest(self, section: Mapping[str, Any], above: str) -> None:
        for name, value in section.items():
            key = f"{above}{name}"
            reason = next((one for one in _REASONS if _is_below(one[0], key)), None)
            if value == {}:
                continue  # all its keys were taken
            if _is_off(value) and (not isinstance(value, dict) or "enabled" in value or (reason and key == reason[0])):
                self.draft.leave_out(key, "idle", "is off, as here")
            elif name in _SPEED or (name == "expert_tensor_parallel_size" and value == 1):
                self.draft.leave_out(key, "idle", "changes speed or memory, not results")
            elif reason is not None and (reason[1] == "idle" or not isinstance(value, dict) or key == reason[0]):
                self.draft.leave_out(key, "refused" if reason[1] == "refused" else "idle", reason[2])
            elif isinstance(value, dict):
                self._rest(value, f"{key}.")
            else:
                self.draft.leave_out(key, "unknown", "there is no such setting here")


def _is_below(prefix: str, key: str) -> bool:
    """Whether `key` is the section `prefix` or lies in it. A prefix that ends in `_` is that of a name."""
    return key == prefix or key.startswith(prefix if prefix.endswith("_") else f"{prefix}.")


def _is_off(value: Any) -> bool:
    """Whether `value` is off, or a section that is switched off."""
    if isinstance(value, dict):
        return value.get("enabled") is False or all(_is_off(below) for below in value.values())
    return value in (None, False, 0, "none", [])
