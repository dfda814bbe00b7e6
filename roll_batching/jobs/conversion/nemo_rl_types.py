"""Type checks of the values in a NeMo-RL file that its conversion computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, Place, Problem, shortened
from roll_batching.jobs.conversion.value_types import value_at, wrong_types

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
