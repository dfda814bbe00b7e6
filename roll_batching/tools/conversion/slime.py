"""Translates slime's scripts: the options of their training command to our keys.

Options that are translated are taken out (`SlimeFile`). The others are left out with a reason.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, Place, Problem
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.fp8 import convert_slime_fp8
from roll_batching.tools.conversion.framework_defaults import fill_defaults
from roll_batching.tools.conversion.mini_batch import data_parallel_ranks, optimizer_steps, put_mini_batch
from roll_batching.tools.conversion.nemo_rl_file import REWARDS
from roll_batching.tools.conversion.slime_command import PROGRAM
from roll_batching.tools.conversion.slime_objective import put_objective
from roll_batching.tools.conversion.slime_options import COUNTS, DEFAULTS, RL_DEFAULTS, SlimeFile
from roll_batching.tools.conversion.value_types import number_of, wrong_types

_ROLE = "actor_train"
_TRAIN = (_ROLE, "training_args")
_LAYOUT = (_ROLE, "strategy_args", "strategy_config")
_DATA = (_ROLE, "data_args")
_SAMPLING = ("actor_infer", "generating_args")
_HELD_OUT = ("validation", "generating_args")
_SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
_REWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "deepscaler": ({"after": "</think>"}, "compares the text after the last </think>, as mathematics"),
    "math": ({}, "searches the whole response for the answer; slime: its last \\boxed{}"),
    "dapo": ({"after": "Answer:"}, "1 or 0; slime: 1 or -1, compared by spelling in the last 300 characters"),
}
"""By rm-type: reward_args of math_verify, and the difference."""


def draft_of_slime(source: str, data: dict[str, Any]) -> Draft:
    """Translates the options of a script of slime. Raises ConfigFileError for values of a wrong type."""
    problems = [Problem(path, text, Place(source)) for path, text in wrong_types(data, (), COUNTS, ())]
    if problems:
        raise ConfigFileError(problems)
    file = SlimeFile(copy.deepcopy(data), Draft(source, framework="slime"))
    supervised = file.take("--loss-type") == "sft_loss"
    file.draft.defaults = fill_defaults(file.data, DEFAULTS if supervised else {**DEFAULTS, **RL_DEFAULTS})
    program = file.take(PROGRAM)
    devices = _devices(file, supervised)
    _model(file)
    _layout(file)
    updates = _batching(file, devices, supervised)
    _optimizer(file)
    if supervised:
        _supervised(file, updates)
    else:
        _rollouts(file, program)
        put_objective(file)
        _evaluation(file)
    _checkpoints(file, updates if supervised else 1)
    if not file.peek("--moe-aux-loss-coeff") and file.take("--moe-router-load-balancing-type") is not None:
        file.draft.leave_out("--moe-router-load-balancing-type", "idle", "--moe-aux-loss-coeff is 0")
    for key in ("--attention-dropout", "--hidden-dropout", "--moe-aux-loss-coeff", "--moe-z-loss-coeff"):
        why = next(reason for name, _, reason in file.reasons if name == key)
        file.expect_off(key, why=why)
    file.leave_out_rest()
    return file.draft


def _devices(file: SlimeFile, supervised: bool) -> int:
    """Devices of training and of the engine; returns the number of the former."""
    nodes, each = file.take("--actor-num-nodes") or 1, file.take("--actor-num-gpus-per-node") or 8
    devices = nodes * each
    file.put((_ROLE, "device_mapping"), f"list(range(0,{devices}))", "--actor-num-gpus-per-node")
    together, engine = file.take("--colocate"), file.take("--rollout-num-gpus")
    per_engine = file.take("--rollout-num-gpus-per-engine")
    if supervised:
        return int(devices)
    if together:
        text = "the engine sleeps during training, and the model's states are offloaded during sampling"
        file.put(("is_offload_states",), True, "--colocate", text)
    elif engine:
        where = f"list(range({devices},{devices + engine}))"
        file.put(("actor_infer", "device_mapping"), where, "--rollout-num-gpus", "numbered after those that train")
    else:
        text = "actor_infer.device_mapping: is missing: the script has neither --colocate nor --rollout-num-gpus"
        file.draft.missing.append(text)
    if nodes > 1:
        what = f"actor_infer.engine_args.urls: is missing: the file is for {nodes} machines, but the job starts servers"
        file.draft.missing.append(f"{what} only on that of rank 0; start them on the others yourself, and name all")
    strategy = ("actor_infer", "strategy_args")
    file.put((*strategy, "strategy_name"), "sglang", "--rollout-num-gpus-per-engine")
    file.put((*strategy, "strategy_config", "tp_size"), per_engine, "--rollout-num-gpus-per-engine")
    for key in [key for key in file.data if key.startswith("--sglang-")]:
        if not any(key.startswith(name) for name, _, _ in file.reasons):
            file.move(key, (*strategy, "strategy_config", key.removeprefix("--sglang-").replace("-", "_")), number_of)
    return int(devices)


def _model(file: SlimeFile) -> None:
    file.move("--hf-checkpoint", ("pretrain",))
    file.move("--seed", ("seed",))
    key = "bf16, in which slime trains unless it has --fp16"
    file.put((_ROLE, "model_args", "dtype"), "bf16", key)
    file.draft.defaults.add(key)


def _layout(file: SlimeFile) -> None:
    for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model"):
        file.move(f"--{name.replace('_', '-')}-parallel-size", (*_LAYOUT, f"{name}_parallel_size"))
    parallel = file.take("--sequence-parallel")
    layout = file.draft.values[_ROLE].get("strategy_args", {}).get("strategy_config", {})
    if layout.get("tensor_model_parallel_size", 1) > 1:
        file.put((*_LAYOUT, "sequence_parallel"), bool(parallel), "--sequence-parallel")
    elif parallel:
        file.draft.leave_out("--sequence-parallel", "idle", "the tensor-parallel size is 1")
    for name in (
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "moe_router_dtype",
    ):
        file.move(f"--{name.replace('_', '-')}", (*_LAYOUT, name))
    for end in ("first", "last"):
        file.move(f"--decoder-{end}-pipeline-num-layers", (*_LAYOUT, f"num_layers_in_{end}_pipeline_stage"))
    for option, mode in (("--use-routing-replay", "R2"), ("--use-rollout-routing-replay", "R3")):
        if file.take(option):
            file.put((_ROLE, "router_replay", "mode"), mode, option)
    _heads(file)
    rate, key = file.take("--moe-router-bias-update-rate"), "--moe-router-bias-update-rate"
    if rate is None and file.peek("--moe-router-enable-expert-bias"):
        rate = 1e-3
        file.draft.defaults.add(key)
    file.put((*_LAYOUT, "moe_router_bias_update_rate"), rate, key)
    if not file.peek("--moe-aux-loss-coeff") and file.take("--moe-router-load-balancing-type"):
        file.draft.leave_out("--moe-router-load-balancing-type", "idle", "--moe-aux-loss-coeff is 0")
    file.move("--accumulate-allreduce-grads-in-fp32", (*_LAYOUT, "grad_reduce_in_fp32"))
    convert_slime_fp8(file, _LAYOUT)


def _heads(file: SlimeFile) -> None:
    """Heads of multi-token prediction, which slime trains with `--enable-mtp-training` only."""
    keys = ("--mtp-num-layers", "--enable-mtp-training", "--mtp-loss-scaling-factor")
    number, trains, factor = map(file.take, keys)
    if not (number and trains):
        for key, value in zip(keys, (number, trains, factor), strict=True):
            if value is not None:
                why = "heads that do not train stay as in the files, and an export copies them"
                file.draft.leave_out(key, "idle", why)
        return
    text = "their losses count the tokens of the policy's loss, divided by their number in the step"
    file.put((*_LAYOUT, "mtp_num_layers"), number, keys[0], text)
    text = "slime cuts the heads' gradients off the model"
    file.put((*_LAYOUT, "mtp_detach_heads"), True, keys[1], text)
    if factor is None:
        file.draft.defaults.add(keys[2])
    file.put((*_LAYOUT, "mtp_loss_scaling_factor"), 0.2 if factor is None else factor, keys[2])


def _batching(file: SlimeFile, devices: int, supervised: bool) -> int:
    """Mini-batches, micro-batches and caps; returns the optimizer steps of a rollout."""
    layout = file.draft.values[_ROLE].get("strategy_args", {}).get("strategy_config", {})
    context = layout.get("context_parallel_size", 1)
    packed, rows = file.take("--use-dynamic-batch-size"), file.take("--micro-batch-size")
    cap, forward = file.take("--max-tokens-per-gpu"), file.take("--log-probs-max-tokens-per-gpu")
    rows_key = "--micro-batch-size"
    if packed:
        if rows not in (None, 1):
            file.draft.leave_out(rows_key, "idle", "packs have no fixed number of rows")
        rows, rows_key = 1, "--use-dynamic-batch-size"
        text = "the tokens of a pack on all context-parallel ranks together" if context > 1 else ""
        file.put((_ROLE, "use_sequence_packing"), True, "--use-dynamic-batch-size")
        packing = (_ROLE, "sequence_packing_args", "max_packed_sequence_length")
        if cap is not None:
            file.put((*packing[:2], f"{packing[2]}_train"), cap * context, "--max-tokens-per-gpu", text)
            file.put(
                (_ROLE, "planning_args", "oversize"), "alone", "--use-dynamic-batch-size", "a longer sample is alone"
            )
        if forward is not None:
            path = (*packing[:2], f"{packing[2]}_forward")
            file.put(path, forward * context, "--log-probs-max-tokens-per-gpu", text)
    else:
        file.put((_ROLE, "padded_length"), "longest", rows_key, "micro-batches of this many rows; slime packs them")
        file.put((_ROLE, "infer_batch_size"), rows, rows_key)
        for key, value in (("--max-tokens-per-gpu", cap), ("--log-probs-max-tokens-per-gpu", forward)):
            if value is not None:
                file.draft.leave_out(key, "idle", "--use-dynamic-batch-size is not given")
    prompts, group = file.take("--rollout-batch-size"), file.take("--n-samples-per-prompt")
    steps = file.take("--num-steps-per-rollout")
    size, key = file.take("--global-batch-size"), "--global-batch-size"
    if size is None and prompts:
        size, key = (
            prompts * (group or 1) // (steps or 1),
            "--num-steps-per-rollout" if steps else "--rollout-batch-size",
        )
    put_mini_batch(file.draft, (size, key), (rows, rows_key), data_parallel_ranks(layout, devices))
    if not supervised:
        file.put(("rollout_batch_size",), prompts, "--rollout-batch-size")
        file.put(("num_return_sequences_in_group",), group, "--n-samples-per-prompt")
    elif size not in (None, prompts):
        text = f"{prompts} texts are read at a time, but {size} make an optimizer step"
        file.draft.leave_out("--rollout-batch-size", "idle", text)
    return max(1, prompts * (group or 1) // size) if prompts and size else 1


def _optimizer(file: SlimeFile) -> None:
    for name, ours in (
        ("lr", "learning_rate"),
        ("min-lr", "min_lr"),
        ("weight-decay", "weight_decay"),
        ("adam-beta1", "adam_beta1"),
        ("adam-beta2", "adam_beta2"),
        ("adam-eps", "adam_epsilon"),
        ("clip-grad", "max_grad_norm"),
        ("lr-decay-style", "lr_scheduler_type"),
        ("lr-decay-iters", "max_steps"),
        ("lr-warmup-init", "lr_warmup_init"),
    ):
        file.move(f"--{name}", (*_TRAIN, ours))
    share, steps = file.take("--lr-warmup-fraction"), file.take("--lr-warmup-iters")
    if share:
        file.put((*_TRAIN, "warmup_ratio"), share, "--lr-warmup-fraction")
    else:
        file.put((*_TRAIN, "warmup_steps"), steps, "--lr-warmup-iters")
    if (name := file.take("--optimizer")) not in (None, "adam"):
        file.draft.leave_out("--optimizer", "refused", f"{name}: parameters are trained by AdamW")


def _lengths(file: SlimeFile) -> None:
    answer, prompt = file.take("--rollout-max-response-len"), file.take("--rollout-max-prompt-len")
    total = file.take("--rollout-max-context-len")
    if total is not None:
        file.put(("sequence_length",), total, "--rollout-max-context-len")
        answer = total - 1 if answer is None else min(answer, total - 1)
    if answer is not None:
        file.put(("response_length",), answer, "--rollout-max-response-len")
    else:
        file.draft.missing.append("response_length: is missing: without --rollout-max-response-len slime has no limit")
    if prompt is None and total is not None and answer is not None and total - answer > 1:
        prompt = total - answer
    if prompt is None:
        text = "prompt_length: slime has no limit of prompts here: set the tokens of your longest one (default: 1024)"
        file.draft.missing.append(text)
    else:
        text = "prompts and responses have a limit each" if total is not None else ""
        file.put(("prompt_length",), prompt, "--rollout-max-prompt-len", text)
        file.put((*_DATA, "long_prompts"), "drop", "--rollout-max-prompt-len")


def _rollouts(file: SlimeFile, program: str) -> None:
    _lengths(file)
    for name in ("temperature", "top-p", "top-k"):
        file.move(f"--rollout-{name}", (*_SAMPLING, name.replace("-", "_")))
    steps = file.take("--num-rollout")
    epochs = file.take("--num-epoch")
    if steps is not None:
        file.put(("max_steps",), steps, "--num-rollout")
        if epochs is not None:
            file.draft.leave_out("--num-epoch", "idle", "--num-rollout is the length of the job")
    else:
        text = f"max_steps: is missing: --num-epoch ({epochs}) x prompts of the file / --rollout-batch-size"
        file.draft.missing.append(text)
        file.draft.leave_out("--num-epoch", "refused", "max_steps counts RL steps")
    if program == "train_async.py":
        text = "old log-probs are the sampler's; slime computes them with the weights in training"
        file.put(("async_generation_ratio",), 1, "train_async.py", text)
        if "is_offload_states" in file.draft.values:
            file.draft.values.pop("is_offload_states")
    _prompts(file)
    if file.take("--update-weights-interval") not in (None, 1):
        file.draft.leave_out(
            "--update-weights-interval", "refused", "rollouts of a step use the weights of the step before"
        )
    kind, path = file.take("--rm-type"), file.take("--custom-rm-path")
    if path is not None:
        text = "slime's contract: an async function of args and a sample"
        file.put(("reward_function",), "slime_custom_rm", "--custom-rm-path", text)
        file.put(("reward_args", "path"), path, "--custom-rm-path")
        if file.take("--group-rm"):
            file.put(("reward_args", "grouped"), True, "--group-rm", "the function gets lists of one sample")
        file.move("--reward-key", ("reward_args", "reward_key"))
        file.move("--metadata-key", ("reward_args", "metadata_key"))
        if kind is not None:
            file.put(("reward_args", "options"), {"rm_type": kind}, "--rm-type", "args.rm_type of the function")
    elif kind in _REWARDS:
        arguments, text = _REWARDS[kind]
        file.put(("reward_function",), "math_verify", "--rm-type", text)
        for name, value in arguments.items():
            file.put(("reward_args", name), value, "--rm-type")
    else:
        file.draft.leave_out("--rm-type", "refused", f"{kind}: {REWARDS}")


def _prompts(file: SlimeFile) -> None:
    file.move("--prompt-data", (*_DATA, "file_name"))
    key, templated = file.take("--input-key"), file.take("--apply-chat-template")
    if templated:
        text = "a list of messages; for a key with plain texts set prompt and chat: true instead"
        file.put((*_DATA, "messages"), key, "--input-key", text)
    else:
        file.put((*_DATA, "prompt"), key, "--input-key")
    file.move("--label-key", (*_DATA, "response"))
    _chat_template(file)
    if not file.take("--rollout-shuffle"):
        file.draft.leave_out(
            "--rollout-shuffle", "refused", "is not given, but prompts are shuffled anew in every epoch"
        )


def _chat_template(file: SlimeFile) -> None:
    """What the chat template reads beside the messages."""
    file.move("--tool-key", (*_DATA, "tools"))
    kwargs = file.take("--apply-chat-template-kwargs")
    try:
        kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    except ValueError:
        file.draft.leave_out("--apply-chat-template-kwargs", "refused", "is no JSON")
        return
    file.put((*_DATA, "chat_template_kwargs"), kwargs or None, "--apply-chat-template-kwargs")


def _evaluation(file: SlimeFile) -> None:
    period, named = file.take("--eval-interval"), file.take("--eval-prompt-data")
    answers, length = file.take("--n-samples-per-eval-prompt"), file.take("--eval-max-response-len")
    limits = {name: file.take(f"--eval-{name}") for name in ("temperature", "top-p", "top-k")}
    if period is None or not named:
        file.put(("eval_samples",), 0, "--eval-interval", "there is no evaluation")
        if period is not None:
            file.draft.leave_out("--eval-config", "refused", "name the held-out prompts in data_args.eval_file_name")
        return
    text = "the policy is also evaluated before the first step and after the last"
    file.put(("eval_steps",), period, "--eval-interval", text)
    files = [named[0]] if len(named) == 1 else named[1::2]
    file.put((*_DATA, "eval_file_name"), files[0] if len(files) == 1 else files, "--eval-prompt-data")
    file.draft.missing.append(
        "eval_samples: slime evaluates all held-out prompts: set the number of answers (default: 512)"
    )
    if answers not in (None, 1):
        file.put((*_HELD_OUT, "num_return_sequences"), answers, "--n-samples-per-eval-prompt")
    if length is not None:
        file.put((*_HELD_OUT, "max_new_tokens"), length, "--eval-max-response-len")
    for name, value in limits.items():
        if name == "temperature" and value == 0:
            file.put((*_HELD_OUT, "do_sample"), False, "--eval-temperature")
        elif value is not None:
            file.put((*_HELD_OUT, name.replace("-", "_")), value, f"--eval-{name}")


def _supervised(file: SlimeFile, updates: int) -> None:
    """`--loss-type sft_loss` as `task: sft`, whose steps are optimizer steps; a rollout of slime has `updates`."""
    file.put(("task",), "sft", "--loss-type")
    if file.peek("--rollout-function-path") == _SFT_ROLLOUT:
        file.take("--rollout-function-path")
    for key in ("--debug-train-only", "--disable-compute-advantages-and-returns", "--n-samples-per-prompt"):
        file.take(key)
    epochs, steps = file.take("--num-epoch"), file.take("--num-rollout")
    if steps is not None:
        count, unit = optimizer_steps(steps, updates, "a rollout")
        file.put(("max_steps",), count, "--num-rollout", unit)
    elif epochs is not None:
        file.put(("num_train_epochs",), epochs, "--num-epoch")
    whole = file.take("--calculate-per-token-loss")
    aggregation = "token_mean" if whole else "sequence_mean"
    file.put(("loss_args", "aggregation"), aggregation, "--calculate-per-token-loss")
    file.move("--prompt-data", (*_DATA, "file_name"))
    file.move("--input-key", (*_DATA, "messages"))
    _chat_template(file)
    file.draft.missing.append(
        "sequence_length: is missing: slime has no limit of texts; set the tokens of the longest one"
    )
    if not file.take("--rollout-shuffle"):
        file.draft.leave_out("--rollout-shuffle", "refused", "is not given, but texts are shuffled anew in every epoch")
    file.put(("eval_samples",), 0, "--eval-interval", "there is no evaluation")


def _checkpoints(file: SlimeFile, updates: int) -> None:
    """Checkpoints and the tracker; a step of the job is one of `updates` steps of a rollout."""
    file.move("--save", ("output_dir",))
    period = file.take("--save-interval")
    if period is not None:
        count, unit = optimizer_steps(period, updates, "a rollout")
        file.put(("save_steps",), count, "--save-interval", unit)
    file.move("--async-save", ("async_save",))
    if file.take("--use-wandb"):
        file.put(("track_with",), "wandb", "--use-wandb")
        for name in ("project", "group"):
            file.move(f"--wandb-{name}", ("tracker_kwargs", name))
