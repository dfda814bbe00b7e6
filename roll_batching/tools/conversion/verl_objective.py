"""verl's section `algorithm`, the loss of its actor, and its optimizer, whose schedule counts RL steps.

verl steps the schedule after the last mini-batch of an RL step (`verl/workers/engine_workers.py:315`), in the same way
under Megatron (`engine/megatron/transformer_impl.py:720`) and FSDP (`engine/fsdp/transformer_impl.py:816`), for actor
and critic (`train_mini_batch`). `optim.total_training_steps` is the number of RL steps
(`ppo/v1/trainer_base.py:724`). A trainer with `parameter_sync_step` steps it after each such part of an RL step. In the
SFT trainer each optimizer step counts (`trainer/sft_trainer.py:185`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roll_batching.tools.conversion.foreign_file import FASTER, LAYOUT, TRAIN, ForeignFile, Given
from roll_batching.tools.conversion.foreign_job import Clipping, DynamicSampling, KlTerm, Schedule
from roll_batching.tools.conversion.optimizers import convert_muon_keys, convert_optimizer
from roll_batching.tools.conversion.train_infer import SECTION, verl_filters, verl_weight
from roll_batching.tools.conversion.verl_file import ACTOR, ROLLOUT

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
_ESTIMATES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimates of KL. A `+` behind a name means: with the gradient of k2."""
_CORRECTION = "algorithm.rollout_correction"


def put_advantages(file: ForeignFile) -> list[KlTerm]:
    """Puts the estimator and its normalisation; returns the KL term in the reward, if there is one."""
    name = file.take("algorithm.adv_estimator")
    scaled = file.take("algorithm.norm_adv_by_std_in_grpo")
    has_one = file.draft.values.get("num_return_sequences_in_group") == 1
    compares_groups = name in ("grpo", "grpo_vectorized", "rloo")
    name = _ESTIMATORS.get(str(name), name)
    if has_one and compares_groups:
        meaning = "a group of one has no other to compare with: the advantage is the reward, as verl's is"
        file.put(("adv_estimator",), "reinforce", "algorithm.adv_estimator", meaning)
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
    weight, kind = file.given("algorithm.kl_ctrl.kl_coef"), file.take("algorithm.kl_ctrl.type")
    is_used, key = file.take("algorithm.use_kl_in_reward"), "algorithm.use_kl_in_reward"
    # An adaptive weight may start at 0 and grow.
    if not is_used or weight is None or (not weight.value and kind == "fixed"):
        return []
    if name not in ("reinforce_plus_plus", "gae"):
        why = "lowers the reward of a response by its KL before groups are compared; use_kl_loss puts KL into the loss"
        file.draft.leave_out(key, "refused", why)
        return []
    if kind == "adaptive":
        file.move_all("adaptive_kl")
    penalty = file.given("algorithm.kl_penalty")
    if penalty is not None and penalty.value == "low_var_kl":
        penalty = Given("k3", penalty.key)
    return [KlTerm(key, weight, penalty, in_reward=True)]


def read_dynamic_sampling(file: ForeignFile) -> DynamicSampling | None:
    """Reads `filter_groups` of verl's recipes, and the generation batch size; None where no groups are filtered."""
    section = "algorithm.filter_groups"
    enabled, metric = file.given(f"{section}.enable"), file.given(f"{section}.metric")
    most, size = file.given(f"{section}.max_num_gen_batches"), file.given("data.gen_batch_size")
    if enabled is None or enabled.value is not True:
        for given in filter(None, (enabled, metric, most, size)):
            file.draft.leave_out(given.key, "idle", "groups are not filtered")
        return None
    if metric is not None:
        file.draft.leave_out(metric.key, "idle", "dynamic_sampling compares rewards")
    meaning = f"compares rewards; verl: {metric.value}" if metric is not None else ""
    if most is None or most.value <= 0:
        no_limit = "verl has no limit where max_num_gen_batches is 0"
        most = Given(None, f"{section}.max_num_gen_batches", no_limit)
    return DynamicSampling(Given(True, enabled.key, meaning), most, size)


def put_loss(file: ForeignFile) -> Clipping | None:
    """Puts the policy loss, its aggregation and the rollout correction; returns the bounds of its ratio."""
    mode = file.take(f"{ACTOR}.policy_loss.loss_mode")
    key = f"{ACTOR}.policy_loss.loss_mode"
    aggregation, chosen = file.take(f"{ACTOR}.loss_agg_mode"), ""
    if mode is not None and mode not in _LOSSES:
        file.draft.leave_out(key, "refused", f"{mode}: there is no such loss here; {', '.join(_LOSSES)} are converted")
    else:
        loss, chosen = _LOSSES[mode or "vanilla"]
        file.put(("loss_function",), loss, key)
    if chosen:
        meaning = f"verl's {mode} always aggregates like this, and only its KL and entropy as loss_agg_mode says"
        file.put(("loss_agg_mode",), chosen, key, meaning)
        if aggregation not in (None, chosen) and f"{ACTOR}.loss_agg_mode" not in file.draft.defaults:
            file.draft.leave_out(f"{ACTOR}.loss_agg_mode", "idle", f"verl's {mode} sets it to {chosen}")
    else:
        meaning = ""
        if aggregation == "seq-mean-token-sum-norm" and file.peek(f"{ACTOR}.loss_scale_factor") is None:
            meaning = (
                "divided by response_length; verl: by the longest response of a micro-batch (loss_scale_factor: null)"
            )
        file.put(("loss_agg_mode",), aggregation, f"{ACTOR}.loss_agg_mode", meaning)
    if (chosen or aggregation) != "token-sum":
        file.move(f"{ACTOR}.loss_scale_factor", ("loss_agg_length",))
    elif file.take(f"{ACTOR}.loss_scale_factor") is not None:
        file.draft.leave_out(f"{ACTOR}.loss_scale_factor", "idle", "verl's token-sum does not read it")
    _correction(file)
    return _clipping(file, mode or "vanilla")


def _clipping(file: ForeignFile, mode: str) -> Clipping | None:
    """Converts the arguments of the loss `mode`; returns the bounds of its ratio, None for a loss without any."""
    both = file.given(f"{ACTOR}.clip_ratio")
    low, high = (file.given(f"{ACTOR}.clip_ratio_{name}") for name in ("low", "high"))
    is_in_file = f"{ACTOR}.clip_ratio" not in file.draft.defaults
    if is_in_file and low and high and both and both.value not in (low.value, high.value):
        why = "verl reads it only where clip_ratio_low or clip_ratio_high is null, and both are 0.2 unless set"
        file.draft.leave_out(f"{ACTOR}.clip_ratio", "idle", why)
    dual = file.given(f"{ACTOR}.clip_ratio_c")
    if mode in file.tables.data["moves"]:
        file.move_all(mode)
    if mode == "gspo":
        file.put(("importance_sampling",), "seq-token", f"{ACTOR}.policy_loss.loss_mode")
    if mode not in ("vanilla", "gspo", "cispo", "geo_mean", "clip_cov"):
        return None
    low, high = low or both, high or both
    if low and mode != "geo_mean" and isinstance(low.value, int | float) and low.value > 1:
        low = Given(1.0, low.key, f"{low.value}, which clips no ratio, as 1 does not")
    return Clipping(f"{ACTOR}.clip_ratio_low", low, high, dual if mode == "vanilla" else None)


def read_kl(file: ForeignFile) -> list[KlTerm]:
    """Reads the KL term of the loss; returns an empty list if `use_kl_loss` is off."""
    used, weight = file.take(f"{ACTOR}.use_kl_loss"), file.given(f"{ACTOR}.kl_loss_coef")
    kind = file.given(f"{ACTOR}.kl_loss_type")
    if not used or weight is None:
        for name in ("kl_loss_coef", "kl_loss_type"):
            file.draft.leave_out(f"{ACTOR}.{name}", "idle", "use_kl_loss is off")
        return []
    file.move("actor_rollout_ref.ref.model.path", ("reference", "model_args", "model_name_or_path"))
    gradient = None
    if kind is not None and (base := str(kind.value).removesuffix("+")) in _ESTIMATES:
        if base != kind.value and base not in ("mse", "k2"):  # `+` gives k2's gradient, which k2 has anyway
            gradient = Given("straight_through", kind.key)
        kind = Given(base, kind.key)
    return [KlTerm(switch=f"{ACTOR}.use_kl_loss", weight=weight, estimator=kind, gradient=gradient)]


def _correction(file: ForeignFile) -> None:
    """Converts `algorithm.rollout_correction`: weights and filters of the engine's samples, old log-probs."""
    kind, limit = file.take(f"{_CORRECTION}.rollout_is"), file.take(f"{_CORRECTION}.rollout_is_threshold")
    bypassed, loss = file.take(f"{_CORRECTION}.bypass_mode"), file.take(f"{_CORRECTION}.loss_type")
    if bypassed:
        key = f"{_CORRECTION}.bypass_mode"
        file.put(("actor_train", "logprob_plan"), "rollout", key)
        if loss not in (None, "ppo_clip"):
            why = f"{loss}: loss_function alone decides the loss; set it to the loss that you want"
            file.draft.leave_out(f"{_CORRECTION}.loss_type", "refused", why)
    normalize = bool(file.take(f"{_CORRECTION}.rollout_is_batch_normalize"))
    modes, bounds = file.take(f"{_CORRECTION}.rollout_rs"), file.take(f"{_CORRECTION}.rollout_rs_threshold")
    for name, value in (("rollout_is", kind), ("rollout_rs", modes)):
        if bypassed and value is not None:
            why = "bypass_mode takes the engine's log-probs for old ones: there is no ratio before the update"
            file.draft.leave_out(f"{_CORRECTION}.{name}", "refused", why)
    filters: list[dict[str, Any]] = []
    if kind is not None and not bypassed:
        try:
            weight, filters = verl_weight(kind, limit, normalize)
            file.put((SECTION, "is_weight"), weight, f"{_CORRECTION}.rollout_is")
        except ValueError:
            why = f"{limit!r}: write a number, or two as 0.5_2.0"
            file.draft.leave_out(f"{_CORRECTION}.rollout_is_threshold", "refused", why)
    if modes is not None and not bypassed:
        try:
            filters = [*filters, *verl_filters(str(modes), bounds)]
        except (ValueError, ZeroDivisionError) as error:
            file.draft.leave_out(f"{_CORRECTION}.rollout_rs", "refused", str(error))
    if filters:
        file.put((SECTION, "filters"), filters, f"{_CORRECTION}.{'rollout_is' if modes is None else 'rollout_rs'}")
    if file.take(f"{ROLLOUT}.calculate_log_probs") is False:
        file.draft.leave_out(f"{ROLLOUT}.calculate_log_probs", "idle", "log-probs of the engine are always kept")


# ---- verl optimizer


@dataclass(frozen=True)
class RlSteps:
    """Length of a learning-rate schedule in the units that it counts: RL steps, or parts of them."""

    updates: int = 1
    """Optimizer steps of this model in each unit: passes over the unit's samples x mini-batches."""
    total: int | None = None
    """Units in the whole job; None where the file has no number of steps."""
    idle: int = 0
    """RL steps at the beginning that do not train the model, but count in the length of its schedule."""


def rl_steps_of(file: ForeignFile, critic: ForeignFile | None = None) -> RlSteps:
    """Length of the actor's schedule, or of the schedule of `critic`, whose settings are those of an actor."""
    trained = critic or file
    prompts, mini = file.peek("data.train_batch_size"), trained.peek(f"{ACTOR}.ppo_mini_batch_size")
    epochs = trained.peek(f"{ACTOR}.ppo_epochs") or 1
    total = file.peek("trainer.total_training_steps")
    mode = f"trainer.v1.{file.peek('trainer.v1.trainer_mode')}"
    # Parts of an RL step after which verl steps the schedule; 4 is its default under separate_async.
    parts = file.peek(f"{mode}.parameter_sync_step", 4 if mode.endswith(".separate_async") else 1)
    parts = parts if isinstance(parts, int) and parts > 0 else 1
    warmup = file.peek("trainer.critic_warmup") if critic is None else 0
    return RlSteps(
        updates=max(1, prompts // parts // mini) * epochs if prompts and mini else epochs,
        total=total * parts if isinstance(total, int) and total > 0 else None,
        # critic_warmup only has a meaning with a critic; the policy trains in the step of that number already.
        idle=max(0, warmup - 1) if isinstance(warmup, int) and file.peek("algorithm.adv_estimator") == "gae" else 0,
    )


def read_schedule(file: ForeignFile, section: str, megatron: bool, steps: RlSteps) -> Schedule:
    """Converts the optimizer in `section`; returns its schedule, which counts `steps`."""
    rate, betas = file.take(f"{section}.lr"), file.take(f"{section}.betas")
    file.put((*TRAIN, "learning_rate"), rate, f"{section}.lr")
    if megatron:
        if betas not in (None, [0.9, 0.999]):
            why = "verl passes them to no Megatron optimizer: 0.9 and 0.999 are used, there as here"
            file.draft.leave_out(f"{section}.betas", "idle", why)
    elif isinstance(betas, list) and len(betas) == 2:
        for number, beta in enumerate(betas, 1):
            file.put((*TRAIN, f"adam_beta{number}"), beta, f"{section}.betas")
    decayed = "" if megatron else "biases and norms are exempt; verl's FSDP engine decays all parameters"
    file.move(f"{section}.weight_decay", (*TRAIN, "weight_decay"), meaning=decayed)
    clip, older = file.given(f"{section}.clip_grad"), file.given(f"{section}.grad_clip")
    if (norm := older or clip) is not None:
        file.put((*TRAIN, "max_grad_norm"), norm.value, norm.key)
    file.check_all("optimizer", section)
    _muon(file, section, megatron, betas)
    for name in list(file.peek(f"{section}.override_optimizer_config") or {}):
        if name in file.tables.speed or name.startswith("optimizer_"):
            file.take(f"{section}.override_optimizer_config.{name}")
            file.draft.leave_out(f"{section}.override_optimizer_config.{name}", "idle", FASTER)
    total = file.take(f"{section}.total_training_steps")
    if isinstance(total, int) and total > 0:
        why = "verl's trainer sets it to the length of the job"
        file.draft.leave_out(f"{section}.total_training_steps", "idle", why)
    shape = _shape(file, section)
    warmup, share = _warmup(file, section, steps)
    length = file.given(f"{section}.lr_decay_steps")
    if not (length and isinstance(length.value, int)):
        length = None
        if steps.idle and steps.total is not None and (shape is None or shape.value != "constant"):
            meaning = "verl's schedule counts the steps of critic_warmup in its length, and does not go on during them"
            length = Given(steps.total, "trainer.critic_warmup", meaning)
    return Schedule(
        updates=steps.updates,
        unit="an RL step",
        shape=shape,
        lowest=_part(file, section, "min_lr", "min_lr_ratio", rate),
        start=_part(file, section, "lr_warmup_init", "init_lr_ratio", rate),
        warmup=warmup,
        warmup_ratio=share,
        length=length,
    )


def _muon(file: ForeignFile, section: str, megatron: bool, betas: Any) -> None:
    """Converts the name of the optimizer in `section`, and Muon's keys, also those that override Megatron's."""
    is_muon = convert_optimizer(file, f"{section}.optimizer", megatron=megatron)
    for below in (section, f"{section}.override_optimizer_config"):
        convert_muon_keys(file, lambda name, below=below: f"{below}.{name}")  # type: ignore[misc]
    if is_muon and file.take(key := f"{section}.use_layer_wise_distributed_optimizer"):
        file.put((*LAYOUT, "use_distributed_optimizer"), True, key, "Megatron's layer-wise optimizer")
    if is_muon and file.take(key := f"{section}.muon_match_adamw_update_rms") and isinstance(betas, list):
        scale = float(f"{math.sqrt((1 - betas[0]) / (1 + betas[0])):.6g}")
        file.put((*TRAIN, "muon_extra_scale_factor"), scale, key, "sqrt((1 - beta1) / (1 + beta1))")


def _shape(file: ForeignFile, section: str) -> Given | None:
    """Returns the name of the schedule; leaves out `num_cycles` unless it is Megatron's half cycle of a cosine."""
    decay, style = file.given(f"{section}.lr_decay_style"), file.take(f"{section}.warmup_style")
    plain = file.take(f"{section}.lr_scheduler_type")
    shape = Given(style or plain, f"{section}.lr_scheduler_type") if style or plain else decay
    cycles, key = file.take(f"{section}.num_cycles"), f"{section}.num_cycles"
    if cycles is not None and (shape is None or shape.value != "cosine"):
        file.draft.leave_out(key, "idle", "the schedule is no cosine")
    elif cycles not in (None, 0.5):
        why = f"{cycles}: Megatron's cosine falls once (0.5 cycles) and does not rise again; 0.5 trains here"
        file.draft.leave_out(key, "refused", why)
    return shape


def _part(file: ForeignFile, section: str, name: str, ratio: str, rate: Any) -> Given | None:
    """Returns a learning rate: the share of `rate` under the key `ratio`, else the value under the key `name`."""
    value, share = file.given(f"{section}.{name}"), file.take(f"{section}.{ratio}")
    if share and isinstance(share, int | float) and isinstance(rate, int | float):
        return Given(float(f"{rate * share:.12g}"), f"{section}.{ratio}")  # 12 digits: 1e-7, not 1.0000000000000001e-7
    return value


def _warmup(file: ForeignFile, section: str, steps: RlSteps) -> tuple[Given | None, Given | None]:
    """(Steps of the warm-up, its share of the schedule). One of the two is None: the share if steps are known."""
    warmup, share = file.given(f"{section}.lr_warmup_steps"), file.given(f"{section}.lr_warmup_steps_ratio")
    if warmup is not None and isinstance(warmup.value, int) and warmup.value > 0:
        return warmup, None
    decay = file.peek(f"{section}.lr_decay_steps")
    horizon = steps.total if decay is None else decay
    if share and isinstance(share.value, int | float) and 0 < share.value <= 1 and isinstance(horizon, int):
        meaning = f"{share.value:g} of {horizon} steps, rounded down"
        return Given(int(share.value * horizon), share.key, meaning), None
    return None, share
