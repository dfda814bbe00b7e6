"""verl's section `algorithm` and the loss of its actor."""

from __future__ import annotations

from typing import Any

from roll_batching.tools.conversion.foreign_file import ForeignFile
from roll_batching.tools.conversion.train_infer import SECTION, verl_filters, verl_weight
from roll_batching.tools.conversion.verl_options import ACTOR, ROLLOUT

_ESTIMATORS = {
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "grpo_passk": "pass_at_k",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
"""Estimators of verl with another name here."""
_LOSSES: dict[str, tuple[str, str]] = {
    "vanilla": ("policy", ""),
    "gspo": ("policy", "seq-mean-token-mean"),
    "gpg": ("gpg", ""),
    "cispo": ("cispo", ""),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "geo_mean": ("gmpo", "seq-mean-token-mean"),
    "clip_cov": ("clip_cov", ""),
    "kl_cov": ("kl_cov", ""),
}
"""By loss_mode, our loss and the aggregation that verl's code sets, whatever loss_agg_mode says."""
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_CORRECTION = "algorithm.rollout_correction"


def convert_advantages(file: ForeignFile) -> None:
    """Converts the estimator, its normalisation, and the KL term in the reward."""
    name = file.take("algorithm.adv_estimator")
    scaled = file.take("algorithm.norm_adv_by_std_in_grpo")
    single = file.draft.values.get("num_return_sequences_in_group") == 1 and name in ("grpo", "grpo_vectorized", "rloo")
    name = _ESTIMATORS.get(str(name), name)
    if single:
        text = "a group of one has no other to compare with: the advantage is the reward, as verl's is"
        file.put(("adv_estimator",), "reinforce", "algorithm.adv_estimator", text)
    elif name == "grpo" and scaled is False:
        file.put(("adv_estimator",), "reinforce", "algorithm.adv_estimator")
        file.put(("norm_mean_type",), "group", "algorithm.norm_adv_by_std_in_grpo")
    else:
        file.put(("adv_estimator",), name, "algorithm.adv_estimator")
    gamma = file.take("algorithm.gamma")
    if str(name) in ("reinforce_plus_plus", "gae"):
        file.put(("gamma",), gamma, "algorithm.gamma")
    elif gamma not in (None, 1):
        file.draft.leave_out("algorithm.gamma", "idle", f"verl's {name} does not read it")
    weight, kind = file.take("algorithm.kl_ctrl.kl_coef"), file.take("algorithm.kl_ctrl.type")
    used = file.take("algorithm.use_kl_in_reward")
    if not used or (not weight and kind == "fixed"):
        return
    if name not in ("reinforce_plus_plus", "gae"):
        text = "lowers the reward of a response by its KL before groups are compared; use_kl_loss puts KL into the loss"
        file.draft.leave_out("algorithm.use_kl_in_reward", "refused", text)
        return
    file.put(("add_token_level_kl",), True, "algorithm.use_kl_in_reward")
    file.put(("init_kl_coef",), weight, "algorithm.kl_ctrl.kl_coef")
    file.put(("reference",), {}, "algorithm.use_kl_in_reward")
    penalty = file.take("algorithm.kl_penalty")
    file.put(("kl_penalty",), "k3" if penalty == "low_var_kl" else penalty, "algorithm.kl_penalty")
    if kind == "adaptive":
        file.move("algorithm.kl_ctrl.target_kl", ("target_kl",))
        file.move("algorithm.kl_ctrl.horizon", ("kl_horizon",))


def convert_dynamic_sampling(file: ForeignFile) -> None:
    """Converts `filter_groups`, of verl's recipes, and the size of their generation batches."""
    section = "algorithm.filter_groups"
    enabled, metric = file.take(f"{section}.enable"), file.take(f"{section}.metric")
    most, size = file.take(f"{section}.max_num_gen_batches"), file.take("data.gen_batch_size")
    if enabled is not True:
        for key, value in ((f"{section}.enable", enabled), (f"{section}.metric", metric),
                           (f"{section}.max_num_gen_batches", most), ("data.gen_batch_size", size)):  # fmt: skip
            if value is not None:
                file.draft.leave_out(key, "idle", "groups are not filtered")
        return
    text = f"compares rewards; verl: {metric}" if metric is not None else ""
    file.put(("dynamic_sampling",), True, f"{section}.enable", text)
    if metric is not None:
        file.draft.leave_out(f"{section}.metric", "idle", "dynamic_sampling compares rewards")
    has_limit = most is not None and most > 0
    text = "" if has_limit else "verl has no limit where max_num_gen_batches is 0"
    file.draft.put(
        ("dynamic_sampling_max_batches",), most if has_limit else None, f"{section}.max_num_gen_batches", text
    )
    file.put(("dynamic_sampling_batch_size",), size, "data.gen_batch_size")


def convert_loss(file: ForeignFile) -> None:
    """Converts the policy loss, its aggregation, the KL term and the rollout correction."""
    mode = file.take(f"{ACTOR}.policy_loss.loss_mode")
    key = f"{ACTOR}.policy_loss.loss_mode"
    aggregation, chosen = file.take(f"{ACTOR}.loss_agg_mode"), ""
    if mode is not None and mode not in _LOSSES:
        file.draft.leave_out(key, "refused", f"{mode}: there is no such loss here; {', '.join(_LOSSES)} are converted")
    else:
        loss, chosen = _LOSSES[mode or "vanilla"]
        file.put(("loss_function",), loss, key)
    if chosen:
        text = f"verl's {mode} always aggregates like this, and only its KL and entropy as loss_agg_mode says"
        file.put(("loss_agg_mode",), chosen, key, text)
        if aggregation not in (None, chosen) and f"{ACTOR}.loss_agg_mode" not in file.draft.defaults:
            file.draft.leave_out(f"{ACTOR}.loss_agg_mode", "idle", f"verl's {mode} sets it to {chosen}")
    else:
        text = ""
        if aggregation == "seq-mean-token-sum-norm" and file.peek(f"{ACTOR}.loss_scale_factor") is None:
            text = (
                "divided by response_length; verl: by the longest response of a micro-batch (loss_scale_factor: null)"
            )
        file.put(("loss_agg_mode",), aggregation, f"{ACTOR}.loss_agg_mode", text)
    if (chosen or aggregation) != "token-sum":
        file.move(f"{ACTOR}.loss_scale_factor", ("loss_agg_length",))
    elif file.take(f"{ACTOR}.loss_scale_factor") is not None:
        file.draft.leave_out(f"{ACTOR}.loss_scale_factor", "idle", "verl's token-sum does not read it")
    _clip(file, mode or "vanilla")
    file.move(f"{ACTOR}.entropy_coeff", ("entropy_loss_coef",))
    _kl(file)
    _correction(file)


def _clip(file: ForeignFile, mode: str) -> None:
    both = file.take(f"{ACTOR}.clip_ratio")
    low, high = file.take(f"{ACTOR}.clip_ratio_low"), file.take(f"{ACTOR}.clip_ratio_high")
    given = f"{ACTOR}.clip_ratio" not in file.draft.defaults
    if given and low is not None and high is not None and both not in (low, high):
        text = "verl reads it only where clip_ratio_low or clip_ratio_high is null, and both are 0.2 unless set"
        file.draft.leave_out(f"{ACTOR}.clip_ratio", "idle", text)
    dual = file.take(f"{ACTOR}.clip_ratio_c")
    if mode in ("vanilla", "gspo", "cispo", "geo_mean", "clip_cov"):
        file.put(("use_pg_clip_range",), True, f"{ACTOR}.clip_ratio_low")
        for name, value in (("low", low), ("high", high)):
            key = f"{ACTOR}.clip_ratio" if value is None else f"{ACTOR}.clip_ratio_{name}"
            value = both if value is None else value
            unlimited = name == "low" and mode != "geo_mean" and isinstance(value, int | float) and value > 1
            text = f"{value}, which clips no ratio, as 1 does not" if unlimited else ""
            file.put((f"pg_clip_{name}",), 1.0 if unlimited else value, key, text)
    if mode == "vanilla":
        file.put(("dual_clip_loss",), True, f"{ACTOR}.clip_ratio_c")
        file.put(("dual_clip_ratio",), dual, f"{ACTOR}.clip_ratio_c")
    if mode == "gspo":
        file.put(("importance_sampling",), "seq-token", f"{ACTOR}.policy_loss.loss_mode")
    own: dict[str, dict[str, str]] = {
        "sapo": {"tau_pos": "temperature_positive", "tau_neg": "temperature_negative"},
        "clip_cov": {
            "policy_loss.clip_cov_ratio": "share",
            "policy_loss.clip_cov_lb": "lowest",
            "policy_loss.clip_cov_ub": "highest",
        },
        "kl_cov": {"policy_loss.kl_cov_ratio": "share", "policy_loss.ppo_kl_coef": "penalty"},
    }
    for key, ours in own.get(mode, {}).items():
        file.move(f"{ACTOR}.{key}", ("loss_args", ours))


def _kl(file: ForeignFile) -> None:
    used, weight = file.take(f"{ACTOR}.use_kl_loss"), file.take(f"{ACTOR}.kl_loss_coef")
    kind: Any = file.take(f"{ACTOR}.kl_loss_type")
    if not used:
        for name in ("kl_loss_coef", "kl_loss_type"):
            file.draft.leave_out(f"{ACTOR}.{name}", "idle", "use_kl_loss is off")
        return
    file.put(("use_kl_loss",), True, f"{ACTOR}.use_kl_loss")
    file.put(("kl_loss_coef",), weight, f"{ACTOR}.kl_loss_coef")
    file.put(("reference",), {}, f"{ACTOR}.use_kl_loss")
    file.move("actor_rollout_ref.ref.model.path", ("reference", "model_args", "model_name_or_path"))
    base = str(kind).removesuffix("+")
    file.put(("loss_args", "kl_estimator"), _KL.get(base, kind), f"{ACTOR}.kl_loss_type")
    if base != kind and kind is not None and _KL.get(base) != "k2":
        file.put(("loss_args", "kl_gradient"), "straight_through", f"{ACTOR}.kl_loss_type")


def _correction(file: ForeignFile) -> None:
    """`algorithm.rollout_correction`: weights of the engine's samples, and old log-probs of the engine."""
    kind, limit = file.take(f"{_CORRECTION}.rollout_is"), file.take(f"{_CORRECTION}.rollout_is_threshold")
    bypassed, loss = file.take(f"{_CORRECTION}.bypass_mode"), file.take(f"{_CORRECTION}.loss_type")
    if bypassed:
        key = f"{_CORRECTION}.bypass_mode"
        file.put(("actor_train", "logprob_plan"), "rollout", key)
        if loss not in (None, "ppo_clip"):
            file.draft.leave_out(f"{_CORRECTION}.loss_type", "refused", f"{loss}: the loss is the one of loss_function")
    normalize = bool(file.take(f"{_CORRECTION}.rollout_is_batch_normalize"))
    modes, bounds = file.take(f"{_CORRECTION}.rollout_rs"), file.take(f"{_CORRECTION}.rollout_rs_threshold")
    for name, given in (("rollout_is", kind), ("rollout_rs", modes)):
        if bypassed and given is not None:
            text = "bypass_mode takes the engine's log-probs for old ones: there is no ratio before the update"
            file.draft.leave_out(f"{_CORRECTION}.{name}", "refused", text)
    filters: list[dict[str, Any]] = []
    if kind is not None and not bypassed:
        try:
            weight, filters = verl_weight(kind, limit, normalize)
            file.put((SECTION, "is_weight"), weight, f"{_CORRECTION}.rollout_is")
        except ValueError:
            text = f"{limit!r}: write a number, or two as 0.5_2.0"
            file.draft.leave_out(f"{_CORRECTION}.rollout_is_threshold", "refused", text)
    if modes is not None and not bypassed:
        try:
            filters = [*filters, *verl_filters(str(modes), bounds)]
        except (ValueError, ZeroDivisionError) as error:
            file.draft.leave_out(f"{_CORRECTION}.rollout_rs", "refused", str(error))
    if filters:
        file.put((SECTION, "filters"), filters, f"{_CORRECTION}.{'rollout_is' if modes is None else 'rollout_rs'}")
    if file.take(f"{ROLLOUT}.calculate_log_probs") is False:
        file.draft.leave_out(f"{ROLLOUT}.calculate_log_probs", "idle", "log-probs of the engine are always kept")
