"""Translates verl's files: sections of actor, rollout, algorithm, data and trainer to our keys.

Keys that are translated are taken out of the file's settings (`ForeignFile`). The others are left out with a reason.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.tools.conversion.adapters import convert_verl_adapters
from roll_batching.tools.conversion.context_sizes import convert_context_sizes, put_rank_cap
from roll_batching.tools.conversion.critics import share_layout
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import ForeignFile, fill_defaults
from roll_batching.tools.conversion.fp8 import complete_fp8
from roll_batching.tools.conversion.mini_batch import context_ranks, data_parallel_ranks, put_mini_batch
from roll_batching.tools.conversion.verl_command import GROUPS, PROGRAM
from roll_batching.tools.conversion.verl_critic import convert_ppo, critic_as_actor, critic_defaults, has_critic
from roll_batching.tools.conversion.verl_objective import convert_advantages, convert_dynamic_sampling, convert_loss
from roll_batching.tools.conversion.verl_optimizer import RlSteps, convert_optimizer, rl_steps_of
from roll_batching.tools.conversion.verl_options import ACTOR, ASYNC, MODEL, ROLLOUT, VERL, defaults_of
from roll_batching.tools.conversion.verl_rollouts import convert_data, convert_evaluation, convert_rollouts
from roll_batching.tools.conversion.verl_supervised import convert_supervised

_ROLE = "actor_train"
_LAYOUT = (_ROLE, "strategy_args", "strategy_config")
_PROGRAMS = (
    *("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync"),
    *("verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray"),
)
"""Programs whose settings mean what the converter reads in them."""
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def draft_of_verl(source: str, data: dict[str, Any]) -> Draft:
    """Translates composed settings of verl. Raises ConfigError for a file of another kind."""
    groups, program = data.get(GROUPS) or {}, str(data.get(PROGRAM) or "")
    supervised = "sft_trainer" in program or ("actor_rollout_ref" not in data and "optim" in data)
    VERL.check_types(data, source)
    if not supervised and not isinstance(data.get("actor_rollout_ref"), dict):
        raise ConfigError(f"{source} has neither a section `actor_rollout_ref` (RL) nor `optim` (SFT) of verl")
    file = ForeignFile(VERL, _without_targets(copy.deepcopy(data)), Draft(source, framework="verl"))
    file.take(GROUPS), file.take(PROGRAM)
    file.data.setdefault("trainer", {})
    engine = _engine(file, groups, supervised)
    file.draft.defaults = fill_defaults(file.data, defaults_of(supervised, engine == "megatron"))
    if program and program.removesuffix(".py").strip("./").replace("/", ".") not in _PROGRAMS:
        own = "verl.trainer.sft_trainer" if supervised else "verl.trainer.main_ppo"
        text = f"is another program: settings are read as those of {own}, and what else it does is not converted"
        file.draft.leave_out(program, "refused", text)
    section = "engine" if supervised else f"{ACTOR}.{engine}"
    devices = _devices(file)
    model = "model" if supervised else MODEL
    file.move(f"{model}.path", ("pretrain",))
    if (tokenizer := file.take(f"{model}.tokenizer_path")) is not None:
        file.put(("tokenizer",), {"type": "hf", "name_or_path": tokenizer}, f"{model}.tokenizer_path")
    convert_verl_adapters(file, model)
    _layout(file, section, model, engine)
    if supervised:
        steps = RlSteps(total=file.peek("trainer.total_training_steps"))  # of one optimizer step each
        convert_optimizer(file, "optim", engine == "megatron", steps)
        convert_supervised(file, devices)
    else:
        critic = _critic(file, devices, engine) if file.peek("algorithm.adv_estimator") == "gae" else None
        convert_optimizer(file, f"{ACTOR}.optim", engine == "megatron", rl_steps_of(file))
        _batching(file, devices)
        convert_data(file)
        convert_rollouts(file, devices)
        convert_advantages(file)
        convert_dynamic_sampling(file)
        if critic is not None:
            convert_ppo(file, critic, engine == "megatron")
        convert_loss(file)
        convert_evaluation(file)
        _length(file)
    complete_fp8(file.draft, recipe="delayed")  # Megatron's default
    _trainer(file)
    file.expect_off("distillation.enabled", why="distillation is not supported for now")
    _switched_off(file, model)
    file.leave_out_rest()
    return file.draft


def _devices(file: ForeignFile) -> int:
    """Devices of all machines, by which batches are divided."""
    nodes, each = file.take("trainer.nnodes"), file.take("trainer.n_gpus_per_node")
    devices = int((nodes or 1) * (each or 8))
    file.put((_ROLE, "device_mapping"), f"list(range(0,{devices}))", "trainer.n_gpus_per_node")
    if not nodes or not each:
        text = f"the file does not tell the number of devices, and {devices} are assumed; for another number set it,"
        what = "and divide gradient_accumulation_steps accordingly: an optimizer step keeps its sequences"
        file.draft.missing.append(f"actor_train.device_mapping: {text} {what}")
    return devices


def _critic(file: ForeignFile, devices: int, engine: str) -> ForeignFile | None:
    """The critic of adv_estimator: gae, translated as an actor that has the actor's devices and parallel sizes."""
    if not has_critic(file.data):
        file.draft.leave_out("critic.enable", "refused", "is false, but algorithm.adv_estimator: gae needs a critic")
        return None
    file.draft.defaults |= fill_defaults(file.data, critic_defaults(file))
    below = critic_as_actor(file)
    file.take("critic")
    added = {key: value for key, value in defaults_of(False, engine == "megatron").items() if _is_engine(key)}
    below.draft.defaults = fill_defaults(below.data, added)
    below.move(f"{MODEL}.path", ("pretrain",))
    _layout(below, f"{ACTOR}.{engine}", MODEL, engine)
    share_layout(file.draft, below.draft)
    convert_optimizer(below, f"{ACTOR}.optim", engine == "megatron", rl_steps_of(file, below))
    _batching(below, devices)
    _switched_off(below, MODEL)
    return below


def _is_engine(key: str) -> bool:
    """Whether a default is one of the engine, the same for the actor and the critic."""
    return key != f"{ACTOR}.optim.lr" and key.startswith((f"{ACTOR}.optim.", f"{ACTOR}.megatron.", f"{MODEL}."))


def _switched_off(file: ForeignFile, model: str) -> None:
    """Takes settings of LoRA and router replay where both are off, and numbers of samples that mean all."""
    if not file.peek(f"{model}.lora_rank") and not file.peek(f"{model}.lora.rank"):
        for name in ("lora", "lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            file.take(f"{model}.{name}")
    for section in (f"{ACTOR}.router_replay", f"{ACTOR}.megatron.router_replay", "engine.router_replay"):
        if (mode := file.take(f"{section}.mode")) == "disabled":
            file.take(section)
        elif section != "engine.router_replay":
            file.put((_ROLE, "router_replay", "mode"), mode, f"{section}.mode")
        if mode == "R3":
            file.take(f"{ROLLOUT}.enable_rollout_routing_replay")  # the mode implies it here
    for section in ("optim", f"{ACTOR}.optim"):
        _cosine(file, section)
    for key in ("data.train_max_samples", "data.val_max_samples"):
        if file.peek(key) == -1:
            file.take(key)


def _cosine(file: ForeignFile, section: str) -> None:
    """Cycles of a cosine, and the first step of a schedule: Megatron's has half a cycle, and begins at 0."""
    cycles = file.take(f"{section}.num_cycles")
    shape = file.draft.values.get(_ROLE, {}).get("training_args", {}).get("lr_scheduler_type")
    if cycles is not None and shape != "cosine":
        file.draft.leave_out(f"{section}.num_cycles", "idle", "the schedule is no cosine")
    elif cycles not in (None, 0.5):
        text = f"{cycles}: Megatron's cosine falls once (0.5 cycles) and does not rise again; 0.5 trains here"
        file.draft.leave_out(f"{section}.num_cycles", "refused", text)
    if file.take(f"{section}.zero_indexed_step") is False:
        text = "false: warm-up begins at 0 in the first step here, as with true"
        file.draft.leave_out(f"{section}.zero_indexed_step", "refused", text)


def _without_targets(value: Any) -> Any:
    """`value` without `_target_`, the name of verl's class, in any section."""
    if isinstance(value, dict):
        return {key: _without_targets(below) for key, below in value.items() if key != "_target_"}
    return value


def _engine(file: ForeignFile, groups: dict[str, Any], supervised: bool) -> str:
    """The section of the engine's settings in the actor: megatron, fsdp_config, or another engine's."""
    chosen = groups.get("engine" if supervised else "model_engine")
    strategy = file.take("engine.strategy") if supervised else file.take(f"{ACTOR}.strategy")
    for name in (file.take("model_engine"), chosen, strategy):
        if name is None:
            continue
        if name == "megatron":
            return "megatron"
        if name not in ("fsdp", "fsdp2", "dp"):
            text = f"{name}: only verl's Megatron and FSDP engines are converted; Megatron-Core trains here"
            file.draft.leave_out("model_engine", "refused", text)
        return "fsdp_config"
    found = file.peek("engine.tensor_model_parallel_size") if supervised else file.peek(f"{ACTOR}.megatron")
    return "megatron" if found is not None else "fsdp_config"


def _layout(file: ForeignFile, section: str, model: str, engine: str) -> None:
    recomputed = file.take(f"{model}.enable_gradient_checkpointing")
    dtype = file.take(f"{section}.dtype") or "bfloat16"
    file.put((_ROLE, "model_args", "dtype"), _PRECISIONS.get(str(dtype), dtype), f"{section}.dtype")
    file.draft.defaults.add(f"{section}.dtype")
    if engine != "megatron":
        text = "verl's FSDP engine as Megatron-Core, with the same mini-batches"
        for key in (f"{section}.ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"):
            if (size := file.take(key)) not in (None, 1):
                file.put((*_LAYOUT, "context_parallel_size"), size, key, "Ulysses' ranks as context-parallel ranks")
        file.draft.put((*_LAYOUT, "use_distributed_optimizer"), True, f"{section}.fsdp_size", text)
        if recomputed:
            key = f"{model}.enable_gradient_checkpointing"
            file.put((*_LAYOUT, "recompute_granularity"), "full", key, "whole layers are recomputed")
        return
    parallel = file.take(f"{section}.sequence_parallel")
    if file.peek(f"{section}.tensor_model_parallel_size") not in (None, 1):
        file.put((*_LAYOUT, "sequence_parallel"), parallel, f"{section}.sequence_parallel")
    elif parallel:
        file.draft.leave_out(f"{section}.sequence_parallel", "idle", "the tensor-parallel size is 1")
    sizes = convert_context_sizes(file, lambda name: f"{section}.{name}")
    if sizes is not None:
        cap_key = "data.max_token_len_per_gpu" if section == "engine" else f"{ACTOR}.ppo_max_token_len_per_gpu"
        put_rank_cap(file, sizes, file.take(cap_key), cap_key)
    if frozen := file.take(key := f"{model}.override_config.moe_config.freeze_moe_router"):
        file.put((*_LAYOUT, "freeze_moe_router"), frozen, key, "verl freezes the gates of shared experts, too")
    _heads(file, f"{model}.mtp")
    granularity = file.peek(f"{section}.override_transformer_config.recompute_granularity")
    for below in (section, f"{section}.override_transformer_config", f"{section}.override_ddp_config"):
        for name, value in list((file.peek(below) or {}).items()):
            if name == "attention_backend" or name == "use_precision_aware_optimizer":
                continue
            if name.startswith("recompute_") and (
                granularity is None or (name == "recompute_modules" and granularity == "full")
            ):
                file.take(f"{below}.{name}")
            elif value is not None and field_at((*_LAYOUT, name)) is not None:
                file.move(f"{below}.{name}", (*_LAYOUT, name))


def _heads(file: ForeignFile, section: str) -> None:
    """Heads of multi-token prediction, as many as the model has: one, in all families with heads here."""
    if not (file.peek(f"{section}.enable") and file.peek(f"{section}.enable_train")):
        return
    for name in ("enable", "method"):
        file.take(f"{section}.{name}")
    key = f"{section}.enable_train"
    file.put((*_LAYOUT, "mtp_num_layers"), int(bool(file.take(key))), key, "one head, as such models have")
    file.put((*_LAYOUT, "mtp_detach_heads"), bool(file.take(f"{section}.detach_encoder")), f"{section}.detach_encoder")
    file.move(f"{section}.mtp_loss_scaling_factor", (*_LAYOUT, "mtp_loss_scaling_factor"))


def _batching(file: ForeignFile, devices: int) -> None:
    """Mini-batches, micro-batches and caps. verl counts a mini-batch in prompts, a cap in tokens per device."""
    layout = file.draft.values[_ROLE].get("strategy_args", {}).get("strategy_config", {})
    context = context_ranks(layout)
    rows_key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    rows, older = file.take(rows_key), file.take(f"{ACTOR}.ppo_micro_batch_size")
    if older is not None:
        file.draft.leave_out(f"{ACTOR}.ppo_micro_batch_size", "refused", f"set {rows_key}, as verl asks for, too")
    packed, cap_key = file.take(f"{ACTOR}.use_dynamic_bsz"), f"{ACTOR}.ppo_max_token_len_per_gpu"
    cap = file.take(cap_key)
    forward_key = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
    forward, forward_rows = file.take(forward_key), file.take(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu")
    text = "the tokens of a pack on all context-parallel ranks together" if context > 1 else ""
    if packed:
        if rows is not None:
            file.draft.leave_out(rows_key, "idle", "packs have no fixed number of rows")
        rows, rows_key = 1, f"{ACTOR}.use_dynamic_bsz"
        args = (_ROLE, "sequence_packing_args")
        file.put((_ROLE, "use_sequence_packing"), True, f"{ACTOR}.use_dynamic_bsz")
        if cap is not None:
            meaning = "; ".join(part for part in ("a hard cap of every pack", text) if part)
            file.put((*args, "max_packed_sequence_length_train"), cap * context, cap_key, meaning)
        if forward is not None and forward != cap:
            file.put((*args, "max_packed_sequence_length_forward"), forward * context, forward_key, text)
    else:
        if rows is None:
            file.draft.defaults.add(rows_key)
            file.draft.missing.append(
                f"actor_train.training_args.per_device_train_batch_size: verl asks for {rows_key}"
            )
        rows = rows or 1
        meaning = "micro-batches of this many rows, padded to their longest; verl removes the padding"
        file.put((_ROLE, "padded_length"), "longest", rows_key, meaning)
        file.put((_ROLE, "infer_batch_size"), forward_rows, f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu")
        file.draft.leave_out(cap_key, "idle", "use_dynamic_bsz is off")
    prompts, group = file.take(f"{ACTOR}.ppo_mini_batch_size"), file.take(f"{ROLLOUT}.n") or 1
    if prompts is not None:
        size = prompts * group
        put_mini_batch(
            file.draft, (size, f"{ACTOR}.ppo_mini_batch_size"), (rows, rows_key), data_parallel_ranks(layout, devices)
        )
    file.move("data.train_batch_size", ("rollout_batch_size",))
    file.put(("num_return_sequences_in_group",), group, f"{ROLLOUT}.n")
    file.move(f"{ACTOR}.ppo_epochs", ("ppo_epochs",))


def _length(file: ForeignFile) -> None:
    if (mode := file.take("trainer.v1.trainer_mode")) not in (None, "sync"):
        file.draft.leave_out("trainer.v1.trainer_mode", "refused", f"{mode}: {ASYNC}")
    steps, epochs = file.take("trainer.total_training_steps"), file.take("trainer.total_epochs")
    if steps is not None:
        file.put(("max_steps",), steps, "trainer.total_training_steps")
        file.draft.leave_out("trainer.total_epochs", "idle", "total_training_steps is the length of the job")
    else:
        text = f"max_steps: is missing: prompts of the files / data.train_batch_size x {epochs} epochs, rounded down"
        file.draft.missing.append(text)
        file.draft.leave_out("trainer.total_epochs", "refused", f"{epochs}: max_steps counts RL steps")


def _trainer(file: ForeignFile) -> None:
    project, name = file.take("trainer.project_name"), file.take("trainer.experiment_name")
    loggers = file.take("trainer.logger")
    loggers = [loggers] if isinstance(loggers, str) else loggers or []
    tracker = next((one for one in ("wandb", "swanlab") if one in loggers), None)
    if tracker is not None:
        file.put(("track_with",), tracker, "trainer.logger")
        file.put(("tracker_kwargs", "project"), project, "trainer.project_name")
    for one in loggers:
        if one not in (tracker, "console", "tensorboard", "file"):
            file.draft.leave_out(f"trainer.logger ({one})", "refused", "track_with knows wandb and swanlab")
    file.put(("exp_name",), name if name is None else str(name).replace("/", "_"), "trainer.experiment_name")
    folder = file.take("trainer.default_local_dir")
    if folder is None and project is not None:
        folder = f"checkpoints/{project}"
        file.draft.defaults.add("trainer.default_local_dir")
    elif isinstance(folder, str) and name is not None and Path(folder).name == str(name):
        folder = str(Path(folder).parent)  # exp_name is the folder below output_dir
    file.put(("output_dir",), folder, "trainer.default_local_dir")
    period = file.take("trainer.save_freq")
    file.put(("save_steps",), max(0, period) if isinstance(period, int) else period, "trainer.save_freq")
    key = "trainer.max_actor_ckpt_to_keep"
    file.put(("save_total_limit",), file.take(key) or file.take("trainer.max_ckpt_to_keep"), key)
    file.move(f"{ACTOR}.checkpoint.async_save", ("async_save",))
