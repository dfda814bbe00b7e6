"""NeMo-RL's sections `grpo` and `loss_fn`: how rewards become advantages, and these a loss."""

from __future__ import annotations

from roll_batching.jobs.conversion.nemo_rl_given import REWARDS, Given
from roll_batching.jobs.conversion.nemo_rl_kinds import CORRECTIONS


def algorithm(given: Given) -> None:
    """Steps, groups, advantages, evaluation."""
    for key, ours in (
        ("num_prompts_per_step", "rollout_batch_size"),
        ("num_generations_per_prompt", "num_return_sequences_in_group"),
        ("seed", "seed"),
        ("overlong_filtering", "max_len_mask"),
    ):
        given.move(f"grpo.{key}", (ours,))
    given.move("grpo.max_num_steps", ("max_steps",), meaning="ends the job alone; there, max_num_epochs ends it, too")
    section = "grpo.adv_estimator"
    name, minus = given.take(f"{section}.name"), given.take(f"{section}.minus_baseline")
    normalised = given.take(f"{section}.normalize_rewards")
    others = given.take(f"{section}.use_leave_one_out_baseline")
    for unread in ("normalize_rewards", "use_leave_one_out_baseline"):
        if given.take(f"grpo.{unread}") is not None:
            given.draft.leave_out(f"grpo.{unread}", "idle", f"{section}.{unread} is what advantages read")
    key = f"{section}.name"
    if name == "reinforce_plus_plus":
        given.draft.put(("adv_estimator",), f"{name}_baseline" if minus else name, key)
    elif name != "grpo":
        given.draft.put(("adv_estimator",), name, key)
    elif normalised:
        text = "mean and deviation of the whole group; there, those of the others in it" if others else ""
        given.draft.put(("adv_estimator",), "grpo", key, text)
    else:
        given.draft.put(("adv_estimator",), "rloo" if others else "reinforce", key)
        if not others:
            given.draft.put(("norm_mean_type",), "group", f"{section}.normalize_rewards")
    given.off("grpo.use_dynamic_sampling", why="prompts are not sampled again; drop_zero_advantage_groups is near")
    given.off("grpo.reward_scaling", "grpo.reward_shaping", "reward_penalties", why=REWARDS)
    for name in ("dynamic_sampling_max_gen_batches", "batch_multiplier"):
        if given.take(f"grpo.{name}") is not None:
            given.draft.leave_out(f"grpo.{name}", "idle", "belongs to use_dynamic_sampling")
    if given.peek("grpo.max_rollout_turns", 1) not in (None, 1):
        turns = given.take("grpo.max_rollout_turns")
        given.draft.leave_out("grpo.max_rollout_turns", "refused", f"{turns}: rollouts have one turn")
    for name in ("max_rollout_turns", "max_num_epochs"):
        if given.take(f"grpo.{name}") is not None:
            given.draft.leave_out(f"grpo.{name}", "idle", "max_steps ends the job; rollouts have one turn")
    _clipped(given)
    _evaluation(given)


def _clipped(given: Given) -> None:
    low, high = given.take("grpo.advantage_clip_low"), given.take("grpo.advantage_clip_high")
    if high is not None and low is not None and low == -high:
        given.draft.put(("advantage_clip",), high, "grpo.advantage_clip_high")
    elif low is not None or high is not None:
        text = f"from {low} to {high}: advantage_clip has one bound for both sides"
        given.draft.leave_out("grpo.advantage_clip_high", "refused", text)


def _evaluation(given: Given) -> None:
    period, most = given.take("grpo.val_period", 0), given.take("grpo.max_val_samples")
    size = given.take("grpo.val_batch_size")
    wanted = any([given.take("grpo.val_at_start"), given.take("grpo.val_at_end"), period and period > 0])
    if given.take("grpo.val_start_at") not in (None, -1, 0):
        given.draft.leave_out("grpo.val_start_at", "refused", "evaluations begin before the first step")
    if not wanted:
        given.draft.put(("eval_samples",), 0, "grpo.val_period", "there is no evaluation")
        return
    text = "the policy is evaluated before the first step and after the last, too"
    given.draft.put(("eval_steps",), max(0, period or 0), "grpo.val_period", text)
    if isinstance(most, int) and most > 0:
        whole = most // size * size if isinstance(size, int) and 0 < size <= most else most
        text = "prompts of an evaluation, in turn again where there are fewer; there, no more than there are"
        given.draft.put(("eval_samples",), whole, "grpo.max_val_samples", text)


def loss(given: Given) -> None:
    """The policy's loss, its reference, its correction for the engine."""
    weight = given.take("loss_fn.reference_policy_kl_penalty")
    if given.take("loss_fn.use_kl_in_reward") and weight:
        weight = _kl_in_reward(given)
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
    _ratio(given)
    _engine_correction(given)
    if given.take("loss_fn.kl_input_clamp_value") is not None:
        given.draft.leave_out("loss_fn.kl_input_clamp_value", "idle", "log-ratios are bounded at 20 before exp")
    if given.take("loss_fn.use_on_policy_kl_approximation") is not None:
        given.draft.leave_out("loss_fn.use_on_policy_kl_approximation", "idle", "reference_policy_kl_penalty is 0")


def check_forced_ratio(given: Given) -> None:
    """Leaves out `force_on_policy_ratio` where a step's samples are not one global batch, which NeMo-RL refuses."""
    key = "loss_fn.force_on_policy_ratio"
    prompts, responses = given.peek("grpo.num_prompts_per_step"), given.peek("grpo.num_generations_per_prompt")
    size = given.peek("policy.train_global_batch_size")
    if not (isinstance(prompts, int) and isinstance(responses, int) and isinstance(size, int)):
        return
    if given.peek(key) and size != prompts * responses:
        given.take(key)
        text = f"needs one optimizer step: train_global_batch_size {size} is not {prompts} x {responses} samples"
        given.draft.leave_out(key, "refused", text)


def _ratio(given: Given) -> None:
    """Switches that do away with the ratio to the old policy."""
    if given.take("loss_fn.disable_ppo_ratio"):
        given.draft.put(("loss_function",), "gpg", "loss_fn.disable_ppo_ratio")
    key = "loss_fn.force_on_policy_ratio"
    if given.take(key):
        if given.peek("grpo.async_grpo.enabled") or given.peek("async_rl.sampler"):
            given.draft.leave_out(key, "idle", "a rollout's only optimizer step has this ratio by itself")
        else:
            text = "a rollout's only optimizer step, whose ratio is 1"
            given.draft.put(("actor_train", "logprob_plan"), "none", key, text)


def _kl_in_reward(given: Given) -> float:
    """The KL's weight in the loss where the file wants it in the reward: none."""
    if str(given.draft.values.get("adv_estimator", "")).startswith("reinforce_plus_plus"):
        text = "add_token_level_kl is near: it also counts for the tokens before; there, for its own token alone"
        given.draft.leave_out("loss_fn.use_kl_in_reward", "refused", text)
    else:
        text = "takes the KL out of the loss, and only reinforce_plus_plus puts it into the reward: there is none"
        given.draft.leave_out("loss_fn.use_kl_in_reward", "idle", text)
    return 0.0


_NO_CAP = 1e9
"""Above exp(20), which no weight exceeds."""


def _engine_correction(given: Given) -> None:
    key = "loss_fn.truncated_importance_sampling"
    corrected = given.take("loss_fn.use_importance_sampling_correction")
    kind, cap = given.take(f"{key}_type"), given.take(f"{key}_ratio")
    lowest = given.take(f"{key}_ratio_min")
    if corrected and cap is None:
        text = "no cap: log-ratios are bounded at 20, so that weights stay below it"
        name = "loss_fn.use_importance_sampling_correction"
        given.draft.put(("loss_args", "engine_ratio_cap"), _NO_CAP, name, text)
    elif corrected:
        text = "weights of tokens; there, of whole sequences" if "importance_sampling" in given.draft.values else ""
        given.draft.put(("loss_args", "engine_ratio_cap"), cap, f"{key}_ratio", text)
        if lowest is not None:
            given.draft.put(("loss_args", "engine_ratio_min"), lowest, f"{key}_ratio_min")
        if CORRECTIONS[kind] != "truncate":
            given.draft.put(("loss_args", "engine_correction"), CORRECTIONS[kind], f"{key}_type")
