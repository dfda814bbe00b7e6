"""NeMo-RL's sections `grpo` and `loss_fn`: steps, advantages, evaluation, and the loss."""

from __future__ import annotations

import math

from roll_batching.tools.conversion.foreign_file import REWARDS, ForeignFile
from roll_batching.tools.conversion.nemo_rl_file import CORRECTIONS
from roll_batching.tools.conversion.train_infer import SECTION, nemo_rl_correction


def convert_algorithm(file: ForeignFile) -> None:
    """Converts steps, groups, advantages and evaluation."""
    for key, ours in (
        ("num_prompts_per_step", "rollout_batch_size"),
        ("num_generations_per_prompt", "num_return_sequences_in_group"),
        ("seed", "seed"),
        ("overlong_filtering", "max_len_mask"),
    ):
        file.move(f"grpo.{key}", (ours,))
    file.move("grpo.max_num_steps", ("max_steps",), meaning="ends the job; NeMo-RL also stops at max_num_epochs")
    section = "grpo.adv_estimator"
    name, minus = file.take(f"{section}.name"), file.take(f"{section}.minus_baseline")
    normalised = file.take(f"{section}.normalize_rewards")
    others = file.take(f"{section}.use_leave_one_out_baseline")
    _dynamic_sampling(file)
    for unread in ("normalize_rewards", "use_leave_one_out_baseline"):
        if file.take(f"grpo.{unread}") is not None:
            file.draft.leave_out(f"grpo.{unread}", "idle", f"{section}.{unread} is what advantages read")
    key = f"{section}.name"
    if name == "reinforce_plus_plus":
        file.draft.put(("adv_estimator",), f"{name}_baseline" if minus else name, key)
    elif name != "grpo":
        file.draft.put(("adv_estimator",), name, key)
    elif normalised:
        file.draft.put(("adv_estimator",), "grpo_leave_one_out" if others else "grpo", key)
    else:
        file.draft.put(("adv_estimator",), "rloo" if others else "reinforce", key)
        if not others:
            file.draft.put(("norm_mean_type",), "group", f"{section}.normalize_rewards")
    _reward_shaping(file)
    file.expect_off("reward_penalties", why=REWARDS)
    if file.peek("grpo.max_rollout_turns", 1) not in (None, 1):
        turns = file.take("grpo.max_rollout_turns")
        file.draft.leave_out("grpo.max_rollout_turns", "refused", f"{turns}: rollouts have one turn")
    for name in ("max_rollout_turns", "max_num_epochs"):
        if file.take(f"grpo.{name}") is not None:
            file.draft.leave_out(f"grpo.{name}", "idle", "max_steps ends the job; rollouts have one turn")
    _clipped(file)
    convert_evaluation(file)


def _dynamic_sampling(file: ForeignFile) -> None:
    most, multiplier = file.take("grpo.dynamic_sampling_max_gen_batches"), file.take("grpo.batch_multiplier")
    if file.take("grpo.use_dynamic_sampling") is not True:
        for name, value in (("dynamic_sampling_max_gen_batches", most), ("batch_multiplier", multiplier)):
            if value is not None:
                file.draft.leave_out(f"grpo.{name}", "idle", "belongs to use_dynamic_sampling")
        return
    text = "groups are kept whole; NeMo-RL drops single responses whose others are equal, such as the only right one"
    text = text if file.peek("grpo.use_leave_one_out_baseline") else ""
    file.draft.put(("dynamic_sampling",), True, "grpo.use_dynamic_sampling", text)
    if most is not None:
        text = "one more: NeMo-RL stops after the batch that follows its limit"
        file.draft.put(("dynamic_sampling_max_batches",), most + 1, "grpo.dynamic_sampling_max_gen_batches", text)
    prompts = file.draft.values.get("rollout_batch_size")
    if multiplier is not None and isinstance(prompts, int) and multiplier != 1:
        text, size = "batch_multiplier x num_prompts_per_step", float(prompts * multiplier)
        most_prompts = int(size) if math.isfinite(size) else size  # which the loader refuses
        file.draft.put(("dynamic_sampling_batch_size",), most_prompts, "grpo.batch_multiplier", text)


def _reward_shaping(file: ForeignFile) -> None:
    scaling, shaping = "grpo.reward_scaling", "grpo.reward_shaping"
    if file.peek(f"{scaling}.enabled") is True:
        file.take(f"{scaling}.enabled")
        for name in ("source_min", "source_max", "target_min", "target_max"):
            file.move(f"{scaling}.{name}", ("reward_scaling", name))
    file.expect_off(scaling, why=REWARDS)
    coefficient = file.take(f"{shaping}.stop_properly_penalty_coef")
    if file.peek(f"{shaping}.enabled") is True and coefficient is None:
        file.take(f"{shaping}.enabled")
        for name, ours in (("overlong_buffer_length", "length"), ("overlong_buffer_penalty", "penalty"),
                           ("max_response_length", "response_length")):  # fmt: skip
            file.move(f"{shaping}.{name}", ("overlong_buffer", ours))
    file.expect_off(shaping, why=REWARDS)


def _clipped(file: ForeignFile) -> None:
    low, high = file.take("grpo.advantage_clip_low"), file.take("grpo.advantage_clip_high")
    if high is not None and low is not None and low == -high:
        file.draft.put(("advantage_clip",), high, "grpo.advantage_clip_high")
    elif low is not None or high is not None:
        text = f"from {low} to {high}: advantage_clip has one bound for both sides"
        file.draft.leave_out("grpo.advantage_clip_high", "refused", text)


def convert_evaluation(file: ForeignFile, section: str = "grpo") -> None:
    """Converts the evaluation in `section`."""
    period, most = file.take(f"{section}.val_period", 0), file.take(f"{section}.max_val_samples")
    size = file.take(f"{section}.val_batch_size")
    wanted = any([file.take(f"{section}.val_at_start"), file.take(f"{section}.val_at_end"), period and period > 0])
    if file.take(f"{section}.val_start_at") not in (None, -1, 0):
        file.draft.leave_out(f"{section}.val_start_at", "refused", "evaluation begins before the first step")
    if not wanted:
        file.draft.put(("eval_samples",), 0, f"{section}.val_period", "there is no evaluation")
        return
    text = "the policy is also evaluated before the first step and after the last"
    file.draft.put(("eval_steps",), max(0, period or 0), f"{section}.val_period", text)
    if isinstance(most, int) and most > 0:
        whole = most // size * size if isinstance(size, int) and 0 < size <= most else most
        text = "prompts of an evaluation, repeated if there are fewer; NeMo-RL stops at the last one"
        file.draft.put(("eval_samples",), whole, f"{section}.max_val_samples", text)


def convert_loss(file: ForeignFile) -> None:
    """Converts the policy loss, the reference and the engine correction."""
    weight = file.take("loss_fn.reference_policy_kl_penalty")
    if file.take("loss_fn.use_kl_in_reward") and weight:
        weight = _kl_in_reward(file, weight)
    if weight:
        file.draft.put(("use_kl_loss",), True, "loss_fn.reference_policy_kl_penalty")
        file.draft.put(("kl_loss_coef",), weight, "loss_fn.reference_policy_kl_penalty")
        file.draft.put(("reference",), {}, "loss_fn.reference_policy_kl_penalty")
        file.move("loss_fn.reference_policy_kl_type", ("loss_args", "kl_estimator"))
        file.move("loss_fn.kl_output_clamp_value", ("kl_loss_bound",))
        weighted = file.take("loss_fn.use_on_policy_kl_approximation")
        key = "loss_fn.use_on_policy_kl_approximation" if weighted else "loss_fn.reference_policy_kl_penalty"
        gradient = "importance" if weighted else "score_function"
        text = "weighted by the ratio to the old policy; NeMo-RL: to the engine's" if weighted else ""
        file.draft.put(("loss_args", "kl_gradient"), gradient, key, text)
    for name in ("reference_policy_kl_type", "kl_output_clamp_value"):
        if file.take(f"loss_fn.{name}") is not None:
            file.draft.leave_out(f"loss_fn.{name}", "idle", "reference_policy_kl_penalty is 0")
    low, high = file.peek("loss_fn.ratio_clip_min"), file.peek("loss_fn.ratio_clip_max")
    if low is not None and high is not None:
        file.draft.put(("use_pg_clip_range",), True, "loss_fn.ratio_clip_min")
        file.move("loss_fn.ratio_clip_min", ("pg_clip_low",))
        file.move("loss_fn.ratio_clip_max", ("pg_clip_high",))
    dual = file.take("loss_fn.ratio_clip_c")
    if file.take("loss_fn.use_cispo"):
        file.draft.put(("loss_function",), "cispo", "loss_fn.use_cispo")
    elif dual is not None:
        file.draft.put(("dual_clip_loss",), True, "loss_fn.ratio_clip_c")
        file.draft.put(("dual_clip_ratio",), dual, "loss_fn.ratio_clip_c")
    file.move(
        "loss_fn.token_level_loss",
        ("loss_agg_mode",),
        lambda tokens: "token-mean" if tokens else "seq-mean-token-mean",
    )
    if file.take("loss_fn.sequence_level_importance_ratios"):
        file.draft.put(("importance_sampling",), "seq", "loss_fn.sequence_level_importance_ratios")
    _ratio(file)
    _engine_correction(file)
    if file.take("loss_fn.kl_input_clamp_value") is not None:
        file.draft.leave_out("loss_fn.kl_input_clamp_value", "idle", "log-ratios are bounded at 20 before exp")
    if file.take("loss_fn.use_on_policy_kl_approximation") is not None:
        file.draft.leave_out("loss_fn.use_on_policy_kl_approximation", "idle", "reference_policy_kl_penalty is 0")


def check_forced_ratio(file: ForeignFile) -> None:
    """Leaves out `force_on_policy_ratio` where a step's samples are not one global batch, which NeMo-RL refuses."""
    key = "loss_fn.force_on_policy_ratio"
    prompts, responses = file.peek("grpo.num_prompts_per_step"), file.peek("grpo.num_generations_per_prompt")
    size = file.peek("policy.train_global_batch_size")
    if not (isinstance(prompts, int) and isinstance(responses, int) and isinstance(size, int)):
        return
    if file.peek(key) and size != prompts * responses:
        file.take(key)
        text = f"needs one optimizer step: train_global_batch_size {size} is not {prompts} x {responses} samples"
        file.draft.leave_out(key, "refused", text)


def _ratio(file: ForeignFile) -> None:
    """Settings that disable the ratio to the old policy."""
    if file.take("loss_fn.disable_ppo_ratio"):
        file.draft.put(("loss_function",), "gpg", "loss_fn.disable_ppo_ratio")
    key = "loss_fn.force_on_policy_ratio"
    if file.take(key):
        if file.peek("grpo.async_grpo.enabled") or file.peek("async_rl.sampler"):
            file.draft.leave_out(key, "idle", "the only optimizer step of a rollout has this ratio anyway")
        else:
            text = "the only optimizer step of a rollout has the ratio 1"
            file.draft.put(("actor_train", "logprob_plan"), "none", key, text)


def _kl_of_tokens(file: ForeignFile, weight: float) -> float:
    """PPO's KL term in the rewards of tokens; returns its weight in the loss, 0."""
    key = "loss_fn.use_kl_in_reward"
    if file.take("grpo.skip_reference_policy_logprobs_calculation"):
        file.draft.leave_out(key, "idle", "skip_reference_policy_logprobs_calculation is on: there is no KL term")
        return 0.0
    file.draft.put(("add_token_level_kl",), True, key)
    file.draft.put(("init_kl_coef",), weight, "loss_fn.reference_policy_kl_penalty")
    file.draft.put(("reference",), {}, key)
    file.move("loss_fn.reference_policy_kl_type", ("kl_penalty",))
    return 0.0


def _kl_in_reward(file: ForeignFile, weight: float) -> float:
    """Leaves out the KL term in the reward, but for PPO; returns its weight in the loss, 0."""
    if file.draft.values.get("adv_estimator") == "gae":
        return _kl_of_tokens(file, weight)
    if str(file.draft.values.get("adv_estimator", "")).startswith("reinforce_plus_plus"):
        text = "add_token_level_kl is similar: it also counts for earlier tokens; in NeMo-RL only for its own token"
        file.draft.leave_out("loss_fn.use_kl_in_reward", "refused", text)
    else:
        text = "removes KL from the loss, and only reinforce_plus_plus adds it to the reward: there is no KL term"
        file.draft.leave_out("loss_fn.use_kl_in_reward", "idle", text)
    return 0.0


_NO_CAP = 1e9
"""Larger than exp(20), the largest possible weight."""


def _engine_correction(file: ForeignFile) -> None:
    key = "loss_fn.truncated_importance_sampling"
    corrected = file.take("loss_fn.use_importance_sampling_correction")
    kind, cap = file.take(f"{key}_type"), file.take(f"{key}_ratio")
    lowest, error = file.take(f"{key}_ratio_min"), file.take("grpo.seq_logprob_error_threshold")
    per_sequence = "importance_sampling" in file.draft.values
    if error is not None or (corrected and per_sequence):
        section = nemo_rl_correction(kind if corrected else "none", cap, lowest, per_sequence=per_sequence, error=error)
        origin = f"{key}_type" if error is None else "grpo.seq_logprob_error_threshold"
        file.draft.put((SECTION,), section, origin)
    elif corrected and cap is None:
        text = "no cap: log-ratios are bounded at 20, so no weight reaches it"
        name = "loss_fn.use_importance_sampling_correction"
        file.draft.put(("loss_args", "engine_ratio_cap"), _NO_CAP, name, text)
    elif corrected:
        file.draft.put(("loss_args", "engine_ratio_cap"), cap, f"{key}_ratio")
        if lowest is not None:
            file.draft.put(("loss_args", "engine_ratio_min"), lowest, f"{key}_ratio_min")
        if CORRECTIONS[kind] != "truncate":
            file.draft.put(("loss_args", "engine_correction"), CORRECTIONS[kind], f"{key}_type")
