"""Defaults of NeMo-RL's configuration classes and of `.get(KEY, DEFAULT)` in its code (commit 7ea279a).

Settings that are off by default (null, false, 0) are not listed: the converter reads absent keys as off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.tools.conversion.value_types import value_at

_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "num_prompts_per_step": 32,
        "num_generations_per_prompt": 16,
        "max_num_epochs": 1,
        "max_num_steps": 1_000_000,
        "max_rollout_turns": 1,
        "normalize_rewards": True,
        "use_leave_one_out_baseline": True,
        "val_period": 10,
        "val_start_at": -1,
        "val_batch_size": 256,
        "max_val_samples": 256,
        "val_num_generations_per_prompt": 1,
        "seed": 42,
        "dynamic_sampling_max_gen_batches": 10,
        "batch_multiplier": 1.0,
        "async_grpo.max_trajectory_age_steps": 1,
        "reward_scaling.enabled": False,
        "reward_scaling.source_max": 1.0,
        "reward_scaling.target_max": 1.0,
        "adv_estimator.name": "grpo",
        "adv_estimator.normalize_rewards": True,
        "adv_estimator.use_leave_one_out_baseline": True,
        "adv_estimator.minus_baseline": True,
    },
    "ppo": {
        "num_prompts_per_step": 32,
        "num_generations_per_prompt": 16,
        "max_num_epochs": 100_000,
        "max_num_steps": 100_000,
        "max_rollout_turns": 1,
        "val_period": 20,
        "val_batch_size": 256,
        "val_at_start": True,
        "max_val_samples": 256,
        "skip_reference_policy_logprobs_calculation": True,
        "seed": 42,
        "dynamic_sampling_max_gen_batches": 10,
        "batch_multiplier": 1.0,
        "ppo_epochs": 4,
        "policy_training_start_step": 0,
        "async_ppo.max_trajectory_age_steps": 1,
        "reward_scaling.enabled": False,
        "reward_scaling.source_max": 1.0,
        "reward_scaling.target_max": 1.0,
        "adv_estimator.name": "gae",
        "adv_estimator.gae_lambda": 0.95,
        "adv_estimator.gae_gamma": 1.0,
        "adv_estimator.normalize_advantages": True,
    },
    "value_loss_fn": {"scale": 1.0},
    "loss_fn": {
        "token_level_loss": True,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
    },
    "sft": {
        "max_num_steps": 60,
        "max_num_epochs": 1,
        "val_period": 10,
        "val_batches": 8,
        "val_global_batch_size": 32,
        "val_micro_batch_size": 1,
        "val_at_start": True,
        "seed": 42,
    },
    "dpo": {
        "max_num_epochs": 1,
        "max_num_steps": 150,
        "val_period": 25,
        "val_batches": 8,
        "val_global_batch_size": 8,
        "val_micro_batch_size": 1,
        "val_at_start": True,
        "seed": 42,
        "reference_policy_kl_penalty": 0.05,
        "preference_loss_weight": 1.0,
    },
    "distillation": {
        "num_prompts_per_step": 128,
        "num_generations_per_prompt": 1,
        "max_rollout_turns": 1,
        "max_num_steps": 1000,
        "max_num_epochs": 10,
        "val_batch_size": 64,
        "val_period": 20,
        "max_val_samples": 512,
        "topk_logits_k": 64,
        "seed": 42,
    },
    "async_rl": {"sampler.name": "in_order"},
    "env.math": {"verifier_type": "math", "math_verify_impl": "hf_math_verify"},
    "policy.dtensor_cfg": {"expert_parallel_size": 1},
    "policy.megatron_cfg": {"recompute_granularity": "full"},
    "policy.megatron_cfg.optimizer": {
        "weight_decay": 0.01,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_eps": 1e-8,
        "clip_grad": 1.0,
    },
    "policy.megatron_cfg.scheduler": {"lr_decay_style": "linear", "lr_warmup_iters": 0},
}
"""By section, the defaults in a file that has the section. Those of Megatron's optimizer and schedule come from
classes of Megatron-Core and Megatron-Bridge, which NeMo-RL passes its settings to."""

_DISTILLED: Mapping[str, Any] = {"kl_type": "mixed", "mixed_kl_weight": 0.5}
"""Defaults of `loss_fn` in a file of distillation, instead of those above."""

_TORCH: Mapping[str, Mapping[str, Any]] = {
    "AdamW": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    "Adam": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
}
"""By torch optimizer, its defaults for keys that `policy.optimizer.kwargs` leaves out."""


def defaults_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults, by dotted key, that apply to a file with these settings."""
    defaults = {
        f"{section}.{name}": value
        for section, values in _SECTIONS.items()
        if isinstance(value_at(data, section), Mapping)
        for name, value in values.items()
    }
    if isinstance(value_at(data, "distillation"), Mapping):
        defaults = {key: value for key, value in defaults.items() if not key.startswith("loss_fn.")}
        defaults |= {f"loss_fn.{name}": value for name, value in _DISTILLED.items()}
    if isinstance(value_at(data, "async_rl"), Mapping):
        kind = value_at(data, "async_rl.sampler.name") or "in_order"
        defaults[f"async_rl.sampler.max_{'lookahead' if kind == 'in_order' else 'staleness'}_versions"] = 1
    optimizer = str(value_at(data, "policy.optimizer.name") or "").rpartition(".")[2]
    defaults |= {f"policy.optimizer.kwargs.{name}": value for name, value in _TORCH.get(optimizer, {}).items()}
    if (rows := value_at(data, "policy.train_micro_batch_size")) is not None:
        defaults["policy.logprob_batch_size"] = rows
    return defaults
