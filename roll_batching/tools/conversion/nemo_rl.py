"""Translates NeMo-RL's files: sections of policy, algorithm, loss, data and cluster to our keys.

Keys that are translated are taken out of the file's settings (`nemo_rl_file`). The others are left out with a reason.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.foreign_keys import FOREIGN_KEYS
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.settings.megatron_config import MegatronConfig
from roll_batching.tools.conversion.critics import Critic, share_layout
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import LAYOUT, PACKING, ForeignFile, Given, section_at
from roll_batching.tools.conversion.foreign_job import ForeignJob, Lengths, write_job
from roll_batching.tools.conversion.layouts import (
    ContextSizes,
    convert_adapters,
    convert_context_sizes,
    convert_nemo_rl_fp8,
    put_rank_cap,
)
from roll_batching.tools.conversion.nemo_rl_batching import read_batch, read_schedule, steps_of_a_rollout
from roll_batching.tools.conversion.nemo_rl_data import convert_data
from roll_batching.tools.conversion.nemo_rl_file import NEMO_RL, RL_TASKS, check_types, defaults_of
from roll_batching.tools.conversion.nemo_rl_generation import convert_generation, read_devices
from roll_batching.tools.conversion.nemo_rl_objective import (
    check_forced_ratio,
    convert_ppo,
    put_advantages,
    put_loss,
    read_dynamic_sampling,
    read_evaluation,
    read_kl,
    read_ppo_as_grpo,
    read_value_model,
    restore_names,
    value_as_policy,
)
from roll_batching.tools.conversion.nemo_rl_tasks import (
    convert_distillation,
    convert_supervised,
    read_texts_evaluation,
    task_of,
)


def draft_of_nemo_rl(source: str, data: dict[str, Any]) -> Draft:
    """Translates composed settings of NeMo-RL. Raises ConfigError for a file without a policy."""
    check_types(data, source)
    file = ForeignFile(NEMO_RL, copy.deepcopy(data), Draft(source, framework="NeMo-RL"))
    if not isinstance(file.data.get("policy"), dict):
        raise ConfigError(f"{source} has no section `policy`: name a job file of NeMo-RL")
    file.fill_defaults(defaults_of(file.data))
    has_critic = read_ppo_as_grpo(file)
    task = task_of(file)
    check_forced_ratio(file)
    _model(file)
    sizes = _layout(file)
    steps = steps_of_a_rollout(file, "distillation" if task == "distill" else "grpo") if task in RL_TASKS else 1
    devices = read_devices(file, task)
    batch = read_batch(file, source, task, devices.training.value)
    file.move_all("model")
    if sizes is not None:
        _caps_of_ranks(file, sizes)
    schedule = read_schedule(file, task, steps)
    critic = _critic(file, source, devices.training.value) if has_critic else None
    job = ForeignJob(devices=devices, batch=batch, schedule=schedule, lengths=_lengths(file, task), critic=critic)
    if task == "grpo":
        put_advantages(file)
        sampling, kl = read_dynamic_sampling(file), tuple(read_kl(file))
        evaluation, clipping = read_evaluation(file, "grpo"), put_loss(file)
        job = replace(job, sampling=sampling, kl=kl, evaluation=evaluation, clipping=clipping)
        file.check_all("grpo")
        if critic is not None:
            convert_ppo(file)
    elif task == "distill":
        convert_distillation(file)
        job = replace(job, evaluation=read_evaluation(file, "distillation"))
    else:
        convert_supervised(file, task)
        job = replace(job, task=Given(task, task), evaluation=read_texts_evaluation(file, task))
    write_job(job, file.draft)
    convert_data(file, task)
    if task in RL_TASKS:
        convert_generation(file)
    _checkpoints(file)
    _tracker(file)
    file.leave_out_rest()
    if has_critic:
        restore_names(file.draft)
    return file.draft


def _critic(file: ForeignFile, source: str, devices: int) -> Critic:
    """PPO's value model as the role `critic`: its settings are those of a policy, in another section."""
    below = value_as_policy(file)
    below.fill_defaults(defaults_of(below.data))
    megatron = bool(below.peek("policy.megatron_cfg.enabled"))
    _model(below)
    if _layout(below) is not None:
        why = "packs of the critic have no context-parallel sizes of their own"
        below.draft.leave_out("policy.megatron_cfg.dynamic_context_parallel", "refused", why)
    share_layout(file.draft, below.draft)
    steps = steps_of_a_rollout(file, "grpo", below.peek("policy.train_global_batch_size", 0))
    batch = read_batch(below, source, "value", devices)
    below.move_all("model")
    write_job(ForeignJob(batch=batch, schedule=read_schedule(below, "value", steps, file)), below.draft)
    below.leave_out_rest()
    return read_value_model(file, below, megatron)


def _model(file: ForeignFile) -> None:
    name, tokenizer = file.peek("policy.model_name"), file.take("policy.tokenizer.name")
    template = file.peek("policy.tokenizer.chat_template")
    if template not in (None, "default"):
        why = "texts go through the template in the tokenizer's folder: save this one there as chat_template.jinja"
        file.draft.leave_out("policy.tokenizer.chat_template", "refused", why)
    if tokenizer not in (None, name):
        file.draft.put(("tokenizer",), {"type": "hf", "name_or_path": tokenizer}, "policy.tokenizer.name")
    if file.take("policy.router_replay.enabled"):
        file.draft.put(("actor_train", "router_replay", "mode"), "R3", "policy.router_replay.enabled")
    precisions = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    file.move("policy.precision", ("actor_train", "model_args", "dtype"), lambda name: precisions.get(str(name), name))


def _caps_of_ranks(file: ForeignFile, sizes: ContextSizes) -> None:
    """Divides the file's caps of whole packs by its context-parallel size, because `auto` counts tokens of a rank."""
    packing, key = file.draft.values["actor_train"].get("sequence_packing_args"), "policy.sequence_packing"
    if packing is None:
        return
    meaning = "packs with their own context-parallel sizes are planned by it"
    file.draft.put((*PACKING, "algorithm"), "load_balance", f"{key}.algorithm", meaning)
    put_rank_cap(file, sizes, packing["max_packed_sequence_length_train"] // sizes.size, f"{key}.train_mb_tokens")
    forward = packing["max_packed_sequence_length_forward"] // sizes.size
    meaning = "the tokens of a pack on one rank"
    file.draft.put((*PACKING, "max_packed_sequence_length_forward"), forward, f"{key}.logprob_mb_tokens", meaning)


def _layout(file: ForeignFile) -> ContextSizes | None:
    """Converts parallel sizes and recomputation of Megatron or DTensor. Returns the context-parallel sizes per pack.

    None: all packs have the same size.
    """
    megatron = bool(file.peek("policy.megatron_cfg.enabled"))
    file.take("policy.megatron_cfg.enabled")
    file.take("policy.dtensor_cfg.enabled")
    sizes = convert_context_sizes(file, lambda name: f"policy.megatron_cfg.{name}") if megatron else None
    for name, value in list((file.peek("policy.megatron_cfg") or {}).items()):
        known = field_at((*LAYOUT, name)) is not None or name in FOREIGN_KEYS[MegatronConfig]
        if megatron and known and value is not None:
            file.move(f"policy.megatron_cfg.{name}", (*LAYOUT, name))
    if megatron:
        convert_nemo_rl_fp8(file, "policy.megatron_cfg", LAYOUT)
        _router_loss(file)
        _heads(file)
        file.move_all("megatron")
        section = "policy.megatron_cfg"
    else:
        file.take("policy.megatron_cfg")
        section = "policy.dtensor_cfg"
        file.move_all("dtensor", section)
    _adapters(file, f"{section}.peft" if megatron else f"{section}.lora_cfg", megatron)
    recomputed = file.take(f"{section}.activation_checkpointing")
    if recomputed and not megatron:
        meaning = "whole layers are recomputed"
        key = f"{section}.activation_checkpointing"
        file.draft.put((*LAYOUT, "recompute_granularity"), "full", key, meaning)
    elif not recomputed:  # NeMo-RL reads the other recomputation keys only with this one
        for name in ("recompute_granularity", "recompute_modules"):
            strategy = section_at(file.draft.values, *LAYOUT)
            if strategy.pop(name, None) is not None:
                file.draft.leave_out(f"{section}.{name}", "idle", "activation_checkpointing is off")
    return sizes


def _router_loss(file: ForeignFile) -> None:
    """Leaves out the type of the load-balancing loss if its weight is 0."""
    layout = section_at(file.draft.values, *LAYOUT)
    section = "policy.megatron_cfg"
    if layout.get("moe_router_load_balancing_type") == "aux_loss" and layout.get("moe_aux_loss_coeff") == 0:
        del layout["moe_router_load_balancing_type"]
        file.draft.leave_out(f"{section}.moe_router_load_balancing_type", "idle", "moe_aux_loss_coeff is 0")


_REPEATED_HEAD = (
    "one layer repeated by several heads cannot be trained here, so the heads are not: they stay in the engine as they "
    "are. The policy's gradients are the same, since its heads are detached (mtp_detach_heads)"
)


def _heads(file: ForeignFile) -> None:
    """Leaves out settings of multi-token prediction that have no effect, and heads that share one layer."""
    layout = section_at(file.draft.values, *LAYOUT)
    number = layout.get("mtp_num_layers")
    is_repeated = number not in (None, 0, 1) and layout.get("mtp_use_repeated_layer") and layout.get("mtp_detach_heads")
    for key in [key for key in layout if key.startswith("mtp_")]:
        if is_repeated:
            del layout[key]
            file.draft.leave_out(f"policy.megatron_cfg.{key}", "refused", _REPEATED_HEAD)
        elif not number:
            del layout[key]
            file.draft.leave_out(f"policy.megatron_cfg.{key}", "idle", "there are no heads of multi-token prediction")
        elif key == "mtp_use_repeated_layer" and number == 1:
            del layout[key]
            file.draft.leave_out(f"policy.megatron_cfg.{key}", "idle", "one head has one layer")
    if layout.get("mtp_detach_heads"):
        why = "one norm clips the gradients of model and heads; NeMo-RL clips them apart"
        file.draft.meanings[(*LAYOUT, "mtp_detach_heads")] = why


def _adapters(file: ForeignFile, section: str, megatron: bool) -> None:
    if not file.peek(f"{section}.enabled"):
        file.take(section)
        return
    file.take(f"{section}.enabled")
    if file.take(f"{section}.match_all_linear"):
        file.take(f"{section}.target_modules")
    for name in ("lora_A_init", "lora_A_init_method", "lora_B_init_method"):
        if (start := file.take(f"{section}.{name}")) not in (None, "uniform", "kaiming", "zero"):
            file.draft.leave_out(f"{section}.{name}", "idle", f"{start}: A starts uniform within 1 / sqrt(inputs)")
    for name in ("dropout_position", "use_triton", "a2a_experimental", "lora_dtype"):
        file.take(f"{section}.{name}")  # without dropout: how the same numbers are computed
    why = "adapters have no dropout: the first ratio would differ from 1"
    convert_adapters(file, section, rank="dim", alpha=("alpha", 32), shares_a=megatron, dropout=why)


def _lengths(file: ForeignFile, task: str) -> Lengths:
    """Reads the limit of a whole sequence; in RL divides it into limits of prompt and response."""
    whole, longest = file.given("policy.max_total_sequence_length"), file.take("data.max_input_seq_length")
    if whole is None or not isinstance(whole.value, int):
        return Lengths()
    answer = file.given("policy.generation.max_new_tokens")
    if task not in RL_TASKS:
        return Lengths(whole)
    meaning = "prompts and responses have a limit each; in NeMo-RL they share max_total_sequence_length"
    # Without a limit of prompts that leaves room for a response, prompts get a quarter.
    prompt = longest if isinstance(longest, int) and longest < whole.value else max(1, whole.value // 4)
    response = None
    if answer is not None and isinstance(answer.value, int):
        response = Given(min(answer.value, whole.value - prompt), answer.key, meaning)
    drops = "longer prompts are left out; in NeMo-RL they stay in the batch without loss"
    prompts = Given(prompt, "data.max_input_seq_length", meaning)
    return Lengths(whole, prompts, response, Given("drop", "data.max_input_seq_length", drops))


def _checkpoints(file: ForeignFile) -> None:
    enabled = file.take("checkpointing.enabled", True)
    period = file.take("checkpointing.save_period")
    if enabled and period:
        file.draft.put(("save_steps",), period, "checkpointing.save_period")
        meaning = "the latest are kept; NeMo-RL keeps the best"
        file.move("checkpointing.keep_top_k", ("save_total_limit",), meaning=meaning)
        file.move("policy.megatron_cfg.checkpoint.async_save", ("async_save",))


def _tracker(file: ForeignFile) -> None:
    """Converts the tracker: the first that is enabled. A job has one tracker besides its own files."""
    enabled = [name for name in ("wandb", "swanlab", "mlflow") if file.take(f"logger.{name}_enabled")]
    for name in enabled[:1]:
        file.draft.put(("track_with",), name, f"logger.{name}_enabled")
        mlflow = ("experiment_name", "run_name", "run_id", "tracking_uri")
        for key in mlflow if name == "mlflow" else ("project", "name", "entity"):
            file.move(f"logger.{name}.{key}", ("tracker_kwargs", key))
    for name in enabled[1:]:
        file.draft.leave_out(f"logger.{name}_enabled", "refused", f"track_with names one tracker, {enabled[0]}")
    file.take("logger.wandb")
