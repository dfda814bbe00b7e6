"""NeMo-RL's files: sections of its policy, algorithm, loss and cluster under our keys.

What is read is taken out of the file's settings (`nemo_rl_given`); what remains is left out with its reason.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from roll_batching.compat.nemo_rl import convert_policy
from roll_batching.config.key_paths import field_at
from roll_batching.conversion.nemo_rl_given import REWARDS, Given
from roll_batching.conversion.settle import Draft
from roll_batching.errors import ConfigError, PlanError

_TRAIN = ("actor_train", "training_args")
_LAYOUT = ("actor_train", "strategy_args", "strategy_config")
_SAMPLING = ("actor_infer", "generating_args")


_PACKING, _DYNAMIC = "sequence_packing", "dynamic_batching"
_BATCHING: Mapping[tuple[str, ...], str] = {
    ("use_sequence_packing",): f"{_PACKING}.enabled",
    ("sequence_packing_args", "algorithm"): f"{_PACKING}.algorithm",
    ("sequence_packing_args", "max_packed_sequence_length_train"): f"{_PACKING}.train_mb_tokens",
    ("sequence_packing_args", "max_packed_sequence_length_forward"): f"{_PACKING}.logprob_mb_tokens",
    ("use_dynamic_batching_in_train",): f"{_DYNAMIC}.enabled",
    ("use_dynamic_batching_in_infer",): f"{_DYNAMIC}.enabled",
    ("max_tokens_per_microbatch_in_train",): f"{_DYNAMIC}.train_mb_tokens",
    ("max_tokens_per_microbatch_in_infer",): f"{_DYNAMIC}.logprob_mb_tokens",
    ("sequence_length_round_in_train",): f"{_DYNAMIC}.sequence_length_round",
    ("sequence_length_round_in_infer",): f"{_DYNAMIC}.sequence_length_round",
    ("planning_args", "dynamic_algorithm"): f"{_DYNAMIC}.enabled",
    ("planning_args", "shared_shapes"): f"{_DYNAMIC}.enabled",
}
"""What `convert_policy` makes of the two sections: by key of the role, the key it comes from."""


def draft_of_nemo_rl(source: str, data: dict[str, Any]) -> Draft:
    """NeMo-RL's composed settings in our names. Raises ConfigError for a file without a policy to train."""
    given = Given(copy.deepcopy(data), Draft(source))
    if not isinstance(given.data.get("policy"), dict):
        raise ConfigError(f"{source} has no section `policy`")
    supervised = isinstance(given.data.get("sft"), dict)
    _model(given)
    _layout(given)
    _batching(given, source)
    _optimizer(given)
    _lengths(given, supervised)
    if supervised:
        _supervised(given)
    else:
        _algorithm(given)
        _loss(given)
        given.move("policy.generation.temperature", (*_SAMPLING, "temperature"))
        given.move("policy.generation.top_p", (*_SAMPLING, "top_p"))
        given.move("policy.generation.top_k", (*_SAMPLING, "top_k"))
    _checkpoints(given)
    given.leave_out_the_rest()
    return given.draft


def _model(given: Given) -> None:
    name = given.peek("policy.model_name")
    given.move("policy.model_name", ("pretrain",))
    tokenizer = given.take("policy.tokenizer.name")
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
    if recomputed and given.draft.values.get("actor_train", {}).get("strategy_args") is not None:
        text = "whole layers are recomputed"
        key = f"{section}.activation_checkpointing"
        given.draft.put((*_LAYOUT, "recompute_granularity"), "full", key, text)
    elif megatron and not recomputed:  # its other keys are read with it only
        for name in ("recompute_granularity", "recompute_modules"):
            strategy = given.draft.values.get("actor_train", {}).get("strategy_args", {}).get("strategy_config", {})
            if strategy.pop(name, None) is not None:
                given.draft.leave_out(f"{section}.{name}", "idle", "activation_checkpointing is off")
    _devices(given)


def _devices(given: Given) -> None:
    nodes, each = given.take("cluster.num_nodes", 1), given.take("cluster.gpus_per_node", 1)
    devices = nodes * each
    text = "the devices that train and generate"
    if given.peek("policy.generation.colocated.enabled", True) is False:
        resources = given.peek("policy.generation.colocated.resources") or {}
        own = (resources.get("num_nodes") or 1) * (resources.get("gpus_per_node") or each)
        devices = max(1, devices - own)
        text = "the devices that train, which also generate; there, generation has devices of its own"
    given.draft.put(("actor_train", "device_mapping"), f"list(range(0,{devices}))", "cluster", text)


def _batching(given: Given, source: str) -> None:
    policy = given.peek("policy")
    try:
        worker, notices = convert_policy({key: _whole(value) for key, value in policy.items()})
    except PlanError as error:
        raise ConfigError(f"{source}: policy.{error}") from None
    for key, value in worker.items():
        given.draft.put(("actor_train", key), value)
    for ours, name in _BATCHING.items():
        given.draft.origins[("actor_train", *ours)] = f"policy.{name}"
    for notice in notices:
        name, _, why = notice.partition(": ")
        given.draft.leave_out(f"policy.{name}", "idle", why)
    for name in ("sequence_packing", "dynamic_batching", "make_sequence_length_divisible_by"):
        given.take(f"policy.{name}")
    layout = given.draft.values["actor_train"].get("strategy_args", {}).get("strategy_config", {})
    model = [layout.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "pipeline_model", "context")]
    devices = int(given.draft.values["actor_train"]["device_mapping"].rpartition(",")[2].rstrip(")"))
    ranks = max(1, devices // (model[0] * model[1] * model[2]))
    size, rows = given.take("policy.train_global_batch_size"), given.take("policy.train_micro_batch_size", 1)
    given.draft.put((*_TRAIN, "per_device_train_batch_size"), rows, "policy.train_micro_batch_size")
    if isinstance(size, int) and isinstance(rows, int):
        steps, rest = divmod(size, rows * ranks)
        text = f"{size} sequences per optimizer step are {rows} x this x {ranks} data-parallel ranks"
        if rest or not steps:
            text = (
                f"{size} sequences per optimizer step do not divide by {rows} x {ranks} ranks: {max(1, steps)} is near"
            )
        key = "policy.train_global_batch_size"
        given.draft.put((*_TRAIN, "gradient_accumulation_steps"), max(1, steps), key, text)
    given.move("policy.logprob_batch_size", ("actor_train", "infer_batch_size"))
    for name in ("generation_batch_size", "logprob_chunk_size", "offload_optimizer_for_logprob"):
        value = given.take(f"policy.{name}")
        if value is not None:
            given.draft.leave_out(f"policy.{name}", "idle", "roles share one model, in passes of our own size")


def _whole(value: Any) -> Any:
    """Numbers that a division made, as what they are."""
    if isinstance(value, dict):
        return {key: _whole(below) for key, below in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _optimizer(given: Given) -> None:
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
    given.take("policy.megatron_cfg.optimizer.clip_grad")
    given.move("policy.max_grad_norm", (*_TRAIN, "max_grad_norm"))
    for name in ("bf16", "fp16", "params_dtype", "sgd_momentum", "use_precision_aware_optimizer"):
        if given.take(f"policy.megatron_cfg.optimizer.{name}") is not None:
            why = "AdamW keeps fp32 parameters and moments here (strategy_config.use_precision_aware_optimizer is "
            why += "TransformerEngine's); precision is model_args.dtype"
            given.draft.leave_out(f"policy.megatron_cfg.optimizer.{name}", "idle", why)
    scheduler = "policy.megatron_cfg.scheduler"
    given.move(f"{scheduler}.lr_decay_style", (*_TRAIN, "lr_scheduler_type"))
    given.move(f"{scheduler}.lr_warmup_iters", (*_TRAIN, "warmup_steps"))
    given.move(f"{scheduler}.lr_decay_iters", (*_TRAIN, "max_steps"))
    for name in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "lr_warmup_init"):
        if given.take(f"{scheduler}.{name}") is not None:
            given.draft.leave_out(f"{scheduler}.{name}", "idle", "weight decay is constant, warm-up begins at 0")
    _torch_schedule(given)


def _torch_schedule(given: Given) -> None:
    """The list of torch schedules: a linear one that ends at 1 is a warm-up."""
    schedules = given.take("policy.scheduler")
    for one in schedules if isinstance(schedules, list) else [schedules] if isinstance(schedules, dict) else []:
        name, settings = str(one.get("name", "")), one.get("kwargs") or {}
        if name.endswith("LinearLR") and settings.get("end_factor") == 1.0 and isinstance(settings["total_iters"], int):
            text = f"{settings['total_iters']} steps of linear warm-up, from 0; there, from {settings['start_factor']}"
            given.draft.put((*_TRAIN, "warmup_steps"), settings["total_iters"], "policy.scheduler", text)
        elif name and not name.endswith("ConstantLR"):
            given.draft.leave_out(f"policy.scheduler ({name})", "refused", "set lr_scheduler_type, min_lr, max_steps")


def _lengths(given: Given, supervised: bool) -> None:
    whole, longest = given.take("policy.max_total_sequence_length"), given.take("data.max_input_seq_length")
    if not isinstance(whole, int):
        return
    given.draft.put(("sequence_length",), whole, "policy.max_total_sequence_length")
    answer = given.take("policy.generation.max_new_tokens")
    if supervised:
        return
    text = "prompts and responses have a limit each; there, they share max_total_sequence_length"
    prompt = longest if isinstance(longest, int) and longest < whole else max(1, whole // 4)
    given.draft.put(("prompt_length",), prompt, "data.max_input_seq_length", text)
    if isinstance(answer, int):
        response = min(answer, whole - prompt)
        given.draft.put(("response_length",), response, "policy.generation.max_new_tokens", text)


def _supervised(given: Given) -> None:
    """The section `sft` as the job's warm-up, with nothing after it."""
    given.move("sft.seed", ("seed",))
    arguments = given.draft.values["actor_train"].get("training_args", {})
    for key, value in arguments.items():
        path = (*_TRAIN, key)
        given.draft.put(("warmup", *path[1:]), value, given.draft.origins.get(path), given.draft.meanings.get(path, ""))
    given.move("sft.max_num_steps", ("warmup", "training_args", "max_steps"))
    epochs = given.take("sft.max_num_epochs")
    if epochs is not None:
        given.draft.leave_out("sft.max_num_epochs", "refused", "max_num_steps ends the warm-up alone")
    text = "supervised training is the section `warmup`; RL makes no step after it"
    given.draft.put(("max_steps",), 0, "sft", text)
    given.draft.put(("eval_samples",), 0, "sft.val_period", "a held-out loss is not measured for now")


def _algorithm(given: Given) -> None:
    for key, ours in (
        ("num_prompts_per_step", "rollout_batch_size"),
        ("num_generations_per_prompt", "num_return_sequences_in_group"),
        ("seed", "seed"),
        ("val_period", "eval_steps"),
        ("max_val_samples", "eval_samples"),
        ("overlong_filtering", "max_len_mask"),
    ):
        given.move(f"grpo.{key}", (ours,))
    given.move("grpo.max_num_steps", ("max_steps",), meaning="ends the job alone; there, max_num_epochs ends it, too")
    name = given.take("grpo.adv_estimator.name", "grpo")
    normalised, others = (
        given.take("grpo.normalize_rewards", True),
        given.take("grpo.use_leave_one_out_baseline", False),
    )
    minus = given.take("grpo.adv_estimator.minus_baseline", True)
    given.take("grpo.adv_estimator.normalize_rewards")
    given.take("grpo.adv_estimator.use_leave_one_out_baseline")
    key = "grpo.adv_estimator.name"
    if name == "reinforce_plus_plus":
        given.draft.put(("adv_estimator",), f"{name}_baseline" if minus else name, key)
    elif name != "grpo":
        given.draft.put(("adv_estimator",), name, key)
    elif normalised:
        text = "minus the group's mean; there, the mean of the others, which is larger by n / (n - 1)" if others else ""
        given.draft.put(("adv_estimator",), "grpo", key, text)
    else:
        given.draft.put(("adv_estimator",), "rloo" if others else "reinforce", key)
        if not others:
            given.draft.put(("norm_mean_type",), "group", "grpo.normalize_rewards")
    given.off("grpo.use_dynamic_sampling", why="prompts are not sampled again; drop_zero_advantage_groups is near")
    given.off("grpo.async_grpo", why="here async_generation_ratio draws rollouts ahead of training: set it")
    given.off("grpo.reward_scaling", "grpo.reward_shaping", "reward_penalties", why=REWARDS)
    for name in ("dynamic_sampling_max_gen_batches", "batch_multiplier"):
        if given.take(f"grpo.{name}") is not None:
            given.draft.leave_out(f"grpo.{name}", "idle", "belongs to use_dynamic_sampling")
    if given.peek("grpo.max_rollout_turns", 1) not in (None, 1):
        turns = given.take("grpo.max_rollout_turns")
        given.draft.leave_out("grpo.max_rollout_turns", "refused", f"{turns}: rollouts have one turn")
    for name in ("max_rollout_turns", "max_num_epochs", "val_batch_size", "val_num_generations_per_prompt"):
        if given.take(f"grpo.{name}") is not None:
            given.draft.leave_out(f"grpo.{name}", "idle", "max_steps ends the job; eval_samples are answered once each")
    for name in ("val_start_at", "val_at_start", "val_at_end"):
        if given.take(f"grpo.{name}") is not None:
            given.draft.leave_out(f"grpo.{name}", "idle", "first and last step are always evaluated")


def _loss(given: Given) -> None:
    weight = given.take("loss_fn.reference_policy_kl_penalty")
    if weight:
        given.draft.put(("use_kl_loss",), True, "loss_fn.reference_policy_kl_penalty")
        given.draft.put(("kl_loss_coef",), weight, "loss_fn.reference_policy_kl_penalty")
        given.draft.put(("reference",), {}, "loss_fn.reference_policy_kl_penalty")
        given.move("loss_fn.reference_policy_kl_type", ("loss_args", "kl_estimator"))
        given.move("loss_fn.kl_output_clamp_value", ("kl_loss_bound",))
        weighted = given.take("loss_fn.use_on_policy_kl_approximation")
        key = "loss_fn.use_on_policy_kl_approximation" if weighted else "loss_fn.reference_policy_kl_penalty"
        gradient = "importance" if weighted else "score_function"
        text = "weighted by the ratio to the old policy; there, to the engine's" if weighted else ""
        given.draft.put(("loss_args", "kl_gradient"), gradient, key, text)
    for name in ("reference_policy_kl_type", "kl_output_clamp_value"):
        if given.take(f"loss_fn.{name}") is not None:
            given.draft.leave_out(f"loss_fn.{name}", "idle", "reference_policy_kl_penalty is 0")
    low, high = given.peek("loss_fn.ratio_clip_min"), given.peek("loss_fn.ratio_clip_max")
    if low is not None and high is not None:
        given.draft.put(("use_pg_clip_range",), True, "loss_fn.ratio_clip_min")
        given.move("loss_fn.ratio_clip_min", ("pg_clip_low",))
        given.move("loss_fn.ratio_clip_max", ("pg_clip_high",))
    dual = given.take("loss_fn.ratio_clip_c")
    if given.take("loss_fn.use_cispo"):
        given.draft.put(("loss_function",), "cispo", "loss_fn.use_cispo")
    elif dual is not None:
        given.draft.put(("dual_clip_loss",), True, "loss_fn.ratio_clip_c")
        given.draft.put(("dual_clip_ratio",), dual, "loss_fn.ratio_clip_c")
    given.move(
        "loss_fn.token_level_loss",
        ("loss_agg_mode",),
        lambda tokens: "token-mean" if tokens else "seq-mean-token-mean",
    )
    if given.take("loss_fn.sequence_level_importance_ratios"):
        given.draft.put(("importance_sampling",), "seq", "loss_fn.sequence_level_importance_ratios")
    _engine_correction(given)
    if given.take("loss_fn.kl_input_clamp_value") is not None:
        given.draft.leave_out("loss_fn.kl_input_clamp_value", "idle", "log-ratios are bounded at 20 before exp")
    if given.take("loss_fn.use_on_policy_kl_approximation") is not None:
        given.draft.leave_out("loss_fn.use_on_policy_kl_approximation", "idle", "reference_policy_kl_penalty is 0")


_CORRECTIONS = {None: "truncate", "tis": "truncate", "icepop": "mask", "seq-mask-tis": "mask_sequences"}


def _engine_correction(given: Given) -> None:
    key = "loss_fn.truncated_importance_sampling"
    corrected = given.take("loss_fn.use_importance_sampling_correction")
    kind, cap = given.take(f"{key}_type"), given.take(f"{key}_ratio")
    lowest = given.take(f"{key}_ratio_min")
    if corrected and cap is None:
        text = "the correction needs a cap here: loss_args.engine_ratio_cap"
        given.draft.leave_out("loss_fn.use_importance_sampling_correction", "refused", text)
    elif corrected:
        given.draft.put(("loss_args", "engine_ratio_cap"), cap, f"{key}_ratio")
        if lowest is not None:
            given.draft.put(("loss_args", "engine_ratio_min"), lowest, f"{key}_ratio_min")
        if _CORRECTIONS[kind] != "truncate":
            given.draft.put(("loss_args", "engine_correction"), _CORRECTIONS[kind], f"{key}_type")


def _checkpoints(given: Given) -> None:
    given.move("checkpointing.checkpoint_dir", ("output_dir",))
    enabled = given.take("checkpointing.enabled", True)
    period = given.take("checkpointing.save_period")
    if enabled and period:
        given.draft.put(("save_steps",), period, "checkpointing.save_period")
        text = "the latest are kept; there, the best"
        given.move("checkpointing.keep_top_k", ("save_total_limit",), meaning=text)
        given.move("policy.megatron_cfg.checkpoint.async_save", ("async_save",))
