"""Translates the objective of slime's scripts: advantages, and the loss of a step."""

from __future__ import annotations

import copy

from roll_batching.tools.conversion.critics import HEAD, ROLE, put_critic, scale_loss
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.slime_options import SlimeFile

_ROLE = "actor_train"
_FILTER = "check_reward_nonzero_std"


def put_objective(file: SlimeFile) -> None:
    """Puts our keys for slime's estimator of advantages and for its loss."""
    if file.peek("--advantage-estimator") == "ppo":
        _critic(file)
    _advantages(file)
    _loss(file)
    _dynamic_sampling(file)


def _dynamic_sampling(file: SlimeFile) -> None:
    path, size = file.take("--dynamic-sampling-filter-path"), file.take("--over-sampling-batch-size")
    if path is None or str(path).rpartition(".")[2] != _FILTER:
        if path is not None:
            text = f"{path}: dynamic_sampling leaves out groups with equal rewards, as slime's {_FILTER}"
            file.draft.leave_out("--dynamic-sampling-filter-path", "refused", text)
        if size is not None:
            file.draft.leave_out("--over-sampling-batch-size", "idle", "belongs to dynamic sampling")
        return
    file.put(("dynamic_sampling",), True, "--dynamic-sampling-filter-path")
    text = "slime samples without a limit"
    file.draft.put(("dynamic_sampling_max_batches",), None, "--dynamic-sampling-filter-path", text)
    text = "all responses are sampled to their end; slime aborts the rest when a step is full"
    file.put(("dynamic_sampling_batch_size",), size, "--over-sampling-batch-size", text)


def _advantages(file: SlimeFile) -> None:
    name = file.take("--advantage-estimator")
    raw, centred = file.take("--disable-rewards-normalization"), file.take("--disable-grpo-std-normalization")
    single = file.draft.values.get("num_return_sequences_in_group") == 1
    key = "--advantage-estimator"
    if name in ("grpo", "gspo", "cispo"):
        if raw or centred or single:
            file.put(("adv_estimator",), "reinforce", key)
            if not raw:
                text = "--disable-grpo-std-normalization" if centred else "--n-samples-per-prompt"
                file.put(("norm_mean_type",), "group", text)
        else:
            file.put(("adv_estimator",), "grpo", key)
        if name == "gspo":
            file.put(("importance_sampling",), "seq", key)
        if name == "cispo":
            file.put(("loss_function",), "cispo", key)
    elif name == "ppo":
        file.put(("adv_estimator",), "gae", key)
    elif name is not None:
        file.put(("adv_estimator",), name, key)
        if raw and name == "reinforce_plus_plus_baseline":
            text = "reinforce_plus_plus_baseline always subtracts the group's mean"
            file.draft.leave_out("--disable-rewards-normalization", "refused", text)
    whitened = file.take("--normalize-advantages")
    if not str(name).startswith("reinforce_plus_plus"):
        file.put(("whiten_advantages",), bool(whitened), "--normalize-advantages")
    gamma, weight = file.take("--gamma"), file.take("--kl-coef")
    if name == "ppo":
        file.put(("gamma",), gamma, "--gamma")
        if weight:
            text = "slime takes KL from the policy's advantages, not from the critic's returns; use --use-kl-loss"
            file.draft.leave_out("--kl-coef", "refused", text)
    elif name == "reinforce_plus_plus":
        file.put(("gamma",), gamma, "--gamma")
        if weight:
            file.put(("add_token_level_kl",), True, "--kl-coef")
            file.put(("init_kl_coef",), weight, "--kl-coef")
            kinds = {"k1": "kl", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
            file.put(("kl_penalty",), kinds.get(file.peek("--kl-loss-type"), "kl"), "--kl-loss-type")
            file.put(("reference",), {}, "--kl-coef")
    else:
        if weight:
            why = "slime's advantages of this estimator do not read it"
            if name == "reinforce_plus_plus_baseline":
                why = "KL in the advantages is converted for reinforce_plus_plus alone; use --use-kl-loss"
            file.draft.leave_out("--kl-coef", "refused" if name == "reinforce_plus_plus_baseline" else "idle", why)
        if gamma != 1:
            file.draft.leave_out("--gamma", "idle", "slime's advantages of this estimator do not read it")


def _critic(file: SlimeFile) -> None:
    """The critic, with the actor's model, optimizer and batching, and the keys that only it reads."""
    below = Draft(file.draft.source, values={_ROLE: copy.deepcopy(file.draft.values[_ROLE])})
    below.values["pretrain"] = file.draft.values.get("pretrain")
    below.origins = {path: key for path, key in file.draft.origins.items() if path[:2] != (_ROLE, "data_args")}
    below.meanings = {path: text for path, text in file.draft.meanings.items() if path[:2] != (_ROLE, "data_args")}
    below.values[_ROLE].pop("data_args", None)
    scale_loss(below, (_ROLE, "training_args"), 2, "slime's loss of the critic, which is not halved")
    put_critic(file.draft, below, str)
    file.move("--value-clip", ("value_clip",))
    file.move("--lambd", ("lambd",))
    file.move("--num-critic-only-steps", ("critic_warmup",))
    key = "the start of the value head in slime"
    file.put(HEAD, 0.02, key, "slime's layer has a bias, too, which starts at 0")
    file.draft.defaults.add(key)
    if file.peek("--megatron-config-path") is not None:
        text = f"{file.take('--megatron-config-path')}: write the critic's settings into the section `{ROLE}`"
        file.draft.leave_out("--megatron-config-path", "refused", text)


def _loss(file: SlimeFile) -> None:
    low, high = file.take("--eps-clip"), file.take("--eps-clip-high")
    if low is not None:
        file.put(("use_pg_clip_range",), True, "--eps-clip")
        file.put(("pg_clip_low",), low, "--eps-clip")
        file.put(("pg_clip_high",), low if high is None else high, "--eps-clip" if high is None else "--eps-clip-high")
    if (dual := file.take("--eps-clip-c")) is not None:
        file.put(("dual_clip_loss",), True, "--eps-clip-c")
        file.put(("dual_clip_ratio",), dual, "--eps-clip-c")
    whole = file.take("--calculate-per-token-loss")
    file.put(("loss_agg_mode",), "token-mean" if whole else "seq-mean-token-mean", "--calculate-per-token-loss")
    file.move("--entropy-coef", ("entropy_loss_coef",))
    used, weight, kind = file.take("--use-kl-loss"), file.take("--kl-loss-coef"), file.take("--kl-loss-type")
    unbiased = file.take("--use-unbiased-kl")
    if used and weight:
        file.put(("use_kl_loss",), True, "--use-kl-loss")
        file.put(("kl_loss_coef",), weight, "--kl-loss-coef")
        file.put(("reference",), {}, "--use-kl-loss")
        file.put(("loss_args", "kl_estimator"), "k3" if kind == "low_var_kl" else kind, "--kl-loss-type")
        file.draft.put(("kl_loss_bound",), 10.0 if kind == "low_var_kl" else None, "--kl-loss-type")
        if unbiased:
            file.put(("loss_args", "kl_gradient"), "importance", "--use-unbiased-kl")
    else:
        for key in ("--use-kl-loss", "--kl-loss-coef", "--kl-loss-type"):
            file.draft.leave_out(key, "idle", "there is no KL term without --use-kl-loss, or with --kl-loss-coef 0")
    corrected = file.take("--use-tis")
    cap, lowest = file.take("--tis-clip"), file.take("--tis-clip-low")
    if corrected and file.peek("--custom-tis-function-path") is None:
        file.put(("loss_args", "engine_ratio_cap"), 2.0 if cap is None else cap, "--tis-clip")
        if lowest:
            file.put(("loss_args", "engine_ratio_min"), lowest, "--tis-clip-low")
    if file.take("--use-rollout-logprobs"):
        file.put((_ROLE, "logprob_plan"), "rollout", "--use-rollout-logprobs")
