"""Translates verl's files: sections of actor, critic, rollout, algorithm, data and trainer to our keys."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from roll_batching.errors import ConfigError
from roll_batching.jobs.config.job_keys import TRACKERS
from roll_batching.jobs.config.key_paths import field_at
from roll_batching.tools.conversion.critics import Critic, share_layout
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import LAYOUT, ROLE, ForeignFile, Given
from roll_batching.tools.conversion.foreign_job import Batch, Devices, Evaluation, ForeignJob, Heads, write_job
from roll_batching.tools.conversion.layouts import (
    complete_fp8,
    convert_context_sizes,
    convert_verl_adapters,
    put_rank_cap,
)
from roll_batching.tools.conversion.precision import convert_verl_precision
from roll_batching.tools.conversion.verl_command import GROUPS, PROGRAM
from roll_batching.tools.conversion.verl_file import (
    ACTOR,
    MODEL,
    ROLLOUT,
    VERL,
    critic_as_actor,
    critic_defaults,
    critic_name,
    defaults_of,
    has_critic,
)
from roll_batching.tools.conversion.verl_objective import (
    RlSteps,
    put_advantages,
    put_loss,
    read_dynamic_sampling,
    read_kl,
    read_schedule,
    rl_steps_of,
)
from roll_batching.tools.conversion.verl_rollouts import (
    convert_chat_template,
    convert_data,
    convert_engine,
    read_evaluation,
)

_PROGRAMS = (
    *("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync"),
    *("verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray"),
)
"""Programs of verl whose settings the converter knows; another program may read them differently."""


def draft_of_verl(source: str, data: dict[str, Any]) -> Draft:
    """Converts composed settings of verl. Raises ConfigError for a file of another kind."""
    groups, program = data.get(GROUPS) or {}, str(data.get(PROGRAM) or "")
    supervised = "sft_trainer" in program or ("actor_rollout_ref" not in data and "optim" in data)
    VERL.check_types(data, source, "sft_sections" if supervised else "sections")
    if not supervised and not isinstance(data.get("actor_rollout_ref"), dict):
        raise ConfigError(f"{source} has neither a section `actor_rollout_ref` (RL) nor `optim` (SFT) of verl")
    file = ForeignFile(VERL, _without_targets(copy.deepcopy(data)), Draft(source, framework="verl"))
    file.take(GROUPS), file.take(PROGRAM)
    file.data.setdefault("trainer", {})
    engine = _engine(file, groups, supervised)
    file.fill_defaults(defaults_of(supervised, engine == "megatron"))
    if program and program.removesuffix(".py").strip("./").replace("/", ".") not in _PROGRAMS:
        known = "verl.trainer.sft_trainer" if supervised else "verl.trainer.main_ppo"
        why = f"is another program: settings are read as those of {known}, and what else it does is not converted"
        file.draft.leave_out(program, "refused", why)
    _convert_supervised(file, engine) if supervised else _convert_rl(file, engine)
    complete_fp8(file.draft, recipe="delayed")  # Megatron's default
    _trainer(file)
    _switched_off(file, "model" if supervised else MODEL)
    file.leave_out_rest()
    return file.draft


def _convert_rl(file: ForeignFile, engine: str) -> None:
    """Converts an RL job of verl. `engine`: section of the actor's engine settings."""
    number, machines = _devices(file)
    _model(file, MODEL)
    _layout(file, f"{ACTOR}.{engine}", MODEL, engine)
    steps = rl_steps_of(file)
    critic = _critic(file, number.value, engine) if file.peek("algorithm.adv_estimator") == "gae" else None
    schedule = read_schedule(file, f"{ACTOR}.optim", engine == "megatron", steps)
    batch = _batch(file, number.value)
    file.move_all("rl")
    file.check_all("rl")
    convert_data(file)
    has_servers = convert_engine(file)
    sleeps = f"{ROLLOUT}.free_cache_engine" if has_servers else ""
    job = ForeignJob(
        devices=Devices(number, sleeps=sleeps, machines=machines if has_servers else 1),
        batch=batch,
        schedule=schedule,
        kl=(*put_advantages(file), *read_kl(file)),
        clipping=put_loss(file),
        sampling=read_dynamic_sampling(file),
        evaluation=read_evaluation(file),
        critic=critic,
    )
    write_job(job, file.draft)
    length, epochs = file.given("trainer.total_training_steps"), file.take("trainer.total_epochs")
    if length is not None:
        file.put(("max_steps",), length.value, length.key)
        file.draft.leave_out("trainer.total_epochs", "idle", "total_training_steps is the length of the job")
    else:
        lack = f"max_steps: is missing: prompts of the files / data.train_batch_size x {epochs} epochs, rounded down"
        file.draft.missing.append(lack)
        file.draft.leave_out("trainer.total_epochs", "refused", f"{epochs}: max_steps counts RL steps")


def _convert_supervised(file: ForeignFile, engine: str) -> None:
    """Converts a job of verl's SFT trainer to `task: sft`."""
    devices, _ = _devices(file)
    _model(file, "model")
    _layout(file, "engine", "model", engine)
    rows, packs = "data.micro_batch_size_per_gpu", "data.use_dynamic_bsz"
    batch = Batch(
        devices.value,
        Given(file.take("data.train_batch_size"), "data.train_batch_size"),
        rows=file.given(rows) or Given(None, rows),
        packs=file.given(packs) or Given(False, packs),
        cap=file.given("data.max_token_len_per_gpu"),
    )
    length, epochs = file.given("trainer.total_training_steps"), file.given("trainer.total_epochs")
    steps = RlSteps(total=None if length is None else length.value)  # of one optimizer step each
    file.move_all("sft")
    file.check_all("sft")
    convert_chat_template(file, supervised=True)
    if length is not None:
        file.put(("max_steps",), length.value, length.key)
    elif epochs is not None:
        file.put(("num_train_epochs",), epochs.value, epochs.key)
    period = file.take("trainer.test_freq")
    job = ForeignJob(
        task=Given("sft", "verl.trainer.sft_trainer"),
        devices=Devices(devices),
        batch=batch,
        schedule=read_schedule(file, "optim", engine == "megatron", steps),
        evaluation=Evaluation(Given(period, "trainer.test_freq"), is_on=isinstance(period, int) and period > 0),
    )
    write_job(job, file.draft)


def _devices(file: ForeignFile) -> tuple[Given, int]:
    """(Devices of all machines, number of machines). Lists the devices as missing if the file has no number."""
    nodes, each = file.take("trainer.nnodes"), file.take("trainer.n_gpus_per_node")
    devices = int((nodes or 1) * (each or 8))
    if not nodes or not each:
        lack = f"the file does not tell the number of devices, and {devices} are assumed; for another number set it,"
        cure = "and divide gradient_accumulation_steps accordingly: an optimizer step keeps its sequences"
        file.draft.missing.append(f"actor_train.device_mapping: {lack} {cure}")
    return Given(devices, "trainer.n_gpus_per_node"), int(nodes or 1)


def _critic(file: ForeignFile, devices: int, engine: str) -> Critic | None:
    """Returns the critic of `adv_estimator: gae`, converted as an actor; None if the file has none."""
    if not has_critic(file.data):
        file.draft.leave_out("critic.enable", "refused", "is false, but algorithm.adv_estimator: gae needs a critic")
        return None
    megatron = engine == "megatron"
    file.fill_defaults(critic_defaults(file))
    below = critic_as_actor(file, megatron)
    steps = rl_steps_of(file, below)
    clip, aggregation = below.take(f"{ACTOR}.cliprange_value"), below.take(f"{ACTOR}.loss_agg_mode")
    if aggregation != file.peek(f"{ACTOR}.loss_agg_mode"):
        why = f"{aggregation}: the actor's loss_agg_mode holds for both losses"
        file.draft.leave_out("critic.loss_agg_mode", "refused", why)
    _layout(below, f"{ACTOR}.{engine}", MODEL, engine)
    share_layout(file.draft, below.draft)
    schedule = read_schedule(below, f"{ACTOR}.optim", megatron, steps)
    write_job(ForeignJob(batch=_batch(below, devices), schedule=schedule), below.draft)
    below.move_all("rl")
    _switched_off(below, MODEL)
    below.take(f"{ACTOR}.enable")
    below.take(f"{MODEL}.tokenizer_path")
    below.leave_out_rest()
    file.put(("whiten_advantages",), True, "algorithm.adv_estimator", "verl's gae always whitens advantages")
    # `first`: number of the first RL step that trains the policy, from 1; `warmup`: the steps before it.
    warmup, first = None, file.take("trainer.critic_warmup")
    if first:
        meaning = f"the first {first - 1} steps; verl trains the actor in step {first}"
        warmup = Given(max(0, first - 1), "trainer.critic_warmup", meaning)
    start = "verl's Megatron: uniform between plus and minus 1 / sqrt(hidden size)"
    start = start if megatron else "verl's FSDP engine adds a bias, which starts at 0"
    return Critic(
        below.draft,
        head_std=Given(0.01 if megatron else 0.02, "the start of the value head in verl", start),
        name=critic_name,
        value_clip=None if clip is None else Given(clip, "critic.cliprange_value"),
        epochs=Given(below.draft.values.get("ppo_epochs"), "critic.ppo_epochs"),
        warmup=warmup,
        lambd=file.given("algorithm.lam"),
    )


def _switched_off(file: ForeignFile, model: str) -> None:
    """Takes settings of LoRA and of router replay that are off; converts a router replay that is on."""
    if not file.peek(f"{model}.lora_rank") and not file.peek(f"{model}.lora.rank"):
        for name in ("lora", "lora_rank", "lora_alpha", "target_modules", "exclude_modules"):
            file.take(f"{model}.{name}")
    for section in (f"{ACTOR}.router_replay", f"{ACTOR}.megatron.router_replay", "engine.router_replay"):
        if (mode := file.take(f"{section}.mode")) == "disabled":
            file.take(section)
        elif section != "engine.router_replay":
            file.put((ROLE, "router_replay", "mode"), mode, f"{section}.mode")
        if mode == "R3":
            file.take(f"{ROLLOUT}.enable_rollout_routing_replay")  # the mode implies it here


def _without_targets(value: Any) -> Any:
    """Copy of `value` without the keys `_target_`, which name classes of verl."""
    if isinstance(value, dict):
        return {key: _without_targets(below) for key, below in value.items() if key != "_target_"}
    return value


def _engine(file: ForeignFile, groups: dict[str, Any], supervised: bool) -> str:
    """Name of the section with the engine's settings: megatron or fsdp_config. Other engines are left out."""
    chosen = groups.get("engine" if supervised else "model_engine")
    strategy = file.take("engine.strategy") if supervised else file.take(f"{ACTOR}.strategy")
    for name in (file.take("model_engine"), chosen, strategy):
        if name is None:
            continue
        if name == "megatron":
            return "megatron"
        if name not in ("fsdp", "fsdp2", "dp"):
            why = f"{name}: only verl's Megatron and FSDP engines are converted; Megatron-Core trains here"
            file.draft.leave_out("model_engine", "refused", why)
        return "fsdp_config"
    # Nothing names the engine: only Megatron's settings tell.
    sign = file.peek("engine.tensor_model_parallel_size") if supervised else file.peek(f"{ACTOR}.megatron")
    return "megatron" if sign is not None else "fsdp_config"


def _model(file: ForeignFile, model: str) -> None:
    key = f"{model}.tokenizer_path"
    if (tokenizer := file.take(key)) is not None:
        file.put(("tokenizer",), {"type": "hf", "name_or_path": tokenizer}, key)
    convert_verl_adapters(file, model)


def _layout(file: ForeignFile, section: str, model: str, engine: str) -> None:
    """Converts the engine's settings in `section`, and those of the section `model` that belong to the layout."""
    recomputed = file.take(f"{model}.enable_gradient_checkpointing")
    convert_verl_precision(file, section, "optim" if section == "engine" else f"{ACTOR}.optim", engine)
    if engine != "megatron":
        meaning = "verl's FSDP engine as Megatron-Core, with the same mini-batches"
        for key in (f"{section}.ulysses_sequence_parallel_size", f"{ACTOR}.ulysses_sequence_parallel_size"):
            if (size := file.take(key)) not in (None, 1):
                file.put((*LAYOUT, "context_parallel_size"), size, key, "Ulysses' ranks as context-parallel ranks")
        file.draft.put((*LAYOUT, "use_distributed_optimizer"), True, f"{section}.fsdp_size", meaning)
        if recomputed:
            key = f"{model}.enable_gradient_checkpointing"
            file.put((*LAYOUT, "recompute_granularity"), "full", key, "whole layers are recomputed")
        return
    parallel = file.take(f"{section}.sequence_parallel")
    if file.peek(f"{section}.tensor_model_parallel_size") not in (None, 1):
        file.put((*LAYOUT, "sequence_parallel"), parallel, f"{section}.sequence_parallel")
    elif parallel:
        file.draft.leave_out(f"{section}.sequence_parallel", "idle", "the tensor-parallel size is 1")
    sizes = convert_context_sizes(file, lambda name: f"{section}.{name}")
    if sizes is not None:
        cap_key = "data.max_token_len_per_gpu" if section == "engine" else f"{ACTOR}.ppo_max_token_len_per_gpu"
        put_rank_cap(file, sizes, file.take(cap_key), cap_key)
    if frozen := file.take(key := f"{model}.override_config.moe_config.freeze_moe_router"):
        file.put((*LAYOUT, "freeze_moe_router"), frozen, key, "verl freezes the gates of shared experts, too")
    write_job(ForeignJob(heads=_heads(file, f"{model}.mtp")), file.draft)
    granularity = file.peek(f"{section}.override_transformer_config.recompute_granularity")
    for below in (section, f"{section}.override_transformer_config", f"{section}.override_ddp_config"):
        for name, value in list((file.peek(below) or {}).items()):
            if name == "attention_backend" or name == "use_precision_aware_optimizer":
                continue  # settings of speed and memory: left out by `leave_out_rest`
            if name.startswith("recompute_") and (
                granularity is None or (name == "recompute_modules" and granularity == "full")
            ):
                file.take(f"{below}.{name}")
            elif value is not None and field_at((*LAYOUT, name)) is not None:
                file.move(f"{below}.{name}", (*LAYOUT, name))


def _heads(file: ForeignFile, section: str) -> Heads | None:
    """Reads the heads of multi-token prediction: one, as all supported families have. None unless they train."""
    if not (file.peek(f"{section}.enable") and file.peek(f"{section}.enable_train")):
        return None
    for name in ("enable", "method", "enable_train"):
        file.take(f"{section}.{name}")
    return Heads(
        Given(1, f"{section}.enable_train", "one head, as such models have"),
        Given(bool(file.take(f"{section}.detach_encoder")), f"{section}.detach_encoder"),
        file.given(f"{section}.mtp_loss_scaling_factor"),
    )


def _batch(file: ForeignFile, devices: int) -> Batch:
    """Reads mini-batches, micro-batches and caps. verl counts a mini-batch in prompts, a cap in tokens per device."""
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    rows, packs = file.given(key), file.given(f"{ACTOR}.use_dynamic_bsz")
    if file.take(f"{ACTOR}.ppo_micro_batch_size") is not None:
        file.draft.leave_out(f"{ACTOR}.ppo_micro_batch_size", "refused", f"set {key}, as verl asks for, too")
    if rows is None and not (packs and packs.value):
        rows = Given(1, key)
        file.draft.defaults.add(key)
        file.draft.missing.append(f"actor_train.training_args.per_device_train_batch_size: verl asks for {key}")
    cap = file.given(f"{ACTOR}.ppo_max_token_len_per_gpu", "a hard cap of every pack")
    forward = file.given(f"{ROLLOUT}.log_prob_max_token_len_per_gpu")
    prompts, group = file.take(f"{ACTOR}.ppo_mini_batch_size"), file.peek(f"{ROLLOUT}.n") or 1
    return Batch(
        devices,
        Given(None if prompts is None else prompts * group, f"{ACTOR}.ppo_mini_batch_size"),
        rows=rows or Given(None, key),
        packs=packs or Given(False, f"{ACTOR}.use_dynamic_bsz"),
        cap=cap,
        forward_cap=None if forward and cap and forward.value == cap.value else forward,
        forward_rows=file.given(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        padding="micro-batches of this many rows, padded to their longest; verl removes the padding",
    )


def _trainer(file: ForeignFile) -> None:
    """Converts the tracker, the names of the run, and its checkpoints."""
    project, name = file.take("trainer.project_name"), file.take("trainer.experiment_name")
    loggers = file.take("trainer.logger")
    loggers = [loggers] if isinstance(loggers, str) else loggers or []
    tracker = next((name for name in TRACKERS if name in loggers), None)
    if tracker is not None:
        file.put(("track_with",), tracker, "trainer.logger")
        key = "experiment_name" if tracker == "mlflow" else "project"
        file.put(("tracker_kwargs", key), project, "trainer.project_name")
    for logger in loggers:
        if logger not in (tracker, "console", "tensorboard", "file"):
            why = f"track_with names one tracker of {', '.join(TRACKERS)}"
            file.draft.leave_out(f"trainer.logger ({logger})", "refused", why)
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
