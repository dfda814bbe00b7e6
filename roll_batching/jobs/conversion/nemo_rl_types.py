"""Type checks of the values in a NeMo-RL file that its conversion computes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, Place, Problem, shortened

_SECTIONS = (
    "policy policy.tokenizer policy.megatron_cfg policy.megatron_cfg.optimizer policy.megatron_cfg.scheduler "
    "policy.dtensor_cfg policy.generation policy.generation.vllm_cfg policy.generation.vllm_kwargs "
    "policy.generation.sglang_cfg policy.generation.colocated policy.generation.colocated.resources grpo "
    "grpo.adv_estimator loss_fn sft dpo data data.default env cluster checkpointing logger async_rl"
).split()
_COUNTS = (
    "cluster.gpus_per_node cluster.num_nodes policy.train_global_batch_size policy.train_micro_batch_size "
    "policy.max_total_sequence_length policy.megatron_cfg.tensor_model_parallel_size "
    "policy.megatron_cfg.pipeline_model_parallel_size policy.megatron_cfg.context_parallel_size "
    "policy.dtensor_cfg.tensor_parallel_size policy.dtensor_cfg.context_parallel_size "
    "policy.generation.colocated.resources.gpus_per_node policy.generation.colocated.resources.num_nodes "
    "policy.generation.vllm_cfg.expert_parallel_size"
).split()
_NUMBERS = (
    "grpo.val_period grpo.max_val_samples grpo.val_batch_size grpo.advantage_clip_low grpo.advantage_clip_high "
    "grpo.async_grpo.max_trajectory_age_steps async_rl.sampler.max_lookahead_versions "
    "async_rl.sampler.max_staleness_versions sft.val_period sft.val_batches sft.val_global_batch_size dpo.val_period "
    "dpo.val_batches dpo.val_global_batch_size dpo.preference_loss_weight dpo.sft_loss_weight"
).split()
CORRECTIONS = {None: "truncate", "tis": "truncate", "icepop": "mask", "seq-mask-tis": "mask_sequences"}
"""By `truncated_importance_sampling_type`, our `engine_correction`."""


def check_types(data: Mapping[str, Any], source: str) -> None:
    """Raises ConfigFileError with all values of a wrong type."""
    problems = list(_problems(data))
    if problems:
        raise ConfigFileError([Problem(path, text, Place(source)) for path, text in problems])


def _problems(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for key in _SECTIONS:
        value = value_at(data, key)
        if value is not None and not isinstance(value, Mapping):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}, but it is a section of keys and values"
    for key in _COUNTS:
        value = value_at(data, key)
        if value is not None and not (_is_whole(value) and value >= 1):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}: write a whole number of at least 1"
    for key in _NUMBERS:
        value = value_at(data, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value != value):
            yield tuple(key.split(".")), f"is {shortened(repr(value))}: write a number"
    kind = value_at(data, "loss_fn.truncated_importance_sampling_type")
    if not isinstance(kind, str | None) or kind not in CORRECTIONS:
        known = ", ".join(name for name in CORRECTIONS if name)
        text = f"is {shortened(repr(kind))}; NeMo-RL knows {known}"
        yield ("loss_fn", "truncated_importance_sampling_type"), text


def _is_whole(value: Any) -> bool:
    """Whether `value` is a whole number; a float counts, as the result of a division."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and value % 1 == 0


def value_at(data: Any, key: str) -> Any:
    """The value of a dotted key; None if absent."""
    for part in key.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
