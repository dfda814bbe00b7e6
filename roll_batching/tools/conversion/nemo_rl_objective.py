"""NeMo-RL's sections `grpo`, `ppo` (read as `grpo`) and `loss_fn`: advantages, evaluation, loss, and the critic."""

from __future__ import annotations

import math

from roll_batching.tools.conversion.critics import Critic, scale_loss
from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import REWARDS, ROLE, TRAIN, ForeignFile, Given
from roll_batching.tools.conversion.foreign_job import Clipping, DynamicSampling, Evaluation, KlTerm
from roll_batching.tools.conversion.nemo_rl_file import CORRECTIONS, NEMO_RL
from roll_batching.tools.conversion.train_infer import SECTION, nemo_rl_correction


def put_advantages(file: ForeignFile) -> None:
    """Converts steps, groups, advantages and reward shaping of the section `grpo`."""
    file.move_all("grpo")
    if file.peek("grpo.max_rollout_turns") == 1:
        file.leave_out("grpo.max_rollout_turns", "idle", "max_steps ends the job; rollouts have one turn")
    section = "grpo.adv_estimator"
    name, has_baseline = file.take(f"{section}.name"), file.take(f"{section}.minus_baseline")
    is_normalised = file.take(f"{section}.normalize_rewards")
    leaves_one_out = file.take(f"{section}.use_leave_one_out_baseline")
    key = f"{section}.name"
    if name == "reinforce_plus_plus":
        file.draft.put(("adv_estimator",), f"{name}_baseline" if has_baseline else name, key)
    elif name != "grpo":
        file.draft.put(("adv_estimator",), name, key)
    elif is_normalised:
        file.draft.put(("adv_estimator",), "grpo_leave_one_out" if leaves_one_out else "grpo", key)
    else:
        file.draft.put(("adv_estimator",), "rloo" if leaves_one_out else "reinforce", key)
        if not leaves_one_out:
            file.draft.put(("norm_mean_type",), "group", f"{section}.normalize_rewards")
    _reward_shaping(file)
    low, high = file.take("grpo.advantage_clip_low"), file.take("grpo.advantage_clip_high")
    if high is not None and low is not None and low == -high:
        file.draft.put(("advantage_clip",), high, "grpo.advantage_clip_high")
    elif low is not None or high is not None:
        why = f"from {low} to {high}: advantage_clip has one bound for both sides; set it if one bound serves"
        file.draft.leave_out("grpo.advantage_clip_high", "refused", why)


def read_dynamic_sampling(file: ForeignFile) -> DynamicSampling | None:
    """Reads the replacement of groups with equal rewards; None where the file does not switch it on."""
    most, multiplier = file.given("grpo.dynamic_sampling_max_gen_batches"), file.given("grpo.batch_multiplier")
    if file.take("grpo.use_dynamic_sampling") is not True:
        for given in filter(None, (most, multiplier)):
            file.draft.leave_out(given.key, "idle", "belongs to use_dynamic_sampling")
        return None
    meaning = ""
    if file.peek("grpo.use_leave_one_out_baseline"):
        meaning = (
            "groups are kept whole; NeMo-RL drops single responses whose others are equal, such as the only right one"
        )
    if most is not None:
        most = Given(most.value + 1, most.key, "one more: NeMo-RL stops after the batch that follows its limit")
    prompts, size = file.draft.values.get("rollout_batch_size"), None
    if multiplier is not None and isinstance(prompts, int) and multiplier.value != 1:
        wanted = float(prompts * multiplier.value)
        count = int(wanted) if math.isfinite(wanted) else wanted  # the loader refuses infinity and NaN
        size = Given(count, multiplier.key, "batch_multiplier x num_prompts_per_step")
    return DynamicSampling(Given(True, "grpo.use_dynamic_sampling", meaning), most, size)


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


def read_evaluation(file: ForeignFile, section: str) -> Evaluation:
    """Reads the evaluation from `section`: its period, and the number of held-out prompts."""
    period, most = file.given(f"{section}.val_period"), file.given(f"{section}.max_val_samples")
    period, size = period or Given(0, f"{section}.val_period"), file.take(f"{section}.val_batch_size")
    # A list, not `or`: all keys must be taken.
    is_on = any([file.take(f"{section}.val_at_start"), file.take(f"{section}.val_at_end"), period.value > 0])
    if file.take(f"{section}.val_start_at") not in (None, -1, 0):
        file.draft.leave_out(f"{section}.val_start_at", "refused", "evaluation begins before the first step")
    samples = None
    if most is not None and isinstance(most.value, int) and most.value > 0:
        # NeMo-RL evaluates whole batches of val_batch_size only.
        count = most.value // size * size if isinstance(size, int) and 0 < size <= most.value else most.value
        meaning = "prompts of an evaluation, repeated if there are fewer; NeMo-RL stops at the last one"
        samples = Given(count, most.key, meaning)
    return Evaluation(period, is_on, samples=samples)


def put_loss(file: ForeignFile) -> Clipping | None:
    """Puts the policy loss and the engine correction; returns the bounds of the ratio."""
    low, high = file.given("loss_fn.ratio_clip_min"), file.given("loss_fn.ratio_clip_max")
    dual, token_level = file.given("loss_fn.ratio_clip_c"), file.given("loss_fn.token_level_loss")
    if token_level is not None:
        file.put(("loss_agg_mode",), "token-mean" if token_level.value else "seq-mean-token-mean", token_level.key)
    if file.take("loss_fn.use_cispo"):
        file.put(("loss_function",), "cispo", "loss_fn.use_cispo")
        dual = None
    if file.take("loss_fn.sequence_level_importance_ratios"):
        file.put(("importance_sampling",), "seq", "loss_fn.sequence_level_importance_ratios")
    if file.take("loss_fn.disable_ppo_ratio"):
        file.put(("loss_function",), "gpg", "loss_fn.disable_ppo_ratio")
    key = "loss_fn.force_on_policy_ratio"
    if file.take(key):
        if file.peek("grpo.async_grpo.enabled") or file.peek("async_rl.sampler"):
            file.draft.leave_out(key, "idle", "the only optimizer step of a rollout has this ratio anyway")
        else:
            file.put((ROLE, "logprob_plan"), "none", key, "the only optimizer step of a rollout has the ratio 1")
    _engine_correction(file)
    has_both = low is not None and high is not None
    return Clipping("loss_fn.ratio_clip_min", low if has_both else None, high if has_both else None, dual)


def read_kl(file: ForeignFile) -> list[KlTerm]:
    """Reads the KL term of the loss, or of the rewards of tokens. Returns an empty list for a job without KL."""
    weight, reward_key = file.given("loss_fn.reference_policy_kl_penalty"), "loss_fn.use_kl_in_reward"
    is_in_reward = file.take(reward_key)
    if weight is None or not weight.value:
        return []
    if is_in_reward:
        return _read_kl_in_reward(file, reward_key, weight)
    # NeMo-RL's gradient has the score function's term, unless the estimate is weighted by the ratio of the policies.
    gradient = Given("score_function", weight.key)
    if file.take("loss_fn.use_on_policy_kl_approximation"):
        meaning = "weighted by the ratio to the old policy; NeMo-RL: to the engine's"
        gradient = Given("importance", "loss_fn.use_on_policy_kl_approximation", meaning)
    kind, bound = file.given("loss_fn.reference_policy_kl_type"), file.given("loss_fn.kl_output_clamp_value")
    return [KlTerm(switch=weight.key, weight=weight, estimator=kind, gradient=gradient, bound=bound)]


def _read_kl_in_reward(file: ForeignFile, key: str, weight: Given) -> list[KlTerm]:
    """Converts KL in the rewards of tokens: by PPO (`gae`) only. Leaves out `key` under other estimators."""
    estimator = str(file.draft.values.get("adv_estimator", ""))
    if estimator.startswith("reinforce_plus_plus"):
        why = (
            "the nearest key, add_token_level_kl, is not the same: with it the KL of a token also lowers the return "
            "of earlier tokens; NeMo-RL charges it to that token alone"
        )
        file.draft.leave_out(key, "refused", why)
        return []
    if estimator != "gae":
        why = "removes KL from the loss, and only reinforce_plus_plus adds it to the reward: there is no KL term"
        file.draft.leave_out(key, "idle", why)
        return []
    if file.take("grpo.skip_reference_policy_logprobs_calculation"):
        why = "skip_reference_policy_logprobs_calculation is on: there is no KL term"
        file.draft.leave_out(key, "idle", why)
        return []
    kind = file.given("loss_fn.reference_policy_kl_type")
    return [KlTerm(switch=key, weight=weight, estimator=kind, in_reward=True)]


def check_forced_ratio(file: ForeignFile) -> None:
    """Leaves out `force_on_policy_ratio` where an RL step has several optimizer steps. NeMo-RL refuses such files."""
    key = "loss_fn.force_on_policy_ratio"
    prompts, responses = file.peek("grpo.num_prompts_per_step"), file.peek("grpo.num_generations_per_prompt")
    size = file.peek("policy.train_global_batch_size")
    if not (isinstance(prompts, int) and isinstance(responses, int) and isinstance(size, int)):
        return
    if file.peek(key) and size != prompts * responses:
        file.take(key)
        why = f"needs one optimizer step: train_global_batch_size {size} is not {prompts} x {responses} samples"
        file.draft.leave_out(key, "refused", why)


_NO_CAP = 1e9
"""Larger than exp(20), the largest possible weight."""


def _engine_correction(file: ForeignFile) -> None:
    """Converts the weights that correct for the engine's log-probs, and the threshold of their error.

    Weights per token without a threshold are arguments of the loss; all others need the section `SECTION`.
    """
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
        meaning = "no cap: log-ratios are bounded at 20, so no weight reaches it"
        name = "loss_fn.use_importance_sampling_correction"
        file.draft.put(("loss_args", "engine_ratio_cap"), _NO_CAP, name, meaning)
    elif corrected:
        file.draft.put(("loss_args", "engine_ratio_cap"), cap, f"{key}_ratio")
        if lowest is not None:
            file.draft.put(("loss_args", "engine_ratio_min"), lowest, f"{key}_ratio_min")
        if CORRECTIONS[kind] != "truncate":
            file.draft.put(("loss_args", "engine_correction"), CORRECTIONS[kind], f"{key}_type")


# ---- nemo rl ppo


_OWN_NAMES = (("grpo.async_grpo", "ppo.async_ppo"), ("grpo", "ppo"))
"""(Section of `grpo`, section of `ppo`): PPO's sections are converted under the names of `grpo`."""


def read_ppo_as_grpo(file: ForeignFile) -> bool:
    """Renames the section `ppo` to `grpo`, because most of their keys agree; returns whether the file has `ppo`."""
    if not isinstance(file.peek("ppo"), dict):
        return False
    if file.take("grpo") is not None:
        file.draft.leave_out("grpo", "idle", "the file has the section `ppo`, which is converted")
    file.data["grpo"] = file.take("ppo")
    if (settings := file.take("grpo.async_ppo")) is not None:
        file.data["grpo"]["async_grpo"] = settings
    return True


def restore_names(draft: Draft) -> None:
    """Renames the origins in `draft` back from `grpo` to `ppo`, as the file has them."""
    draft.origins = {path: _own_name(key) for path, key in draft.origins.items()}
    draft.left_out = {_own_name(key): entry for key, entry in draft.left_out.items()}


def _own_name(key: str) -> str:
    for alias, name in _OWN_NAMES:
        if key == alias or key.startswith(f"{alias}."):
            return name + key.removeprefix(alias)
    return key


def convert_ppo(file: ForeignFile) -> None:
    """Converts the keys of `ppo` that `grpo` does not have, and the critic's loss."""
    file.move("grpo.ppo_epochs", ("ppo_epochs",))
    file.move_all("ppo")
    _estimator(file)
    if file.draft.values.get("loss_agg_mode", "token-mean") != "token-mean":
        why = "NeMo-RL averages the critic's loss over tokens; here loss_agg_mode holds for both losses"
        file.draft.leave_out("value_loss_fn", "refused", why)
    for name in ("warmup_generation_lead_steps", "drop_incomplete_targets_on_restore"):
        if file.take(f"grpo.async_grpo.{name}"):
            why = "rollouts run ahead by async_generation_ratio throughout, and resume with their prompts"
            file.draft.leave_out(f"grpo.async_grpo.{name}", "idle", why)
    file.expect_off("loss_fn.positive_example_nll_weight", why="the loss has no term for correct samples alone")


def _estimator(file: ForeignFile) -> None:
    """Converts the lambda of generalised advantage estimation. One lambda serves advantages and returns here."""
    section = "grpo.adv_estimator"
    common = file.take(f"{section}.gae_lambda")
    separate = [file.take(f"{section}.gae_lambda_{name}") for name in ("policy", "value")]
    policy, value = (common if lambd is None else lambd for lambd in separate)
    if policy is not None:
        key = f"{section}.gae_lambda" if separate[0] is None else f"{section}.gae_lambda_policy"
        file.draft.put(("lambd",), policy, key)
    if value != policy:
        why = f"{value}, but one lambda, {policy}, serves the policy's advantages and the critic's returns"
        file.draft.leave_out(f"{section}.gae_lambda_value", "refused", why)
    why = "one lambda serves responses of all lengths"
    file.expect_off(f"{section}.length_adaptive_alpha", why=why)


def value_as_policy(file: ForeignFile) -> ForeignFile:
    """Returns a file whose section `policy` is the section `value` of `file`: both have the same keys."""
    value = file.take("value") or {}
    below = ForeignFile(NEMO_RL, {"policy": value}, Draft(file.draft.source, framework=file.draft.framework))
    longest = "policy.max_total_sequence_length"
    if below.peek(longest) == file.peek(longest):  # else it is left out with a reason, as every key not taken
        below.take(longest)
    below.take("policy.reward_model_cfg")
    return below


def read_value_model(file: ForeignFile, below: ForeignFile, megatron: bool) -> Critic:
    """Returns the critic; `below` is its converted value model, whose settings lie under `policy`."""
    scale, passes = file.take("value_loss_fn.scale"), file.peek("grpo.ppo_epochs")
    if isinstance(scale, int | float) and not isinstance(scale, bool):
        scale_loss(below.draft, TRAIN, scale, "value_loss_fn.scale")
    clip = file.given("value_loss_fn.cliprange")
    if clip is not None and clip.value <= 0:
        file.draft.leave_out(clip.key, "idle", f"{clip.value}: NeMo-RL clips no values, as without the key")
        clip = None
    meaning = "NeMo-RL's Megatron: uniform between plus and minus 1 / sqrt(hidden size)" if megatron else ""
    return Critic(
        below.draft,
        head_std=Given(0.01 if megatron else 0.02, "the start of the value head in NeMo-RL", meaning),
        name=lambda key: "value" + key.removeprefix("policy") if f"{key}.".startswith("policy.") else key,
        value_clip=clip,
        epochs=None if passes is None else Given(passes, "grpo.ppo_epochs"),
    )
