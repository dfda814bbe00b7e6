"""Translates slime's scripts: the options of their training command to our keys."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

from roll_batching.tools.conversion.critics import Critic, scale_loss, write_critic
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import (
    DATA,
    REWARDS,
    ROLE,
    STRATEGY,
    TRAIN,
    ForeignFile,
    Given,
    number_of,
)
from roll_batching.tools.conversion.foreign_job import (
    Batch,
    Clipping,
    Devices,
    DynamicSampling,
    Evaluation,
    ForeignJob,
    Heads,
    KlTerm,
    Lengths,
    Schedule,
    optimizer_steps,
    write_job,
)
from roll_batching.tools.conversion.layouts import convert_slime_layout
from roll_batching.tools.conversion.optimizers import convert_muon_keys, convert_optimizer
from roll_batching.tools.conversion.precision import convert_slime_precision
from roll_batching.tools.conversion.slime_command import PROGRAM, SLIME

_SFT_ROLLOUT = "slime.rollout.sft_rollout.generate_rollout"
_FILTER = "check_reward_nonzero_std"


def draft_of_slime(source: str, data: dict[str, Any]) -> Draft:
    """Translates the options of a script of slime. Raises ConfigFileError for values of a wrong type."""
    SLIME.check_types(data, source)
    file = ForeignFile(SLIME, copy.deepcopy(data), Draft(source, framework="slime"))
    supervised = file.take("--loss-type") == "sft_loss"
    file.fill_defaults(SLIME.defaults("all_tasks", *(() if supervised else ("rl",))))
    is_async = file.take(PROGRAM) == "train_async.py"
    convert_slime_precision(file)
    for group in ("model", "layout", "optimizer"):
        file.move_all(group)
    convert_optimizer(file, "--optimizer")
    convert_muon_keys(file, lambda name: f"--{name.replace('_', '-')}")
    if file.take(key := "--muon-no-split-qkv"):
        file.put((*TRAIN, "muon_split_qkv"), False, key)
    convert_slime_layout(file)
    devices = _devices(file, supervised, is_async)
    batch, updates = _batch(file, devices.training.value, supervised)
    parts = ForeignJob(devices=devices, batch=batch, schedule=_schedule(file), heads=_heads(file))
    if supervised:
        _supervised(file, updates)
        evaluation = Evaluation(Given(0, "--eval-interval"), is_on=False)
        write_job(replace(parts, task=Given("sft", "--loss-type"), evaluation=evaluation), file.draft)
    else:
        file.move_all("rl")
        _rollouts(file, is_async)
        lengths, kl = _lengths(file), (*_advantages(file), *_kl_loss(file))
        parts = replace(parts, lengths=lengths, clipping=_clipping(file), kl=kl, sampling=_dynamic_sampling(file))
        write_job(replace(parts, evaluation=_evaluation(file)), file.draft)
        if file.draft.values.get("adv_estimator") == "gae":
            write_critic(_critic(file), file.draft)
    _checkpoints(file, updates if supervised else 1)
    if not file.peek("--moe-aux-loss-coeff") and file.take("--moe-router-load-balancing-type") is not None:
        file.draft.leave_out("--moe-router-load-balancing-type", "idle", "--moe-aux-loss-coeff is 0")
    file.leave_out_rest()
    return file.draft


def _devices(file: ForeignFile, supervised: bool, is_async: bool) -> Devices:
    """Reads the devices of training and of the engine; converts the engine's options."""
    key, nodes = "--actor-num-gpus-per-node", int(file.take("--actor-num-nodes") or 1)
    training = Given(nodes * int(file.take(key) or 8), key)
    is_colocated, engine = file.take("--colocate"), file.given("--rollout-num-gpus")
    size = file.take("--rollout-num-gpus-per-engine")
    if supervised:
        return Devices(training)
    if not is_colocated and not (engine and engine.value):
        lack = "actor_infer.device_mapping: is missing: the script has neither --colocate nor --rollout-num-gpus"
        file.draft.missing.append(lack)
    file.put((*STRATEGY, "strategy_name"), "sglang", "--rollout-num-gpus-per-engine")
    file.put((*STRATEGY, "strategy_config", "tp_size"), size, "--rollout-num-gpus-per-engine")
    # A list, because `move` takes keys out of `file.data`. Options with a reason are left out by `leave_out_rest`.
    for key in [key for key in file.data if key.startswith("--sglang-")]:
        if not any(key.startswith(name) for name, _, _ in SLIME.reasons):
            file.move(key, (*STRATEGY, "strategy_config", key.removeprefix("--sglang-").replace("-", "_")), number_of)
    return Devices(
        training,
        engine=engine if engine and engine.value and not is_colocated else None,
        sleeps="--colocate" if is_colocated and not is_async else "",
        machines=nodes,
    )


def _heads(file: ForeignFile) -> Heads | None:
    """Reads the heads of multi-token prediction; None unless `--enable-mtp-training` trains some."""
    keys = ("--mtp-num-layers", "--enable-mtp-training", "--mtp-loss-scaling-factor")
    number, trains, factor = map(file.given, keys)
    if not (number and number.value and trains and trains.value):
        for key, option in zip(keys, (number, trains, factor), strict=True):
            if option is not None:
                why = "heads that do not train stay as in the files, and an export copies them"
                file.draft.leave_out(key, "idle", why)
        return None
    if factor is None:
        file.draft.defaults.add(keys[2])
    meaning = "their losses count the tokens of the policy's loss, divided by their number in the step"
    detached = Given(True, keys[1], "slime cuts the heads' gradients off the model")
    return Heads(replace(number, meaning=meaning), detached, factor or Given(0.2, keys[2]))


def _batch(file: ForeignFile, devices: int, supervised: bool) -> tuple[Batch, int]:
    """(Mini-batches, micro-batches and caps; optimizer steps of a rollout)."""
    rows, packs = file.given("--micro-batch-size"), file.given("--use-dynamic-batch-size")
    cap, forward = file.given("--max-tokens-per-gpu"), file.given("--log-probs-max-tokens-per-gpu")
    if packs and packs.value and cap is not None:
        file.put((ROLE, "planning_args", "oversize"), "alone", packs.key, "a longer sample is alone")
    prompts, group = file.peek("--rollout-batch-size"), file.peek("--n-samples-per-prompt") or 1
    steps, sequences = file.take("--num-steps-per-rollout"), file.given("--global-batch-size")
    if sequences is None:
        # slime computes the mini-batch from the number of steps where only that is given.
        size = prompts * group // (steps or 1) if prompts else None
        sequences = Given(size, "--num-steps-per-rollout" if steps else "--rollout-batch-size")
    if supervised:
        file.take("--rollout-batch-size")
        if sequences.value not in (None, prompts):
            why = f"{prompts} texts are read at a time, but {sequences.value} make an optimizer step"
            file.draft.leave_out("--rollout-batch-size", "idle", why)
    batch = Batch(
        devices,
        sequences,
        rows=rows or Given(None, "--micro-batch-size"),
        packs=packs or Given(False, "--use-dynamic-batch-size"),
        cap=cap,
        forward_cap=forward,
        forward_rows=rows,
        padding="micro-batches of this many rows; slime packs them",
    )
    return batch, max(1, prompts * group // sequences.value) if prompts and sequences.value else 1


def _schedule(file: ForeignFile) -> Schedule:
    share, warmup = file.given("--lr-warmup-fraction"), file.given("--lr-warmup-iters")
    is_share = share is not None and bool(share.value)
    return Schedule(
        shape=file.given("--lr-decay-style"),
        lowest=file.given("--min-lr"),
        start=file.given("--lr-warmup-init"),
        warmup=None if is_share else warmup,
        warmup_ratio=share if is_share else None,
        length=file.given("--lr-decay-iters"),
    )


def _lengths(file: ForeignFile) -> Lengths:
    """Reads the limits of prompts and responses; lists a limit that no option gives as missing."""
    answer, key = file.take("--rollout-max-response-len"), "--rollout-max-prompt-len"
    prompt, whole = file.take(key), file.given("--rollout-max-context-len")
    if whole is not None:  # at least one of its tokens is the prompt's
        answer = whole.value - 1 if answer is None else min(answer, whole.value - 1)
        if prompt is None and whole.value - answer > 1:
            prompt = whole.value - answer
    if answer is None:
        file.draft.missing.append("response_length: is missing: without --rollout-max-response-len slime has no limit")
    if prompt is None:
        lack = "prompt_length: slime has no limit of prompts here: set the tokens of your longest one (default: 1024)"
        file.draft.missing.append(lack)
    meaning = "prompts and responses have a limit each" if whole is not None else ""
    return Lengths(
        whole,
        prompt=None if prompt is None else Given(prompt, key, meaning),
        response=None if answer is None else Given(answer, "--rollout-max-response-len"),
        drops=None if prompt is None else Given("drop", key),
    )


def _rollouts(file: ForeignFile, is_async: bool) -> None:
    """Converts the length of the job, asynchronous rollouts, the prompts and the reward."""
    steps, epochs = file.take("--num-rollout"), file.take("--num-epoch")
    file.put(("max_steps",), steps, "--num-rollout")
    if steps is None:
        lack = f"max_steps: is missing: --num-epoch ({epochs}) x prompts of the file / --rollout-batch-size"
        file.draft.missing.append(lack)
        file.draft.leave_out("--num-epoch", "refused", "max_steps counts RL steps")
    elif epochs is not None:
        file.draft.leave_out("--num-epoch", "idle", "--num-rollout is the length of the job")
    if is_async:
        meaning = "old log-probs are the sampler's; slime computes them with the weights in training"
        file.put(("async_generation_ratio",), 1, "train_async.py", meaning)
    key, templated = file.take("--input-key"), file.take("--apply-chat-template")
    meaning = "a list of messages; for a key with plain texts set prompt and chat: true instead" if templated else ""
    file.put((*DATA, "messages" if templated else "prompt"), key, "--input-key", meaning)
    _texts(file, "prompts")
    file.check_all("rl")
    kind, path = file.take("--rm-type"), file.take("--custom-rm-path")
    if path is not None:
        meaning = "slime's contract: an async function of args and a sample"
        file.put(("reward_function",), "slime_custom_rm", "--custom-rm-path", meaning)
        file.put(("reward_args", "path"), path, "--custom-rm-path")
        if file.take("--group-rm"):
            file.put(("reward_args", "grouped"), True, "--group-rm", "the function gets lists of one sample")
        file.move("--reward-key", ("reward_args", "reward_key"))
        file.move("--metadata-key", ("reward_args", "metadata_key"))
        if kind is not None:
            file.put(("reward_args", "options"), {"rm_type": kind}, "--rm-type", "args.rm_type of the function")
    elif kind in SLIME.data["rewards"]:
        arguments, meaning = SLIME.data["rewards"][kind]
        file.put(("reward_function",), "math_verify", "--rm-type", meaning)
        for name, value in arguments.items():
            file.put(("reward_args", name), value, "--rm-type")
    else:
        file.draft.leave_out("--rm-type", "refused", f"{kind}: {REWARDS}")


def _texts(file: ForeignFile, what: str) -> None:
    """Converts the order of the texts and the arguments of the chat template. `what`: their name in messages."""
    if not file.take("--rollout-shuffle"):
        why = f"is not given, but {what} are shuffled anew in every epoch"
        file.draft.leave_out("--rollout-shuffle", "refused", why)
    kwargs = file.take("--apply-chat-template-kwargs")
    try:
        kwargs = json.loads(kwargs) if isinstance(kwargs, str) else kwargs
    except ValueError:
        file.draft.leave_out("--apply-chat-template-kwargs", "refused", "is no JSON")
        return
    file.put((*DATA, "chat_template_kwargs"), kwargs or None, "--apply-chat-template-kwargs")


def _evaluation(file: ForeignFile) -> Evaluation:
    """Reads the evaluation; it is off without a period or without held-out prompts."""
    period, named = file.given("--eval-interval"), file.take("--eval-prompt-data")
    sampling = {name.replace("-", "_"): file.given(f"--eval-{name}") for name in ("temperature", "top-p", "top-k")}
    sampling["max_new_tokens"] = file.given("--eval-max-response-len")
    answers = file.given("--n-samples-per-eval-prompt")
    if period is None or not named:
        if period is not None:
            file.draft.leave_out("--eval-config", "refused", "name the held-out prompts in data_args.eval_file_name")
        return Evaluation(period or Given(0, "--eval-interval"), is_on=False)
    names = [named[0]] if len(named) == 1 else named[1::2]  # a file, or pairs of a name and a file
    file.draft.missing.append(
        "eval_samples: slime evaluates all held-out prompts: set the number of answers (default: 512)"
    )
    files = Given(names[0] if len(names) == 1 else names, "--eval-prompt-data")
    return Evaluation(period, files=files, answers=answers, sampling=sampling)


def _supervised(file: ForeignFile, updates: int) -> None:
    """Converts `--loss-type sft_loss`. Steps of the job are optimizer steps, `updates` in a rollout of slime."""
    if file.peek("--rollout-function-path") == _SFT_ROLLOUT:
        file.take("--rollout-function-path")
    for key in ("--debug-train-only", "--disable-compute-advantages-and-returns", "--n-samples-per-prompt"):
        file.take(key)
    epochs, steps = file.take("--num-epoch"), file.take("--num-rollout")
    if steps is not None:
        count, unit = optimizer_steps(steps, updates, "a rollout")
        file.put(("max_steps",), count, "--num-rollout", unit)
    else:
        file.put(("num_train_epochs",), epochs, "--num-epoch")
    aggregation = "token_mean" if file.take("--calculate-per-token-loss") else "sequence_mean"
    file.put(("loss_args", "aggregation"), aggregation, "--calculate-per-token-loss")
    file.move("--input-key", (*DATA, "messages"))
    _texts(file, "texts")
    file.draft.missing.append(
        "sequence_length: is missing: slime has no limit of texts; set the tokens of the longest one"
    )


def _checkpoints(file: ForeignFile, updates: int) -> None:
    """Converts checkpoints and the tracker. slime counts rollouts; the job has `updates` steps in each."""
    count, unit = optimizer_steps(file.take("--save-interval"), updates, "a rollout")
    file.put(("save_steps",), count, "--save-interval", unit)
    if file.take("--use-wandb"):
        file.put(("track_with",), "wandb", "--use-wandb")
        file.move_all("wandb")


def _advantages(file: ForeignFile) -> list[KlTerm]:
    """Puts the estimator of advantages; returns the KL term in rewards, if there is one."""
    key, weight = "--advantage-estimator", file.given("--kl-coef")
    name = file.take(key)
    is_raw, is_centred = file.take("--disable-rewards-normalization"), file.take("--disable-grpo-std-normalization")
    estimator = name
    if name in ("grpo", "gspo", "cispo"):
        estimator = "grpo"
        if is_raw or is_centred or file.draft.values.get("num_return_sequences_in_group") == 1:
            estimator = "reinforce"
            if not is_raw:
                centred_by = "--disable-grpo-std-normalization" if is_centred else "--n-samples-per-prompt"
                file.put(("norm_mean_type",), "group", centred_by)
        file.put(("importance_sampling",), "seq" if name == "gspo" else None, key)
        file.put(("loss_function",), "cispo" if name == "cispo" else None, key)
    elif is_raw and name == "reinforce_plus_plus_baseline":
        why = "reinforce_plus_plus_baseline always subtracts the group's mean"
        file.draft.leave_out("--disable-rewards-normalization", "refused", why)
    file.put(("adv_estimator",), "gae" if name == "ppo" else estimator, key)
    whitened, gamma = file.take("--normalize-advantages"), file.take("--gamma")
    if not str(name).startswith("reinforce_plus_plus"):
        file.put(("whiten_advantages",), bool(whitened), "--normalize-advantages")
    why = "slime's advantages of this estimator do not read it"
    if name in ("ppo", "reinforce_plus_plus"):
        file.put(("gamma",), gamma, "--gamma")
    elif gamma != 1:
        file.draft.leave_out("--gamma", "idle", why)
    if weight is None or not weight.value:
        return []
    if name == "reinforce_plus_plus":  # slime takes the kind of KL in the reward from the option of the loss
        kinds = {"k2": "k2", "k3": "k3", "low_var_kl": "k3"}
        penalty = Given(kinds.get(file.peek("--kl-loss-type"), "kl"), "--kl-loss-type")
        return [KlTerm("--kl-coef", weight, penalty, in_reward=True)]
    refused = name in ("ppo", "reinforce_plus_plus_baseline")
    if name == "ppo":
        why = "slime takes KL from the policy's advantages, not from the critic's returns; use --use-kl-loss"
    elif refused:
        why = "KL in the advantages is converted for reinforce_plus_plus alone; use --use-kl-loss"
    file.draft.leave_out("--kl-coef", "refused" if refused else "idle", why)
    return []


def _clipping(file: ForeignFile) -> Clipping:
    """Returns the bounds of the ratio; converts the aggregation of the loss and weights of the engine's samples."""
    low, high = file.given("--eps-clip"), file.given("--eps-clip-high")
    per_token = file.take("--calculate-per-token-loss")
    # Equal for rollouts of one sample, which functions of the user's need not make.
    makes_own = any(file.peek(f"--{name}-function-path") is not None for name in ("custom-generate", "rollout"))
    of_rollouts = "rollout-token-mean" if makes_own else "seq-mean-token-mean"
    file.put(("loss_agg_mode",), "token-mean" if per_token else of_rollouts, "--calculate-per-token-loss")
    corrected, cap, lowest = file.take("--use-tis"), file.take("--tis-clip"), file.take("--tis-clip-low")
    if corrected and file.peek("--custom-tis-function-path") is None:
        file.put(("loss_args", "engine_ratio_cap"), 2.0 if cap is None else cap, "--tis-clip")
        file.put(("loss_args", "engine_ratio_min"), lowest or None, "--tis-clip-low")
    if file.take("--use-rollout-logprobs"):
        file.put((ROLE, "logprob_plan"), "rollout", "--use-rollout-logprobs")
    return Clipping("--eps-clip", low, (high or low) if low else None, file.given("--eps-clip-c"))


def _kl_loss(file: ForeignFile) -> list[KlTerm]:
    """Reads the KL term of the loss; returns an empty list if it is off or has no weight."""
    used, weight, kind = file.take("--use-kl-loss"), file.given("--kl-loss-coef"), file.given("--kl-loss-type")
    unbiased = file.take("--use-unbiased-kl")
    if not (used and weight and weight.value):
        for key in ("--use-kl-loss", "--kl-loss-coef", "--kl-loss-type"):
            file.draft.leave_out(key, "idle", "there is no KL term without --use-kl-loss, or with --kl-loss-coef 0")
        return []
    # slime clamps this estimate alone at 10.
    bound = Given(10.0 if kind and kind.value == "low_var_kl" else None, "--kl-loss-type")
    gradient = Given("importance", "--use-unbiased-kl") if unbiased else None
    return [KlTerm(switch="--use-kl-loss", weight=weight, estimator=kind, gradient=gradient, bound=bound)]


def _dynamic_sampling(file: ForeignFile) -> DynamicSampling | None:
    """Reads dynamic sampling; None for another filter than slime's own, which is left out."""
    path, size = file.given("--dynamic-sampling-filter-path"), file.given("--over-sampling-batch-size")
    if path is None or str(path.value).rpartition(".")[2] != _FILTER:
        if path is not None:
            why = (
                f"{path.value}: only slime's {_FILTER} is converted: dynamic_sampling: true leaves out the same groups"
            )
            file.draft.leave_out(path.key, "refused", why)
        if size is not None:
            file.draft.leave_out(size.key, "idle", "belongs to dynamic sampling")
        return None
    meaning = "all responses are sampled to their end; slime aborts the rest when a step is full"
    most = Given(None, path.key, "slime samples without a limit")
    return DynamicSampling(Given(True, path.key), most, None if size is None else replace(size, meaning=meaning))


def _critic(file: ForeignFile) -> Critic:
    """Returns the critic: the actor's model, optimizer and batching, with the options that only the critic reads."""
    below = Draft(file.draft.source, values={ROLE: copy.deepcopy(file.draft.values[ROLE])})
    below.values["pretrain"] = file.draft.values.get("pretrain")
    below.origins = {path: key for path, key in file.draft.origins.items() if path[:2] != DATA}
    below.meanings = {path: meaning for path, meaning in file.draft.meanings.items() if path[:2] != DATA}
    for name in ("data_args", "logprob_plan"):
        below.values[ROLE].pop(name, None)
    scale_loss(below, (ROLE, "training_args"), 2, "slime's loss of the critic, which is not halved")
    if file.peek("--megatron-config-path") is not None:
        why = f"{file.take('--megatron-config-path')}: write the critic's settings into the section `critic`"
        file.draft.leave_out("--megatron-config-path", "refused", why)
    start = "slime's layer has a bias, too, which starts at 0"
    return Critic(
        below,
        head_std=Given(0.02, "the start of the value head in slime", start),
        value_clip=file.given("--value-clip"),
        warmup=file.given("--num-critic-only-steps"),
        lambd=file.given("--lambd"),
    )
