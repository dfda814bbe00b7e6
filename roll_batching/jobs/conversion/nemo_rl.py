"""NeMo-RL's files: sections of its policy, algorithm, loss and cluster under our keys.

What is read is taken out of the file's settings (`nemo_rl_given`); what remains is left out with its reason.
"""

from __future__ import annotations

import copy
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.jobs.conversion.draft import Draft
from roll_batching.jobs.conversion.framework_defaults import fill_defaults
from roll_batching.jobs.conversion.nemo_rl_batching import batching
from roll_batching.jobs.conversion.nemo_rl_data import data as texts
from roll_batching.jobs.conversion.nemo_rl_defaults import defaults_of
from roll_batching.jobs.conversion.nemo_rl_generation import devices, generation
from roll_batching.jobs.conversion.nemo_rl_given import Given
from roll_batching.jobs.conversion.nemo_rl_grpo import algorithm, check_forced_ratio, loss
from roll_batching.jobs.conversion.nemo_rl_kinds import check_kinds
from roll_batching.jobs.conversion.nemo_rl_supervised import supervised, task_of

_TRAIN = ("actor_train", "training_args")
_LAYOUT = ("actor_train", "strategy_args", "strategy_config")


def draft_of_nemo_rl(source: str, data: dict[str, Any]) -> Draft:
    """NeMo-RL's composed settings in our names. Raises ConfigError for a file without a policy to train."""
    check_kinds(data, source)
    given = Given(copy.deepcopy(data), Draft(source, framework="NeMo-RL"))
    if not isinstance(given.data.get("policy"), dict):
        raise ConfigError(f"{source} has no section `policy`")
    given.draft.defaults = fill_defaults(given.data, defaults_of(given.data))
    task = task_of(given)
    check_forced_ratio(given)
    _model(given)
    _layout(given)
    devices(given, task)
    batching(given, source, task)
    _optimizer(given, task)
    _lengths(given, task)
    if task == "grpo":
        algorithm(given)
        loss(given)
        generation(given)
    else:
        supervised(given, task)
    texts(given, task)
    _checkpoints(given)
    _tracker(given)
    given.leave_out_the_rest()
    return given.draft


def _model(given: Given) -> None:
    name = given.peek("policy.model_name")
    given.move("policy.model_name", ("pretrain",))
    tokenizer = given.take("policy.tokenizer.name")
    template = given.peek("policy.tokenizer.chat_template")
    if template not in (None, "default"):
        text = "texts go through the template in the tokenizer's folder: save this one there as chat_template.jinja"
        given.draft.leave_out("policy.tokenizer.chat_template", "refused", text)
    if tokenizer not in (None, name):
        given.draft.put(("tokenizer",), {"type": "hf", "name_or_path": tokenizer}, "policy.tokenizer.name")
    precisions = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    given.move("policy.precision", ("actor_train", "model_args", "dtype"), lambda name: precisions.get(str(name), name))


def _layout(given: Given) -> None:
    """Megatron's settings, or those of DTensor in Megatron's place; then as many devices as train."""
    megatron = bool(given.peek("policy.megatron_cfg.enabled"))
    given.take("policy.megatron_cfg.enabled")
    given.take("policy.dtensor_cfg.enabled")
    for name, value in list((given.peek("policy.megatron_cfg") or {}).items()):
        if megatron and field_at((*_LAYOUT, name)) is not None and value is not None:
            given.move(f"policy.megatron_cfg.{name}", (*_LAYOUT, name))
    if megatron:
        for name in ("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32"):
            given.move(f"policy.megatron_cfg.distributed_data_parallel_config.{name}", (*_LAYOUT, name))
        given.move("policy.megatron_cfg.optimizer.use_distributed_optimizer", (*_LAYOUT, "use_distributed_optimizer"))
        section = "policy.megatron_cfg"
    else:
        given.take("policy.megatron_cfg")
        section = "policy.dtensor_cfg"
        text = "DTensor's layout as Megatron's"
        for name, ours in (("tensor", "tensor_model"), ("context", "context")):
            key = f"{section}.{name}_parallel_size"
            given.move(key, (*_LAYOUT, f"{ours}_parallel_size"), meaning=text)
        given.move(f"{section}.sequence_parallel", (*_LAYOUT, "sequence_parallel"), meaning=text)
        given.off(f"{section}.lora_cfg", why="LoRA is not supported for now")
    recomputed = given.take(f"{section}.activation_checkpointing")
    if recomputed and not megatron:
        text = "whole layers are recomputed"
        key = f"{section}.activation_checkpointing"
        given.draft.put((*_LAYOUT, "recompute_granularity"), "full", key, text)
    elif not recomputed:  # its other keys are read with it only
        for name in ("recompute_granularity", "recompute_modules"):
            strategy = given.draft.values.get("actor_train", {}).get("strategy_args", {}).get("strategy_config", {})
            if strategy.pop(name, None) is not None:
                given.draft.leave_out(f"{section}.{name}", "idle", "activation_checkpointing is off")


def _optimizer(given: Given, task: str) -> None:
    megatron = "megatron_cfg" in given.data["policy"]
    if megatron:
        for name in ("optimizer", "scheduler"):
            if given.take(f"policy.{name}") is not None:
                text = f"DTensor's; Megatron's is policy.megatron_cfg.{name}"
                given.draft.leave_out(f"policy.{name}", "idle", text)
    names = {"lr": "learning_rate", "eps": "adam_epsilon", "adam_eps": "adam_epsilon"}
    for section in ("policy.megatron_cfg.optimizer", "policy.optimizer.kwargs"):
        betas = given.take(f"{section}.betas")
        if isinstance(betas, list) and len(betas) == 2:
            for number, beta in enumerate(betas, 1):
                given.draft.put((*_TRAIN, f"adam_beta{number}"), beta, f"{section}.betas")
        for name in ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "eps"):
            given.move(f"{section}.{name}", (*_TRAIN, names.get(name, name)))
    for key in ("policy.optimizer.name", "policy.megatron_cfg.optimizer.optimizer"):
        name = given.take(key)
        if name is not None and "adam" not in str(name).lower():
            given.draft.leave_out(key, "refused", f"{name}: parameters are trained by AdamW")
    _clipping(given, megatron)
    for name in ("bf16", "fp16", "params_dtype", "sgd_momentum", "use_precision_aware_optimizer"):
        if given.take(f"policy.megatron_cfg.optimizer.{name}") is not None:
            why = "AdamW keeps fp32 parameters and moments here (strategy_config.use_precision_aware_optimizer is "
            why += "TransformerEngine's); precision is model_args.dtype"
            given.draft.leave_out(f"policy.megatron_cfg.optimizer.{name}", "idle", why)
    scheduler = "policy.megatron_cfg.scheduler"
    constant = given.peek(f"{scheduler}.lr_decay_style", "constant") == "constant"
    given.move(f"{scheduler}.lr_decay_style", (*_TRAIN, "lr_scheduler_type"))
    given.move(f"{scheduler}.lr_warmup_iters", (*_TRAIN, "warmup_steps"))
    if constant or task != "grpo":
        why = "is constant" if constant else "ends with the job's last step"
        if given.take(f"{scheduler}.lr_decay_iters") is not None:
            key = f"{scheduler}.lr_decay_iters"
            given.draft.leave_out(key, "idle" if constant else "refused", f"the learning rate's schedule {why}")
    given.move(f"{scheduler}.lr_decay_iters", (*_TRAIN, "max_steps"))
    for name in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "lr_warmup_init"):
        if given.take(f"{scheduler}.{name}") is not None:
            given.draft.leave_out(f"{scheduler}.{name}", "idle", "weight decay is constant, warm-up begins at 0")
    _torch_schedule(given)


def _clipping(given: Given, megatron: bool) -> None:
    """The norm that gradients are clipped to: Megatron's clip_grad, or DTensor's max_grad_norm; null clips nothing."""
    keys = ["policy.megatron_cfg.optimizer.clip_grad", "policy.max_grad_norm"]
    key, other = keys if megatron else reversed(keys)
    given.take(other)
    if (norm := given.take(key, _ABSENT)) is not _ABSENT:
        given.draft.put((*_TRAIN, "max_grad_norm"), 0.0 if norm is None else norm, key)


_ABSENT = object()
_LINEAR = {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5}
"""torch's own defaults of a linear schedule."""


def _torch_schedule(given: Given) -> None:
    """The list of torch schedules: a linear one that ends at 1 is a warm-up."""
    schedules = given.take("policy.scheduler")
    for one in schedules if isinstance(schedules, list) else [schedules]:
        if not isinstance(one, dict):
            continue
        name, settings = str(one.get("name") or ""), one.get("kwargs") or {}
        linear = _LINEAR | settings
        if name.endswith("LinearLR") and linear["end_factor"] == 1.0 and isinstance(linear["total_iters"], int):
            text = f"{linear['total_iters']} steps of linear warm-up, from 0; there, from {linear['start_factor']:.4g}"
            given.draft.put((*_TRAIN, "warmup_steps"), linear["total_iters"], "policy.scheduler", text)
        elif name and not (name.endswith("ConstantLR") and settings.get("factor") == 1.0):
            given.draft.leave_out(f"policy.scheduler ({name})", "refused", "set lr_scheduler_type, min_lr, max_steps")


def _lengths(given: Given, task: str) -> None:
    whole, longest = given.take("policy.max_total_sequence_length"), given.take("data.max_input_seq_length")
    if not isinstance(whole, int):
        return
    given.draft.put(("sequence_length",), whole, "policy.max_total_sequence_length")
    answer = given.take("policy.generation.max_new_tokens")
    if task != "grpo":
        return
    text = "prompts and responses have a limit each; there, they share max_total_sequence_length"
    prompt = longest if isinstance(longest, int) and longest < whole else max(1, whole // 4)
    given.draft.put(("prompt_length",), prompt, "data.max_input_seq_length", text)
    if isinstance(answer, int):
        response = min(answer, whole - prompt)
        given.draft.put(("response_length",), response, "policy.generation.max_new_tokens", text)


def _checkpoints(given: Given) -> None:
    given.move("checkpointing.checkpoint_dir", ("output_dir",))
    enabled = given.take("checkpointing.enabled", True)
    period = given.take("checkpointing.save_period")
    if enabled and period:
        given.draft.put(("save_steps",), period, "checkpointing.save_period")
        text = "the latest are kept; there, the best"
        given.move("checkpointing.keep_top_k", ("save_total_limit",), meaning=text)
        given.move("policy.megatron_cfg.checkpoint.async_save", ("async_save",))


def _tracker(given: Given) -> None:
    """Weights & Biases, or else SwanLab: a job has one tracker beside its own files."""
    asked = [name for name in ("wandb", "swanlab") if given.take(f"logger.{name}_enabled")]
    for name in asked[:1]:
        given.draft.put(("track_with",), name, f"logger.{name}_enabled")
        for key in ("project", "name", "entity"):
            given.move(f"logger.{name}.{key}", ("tracker_kwargs", key))
    for name in asked[1:]:
        given.draft.leave_out(f"logger.{name}_enabled", "refused", f"track_with names one tracker, {asked[0]}")
    given.take("logger.wandb")
    given.off("logger.mlflow_enabled", why="track_with knows wandb and swanlab; metrics.jsonl has all metrics")
