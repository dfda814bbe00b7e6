"""Translates NeMo-RL's files: sections of policy, algorithm, loss, data and cluster to our keys.

Keys that are translated are taken out of the file's settings (`nemo_rl_file`). The others are left out with a reason.
"""

from __future__ import annotations

import copy
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.foreign_keys import FOREIGN_KEYS
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.settings.megatron_config import MegatronConfig
from roll_batching.tools.conversion.adapters import convert_adapters
from roll_batching.tools.conversion.context_sizes import PACKING, ContextSizes, convert_context_sizes, put_rank_cap
from roll_batching.tools.conversion.critics import share_layout
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import ForeignFile, fill_defaults
from roll_batching.tools.conversion.fp8 import convert_nemo_rl_fp8
from roll_batching.tools.conversion.nemo_rl_batching import convert_batching, steps_of_a_rollout
from roll_batching.tools.conversion.nemo_rl_data import convert_data
from roll_batching.tools.conversion.nemo_rl_distillation import convert_distillation
from roll_batching.tools.conversion.nemo_rl_file import NEMO_RL, RL_TASKS, check_types, defaults_of
from roll_batching.tools.conversion.nemo_rl_generation import convert_devices, convert_generation
from roll_batching.tools.conversion.nemo_rl_grpo import check_forced_ratio, convert_algorithm, convert_loss
from roll_batching.tools.conversion.nemo_rl_optimizer import convert_optimizer
from roll_batching.tools.conversion.nemo_rl_ppo import (
    convert_ppo,
    put_value_model,
    read_ppo_as_grpo,
    restore_names,
    value_as_policy,
)
from roll_batching.tools.conversion.nemo_rl_supervised import convert_supervised, task_of

_LAYOUT = ("actor_train", "strategy_args", "strategy_config")


def draft_of_nemo_rl(source: str, data: dict[str, Any]) -> Draft:
    """Translates composed settings of NeMo-RL. Raises ConfigError for a file without a policy."""
    check_types(data, source)
    file = ForeignFile(NEMO_RL, copy.deepcopy(data), Draft(source, framework="NeMo-RL"))
    if not isinstance(file.data.get("policy"), dict):
        raise ConfigError(f"{source} has no section `policy`")
    file.draft.defaults = fill_defaults(file.data, defaults_of(file.data))
    has_critic = read_ppo_as_grpo(file)
    task = task_of(file)
    check_forced_ratio(file)
    _model(file)
    sizes = _layout(file)
    steps = steps_of_a_rollout(file, "distillation" if task == "distill" else "grpo") if task in RL_TASKS else 1
    convert_devices(file, task)
    convert_batching(file, source, task)
    if sizes is not None:
        _caps_of_ranks(file, sizes)
    convert_optimizer(file, task, steps)
    if has_critic:
        _value_model(file, source)
    _lengths(file, task)
    if task == "grpo":
        convert_algorithm(file)
        convert_loss(file)
        if has_critic:
            convert_ppo(file)
        convert_generation(file)
    elif task == "distill":
        convert_distillation(file)
        convert_generation(file)
    else:
        convert_supervised(file, task)
    convert_data(file, task)
    _checkpoints(file)
    _tracker(file)
    file.leave_out_rest()
    if has_critic:
        restore_names(file.draft)
    return file.draft


def _value_model(file: ForeignFile, source: str) -> None:
    """PPO's value model as the role `critic`: its settings are those of a policy, in another section."""
    below = value_as_policy(file)
    below.draft.defaults = fill_defaults(below.data, defaults_of(below.data))
    megatron = bool(below.peek("policy.megatron_cfg.enabled"))
    _model(below)
    if _layout(below) is not None:
        text = "packs of the critic have no context-parallel sizes of their own"
        below.draft.leave_out("policy.megatron_cfg.dynamic_context_parallel", "refused", text)
    share_layout(file.draft, below.draft)
    steps = steps_of_a_rollout(file, "grpo", below.peek("policy.train_global_batch_size", 0))
    convert_batching(below, source, "value")
    convert_optimizer(below, "value", steps, file)
    below.leave_out_rest()
    put_value_model(file, below, megatron)


def _model(file: ForeignFile) -> None:
    name = file.peek("policy.model_name")
    file.move("policy.model_name", ("pretrain",))
    tokenizer = file.take("policy.tokenizer.name")
    file.move("policy.tokenizer.chat_template_kwargs", ("actor_train", "data_args", "chat_template_kwargs"))
    template = file.peek("policy.tokenizer.chat_template")
    if template not in (None, "default"):
        text = "texts go through the template in the tokenizer's folder: save this one there as chat_template.jinja"
        file.draft.leave_out("policy.tokenizer.chat_template", "refused", text)
    if tokenizer not in (None, name):
        file.draft.put(("tokenizer",), {"type": "hf", "name_or_path": tokenizer}, "policy.tokenizer.name")
    if file.take("policy.router_replay.enabled"):
        file.draft.put(("actor_train", "router_replay", "mode"), "R3", "policy.router_replay.enabled")
    precisions = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    file.move("policy.precision", ("actor_train", "model_args", "dtype"), lambda name: precisions.get(str(name), name))


def _caps_of_ranks(file: ForeignFile, sizes: ContextSizes) -> None:
    """Caps of one rank from those of whole packs, where each pack has its own context-parallel size."""
    packing, key = file.draft.values["actor_train"].get("sequence_packing_args"), "policy.sequence_packing"
    if packing is None:
        return
    text = "packs with their own context-parallel sizes are planned by it"
    file.draft.put((*PACKING, "algorithm"), "load_balance", f"{key}.algorithm", text)
    put_rank_cap(file, sizes, packing["max_packed_sequence_length_train"] // sizes.size, f"{key}.train_mb_tokens")
    forward = packing["max_packed_sequence_length_forward"] // sizes.size
    text = "the tokens of a pack on one rank"
    file.draft.put((*PACKING, "max_packed_sequence_length_forward"), forward, f"{key}.logprob_mb_tokens", text)


def _layout(file: ForeignFile) -> ContextSizes | None:
    """Parallel sizes and recomputation, of Megatron or of DTensor, as Megatron's settings; sizes per pack, if any."""
    megatron = bool(file.peek("policy.megatron_cfg.enabled"))
    file.take("policy.megatron_cfg.enabled")
    file.take("policy.dtensor_cfg.enabled")
    sizes = convert_context_sizes(file, lambda name: f"policy.megatron_cfg.{name}") if megatron else None
    for name, value in list((file.peek("policy.megatron_cfg") or {}).items()):
        known = field_at((*_LAYOUT, name)) is not None or name in FOREIGN_KEYS[MegatronConfig]
        if megatron and known and value is not None:
            file.move(f"policy.megatron_cfg.{name}", (*_LAYOUT, name))
    if megatron:
        convert_nemo_rl_fp8(file, "policy.megatron_cfg", _LAYOUT)
        _router_loss(file)
        _heads(file)
        for name in ("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32"):
            file.move(f"policy.megatron_cfg.distributed_data_parallel_config.{name}", (*_LAYOUT, name))
        file.move("policy.megatron_cfg.optimizer.use_distributed_optimizer", (*_LAYOUT, "use_distributed_optimizer"))
        section = "policy.megatron_cfg"
    else:
        file.take("policy.megatron_cfg")
        section = "policy.dtensor_cfg"
        text = "DTensor's layout as Megatron's"
        for name, ours in (("tensor", "tensor_model"), ("context", "context")):
            key = f"{section}.{name}_parallel_size"
            file.move(key, (*_LAYOUT, f"{ours}_parallel_size"), meaning=text)
        file.move(f"{section}.sequence_parallel", (*_LAYOUT, "sequence_parallel"), meaning=text)
    _adapters(file, f"{section}.peft" if megatron else f"{section}.lora_cfg", megatron)
    recomputed = file.take(f"{section}.activation_checkpointing")
    if recomputed and not megatron:
        text = "whole layers are recomputed"
        key = f"{section}.activation_checkpointing"
        file.draft.put((*_LAYOUT, "recompute_granularity"), "full", key, text)
    elif not recomputed:  # NeMo-RL reads the other recomputation keys only with this one
        for name in ("recompute_granularity", "recompute_modules"):
            strategy = file.draft.values.get("actor_train", {}).get("strategy_args", {}).get("strategy_config", {})
            if strategy.pop(name, None) is not None:
                file.draft.leave_out(f"{section}.{name}", "idle", "activation_checkpointing is off")
    return sizes


def _router_loss(file: ForeignFile) -> None:
    """The load-balancing loss, whose weight is Megatron-Bridge's for the model where the file gives none."""
    layout = file.draft.values.get("actor_train", {}).get("strategy_args", {}).get("strategy_config", {})
    section = "policy.megatron_cfg"
    if layout.get("moe_router_load_balancing_type") == "aux_loss" and layout.get("moe_aux_loss_coeff") == 0:
        del layout["moe_router_load_balancing_type"]
        file.draft.leave_out(f"{section}.moe_router_load_balancing_type", "idle", "moe_aux_loss_coeff is 0")


_REPEATED_HEAD = (
    "one layer repeated by several heads cannot be trained here, so the heads are not: they stay in the engine as they "
    "are. The policy's gradients are the same, since its heads are detached (mtp_detach_heads)"
)


def _heads(file: ForeignFile) -> None:
    """Heads of multi-token prediction: their settings have no effect without them."""
    layout = file.draft.values.get("actor_train", {}).get("strategy_args", {}).get("strategy_config", {})
    number = layout.get("mtp_num_layers")
    repeated = number not in (None, 0, 1) and layout.get("mtp_use_repeated_layer") and layout.get("mtp_detach_heads")
    for key in [key for key in layout if key.startswith("mtp_")]:
        if repeated:
            del layout[key]
            file.draft.leave_out(f"policy.megatron_cfg.{key}", "refused", _REPEATED_HEAD)
        elif not number:
            del layout[key]
            file.draft.leave_out(f"policy.megatron_cfg.{key}", "idle", "there are no heads of multi-token prediction")
        elif key == "mtp_use_repeated_layer" and number == 1:
            del layout[key]
            file.draft.leave_out(f"policy.megatron_cfg.{key}", "idle", "one head has one layer")
    if layout.get("mtp_detach_heads"):
        text = "one norm clips the gradients of model and heads; NeMo-RL clips them apart"
        file.draft.meanings[(*_LAYOUT, "mtp_detach_heads")] = text


def _adapters(file: ForeignFile, section: str, megatron: bool) -> None:
    if not file.peek(f"{section}.enabled"):
        file.take(section)
        return
    file.take(f"{section}.enabled")
    if file.take(f"{section}.match_all_linear"):
        file.take(f"{section}.target_modules")
    for name in ("lora_A_init", "lora_A_init_method", "lora_B_init_method"):
        if (given := file.take(f"{section}.{name}")) not in (None, "uniform", "kaiming", "zero"):
            file.draft.leave_out(f"{section}.{name}", "idle", f"{given}: A starts uniform within 1 / sqrt(inputs)")
    for name in ("dropout_position", "use_triton", "a2a_experimental", "lora_dtype"):
        file.take(f"{section}.{name}")  # without dropout: how the same numbers are computed
    why = "adapters have no dropout: the first ratio would differ from 1"
    convert_adapters(file, section, rank="dim", alpha=("alpha", 32), shares_a=megatron, dropout=why)


def _lengths(file: ForeignFile, task: str) -> None:
    total, longest = file.take("policy.max_total_sequence_length"), file.take("data.max_input_seq_length")
    if not isinstance(total, int):
        return
    file.draft.put(("sequence_length",), total, "policy.max_total_sequence_length")
    answer = file.take("policy.generation.max_new_tokens")
    if task not in RL_TASKS:
        return
    text = "prompts and responses have a limit each; in NeMo-RL they share max_total_sequence_length"
    prompt = longest if isinstance(longest, int) and longest < total else max(1, total // 4)
    file.draft.put(("prompt_length",), prompt, "data.max_input_seq_length", text)
    if isinstance(answer, int):
        response = min(answer, total - prompt)
        file.draft.put(("response_length",), response, "policy.generation.max_new_tokens", text)


def _checkpoints(file: ForeignFile) -> None:
    file.move("checkpointing.checkpoint_dir", ("output_dir",))
    enabled = file.take("checkpointing.enabled", True)
    period = file.take("checkpointing.save_period")
    if enabled and period:
        file.draft.put(("save_steps",), period, "checkpointing.save_period")
        text = "the latest are kept; NeMo-RL keeps the best"
        file.move("checkpointing.keep_top_k", ("save_total_limit",), meaning=text)
        file.move("policy.megatron_cfg.checkpoint.async_save", ("async_save",))


def _tracker(file: ForeignFile) -> None:
    """Weights & Biases, else SwanLab: a job has one tracker beside its own files."""
    enabled = [name for name in ("wandb", "swanlab") if file.take(f"logger.{name}_enabled")]
    for name in enabled[:1]:
        file.draft.put(("track_with",), name, f"logger.{name}_enabled")
        for key in ("project", "name", "entity"):
            file.move(f"logger.{name}.{key}", ("tracker_kwargs", key))
    for name in enabled[1:]:
        file.draft.leave_out(f"logger.{name}_enabled", "refused", f"track_with names one tracker, {enabled[0]}")
    file.take("logger.wandb")
    file.expect_off("logger.mlflow_enabled", why="track_with knows wandb and swanlab; metrics.jsonl has all metrics")
