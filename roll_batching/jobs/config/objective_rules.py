"""Arguments of the loss and the advantage estimator that a job names, and their problems and notices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS, ADVANTAGE_KEYS
from roll_batching.jobs.config.arguments import Arguments
from roll_batching.jobs.config.diagnostics import Notice, NoticeKind, Problem, no_effect
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.losses import LOSSES, Loss
from roll_batching.jobs.config.rl_rules import critic_notices
from roll_batching.jobs.config.supervised import FIELDS, supervised
from roll_batching.jobs.config.teacher_rules import teacher_notices

KEYS_OF_FIELDS: Mapping[str, tuple[str, ...]] = {
    "clip_low": ("pg_clip", "use_pg_clip_range", "pg_clip_low"),
    "clip_high": ("pg_clip", "use_pg_clip_range", "pg_clip_high"),
    "ratio": ("importance_sampling",),
    "dual_clip": ("dual_clip_loss", "dual_clip_ratio"),
    "kl_coef": ("use_kl_loss", "kl_loss_coef"),
    "kl_bound": ("kl_loss_bound",),
    "entropy_coef": ("entropy_loss_coef",),
    "aggregation": ("loss_agg_mode", "loss_agg_length"),
    "objective": ("kd_objective", "logits_topk", "teacher_temperature"),
    "temperature": ("kd_temperature",),
    "weight": ("distill_loss_weight",),
    "mixed_weight": ("mixed_kl_weight",),
    "skew": ("skew_lambda",),
    "adaptive_share": ("adaptive_kl_alpha",),
    "zero_outside_topk": ("zero_outside_topk",),
}
"""By field of a registered loss, the keys of the job that set it."""
LOSS_KEYS = tuple(dict.fromkeys(key for keys in KEYS_OF_FIELDS.values() for key in keys))
_RATIO = {"token": "token", "seq": "sequence", "seq-token": "sequence_token"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant_mean",
    "token-sum": "constant_sum",
}
"""By `loss_agg_mode`, the name of `losses.aggregation`; those of a constant go with `loss_agg_length`."""


def loss_arguments(job: JobKeys, loss: Loss) -> dict[str, Any]:
    """The keyword arguments of the registered loss that `job` names.

    `aggregation` is a name of `losses.aggregation`; those of a constant go with the job's `loss_agg_length`.
    """
    own, _ = _arguments(loss).read(job.loss_args, ("loss_args",))
    low, high = job.clip_range
    values = {
        "clip_low": low,
        "clip_high": high,
        "dual_clip": (job.dual_clip_ratio or 1 + 2 * job.pg_clip) if job.dual_clip_loss else None,
        "ratio": _RATIO[job.importance_sampling],
        "kl_coef": job.kl_coef,
        "kl_bound": job.kl_loss_bound,
        "entropy_coef": job.entropy_loss_coef,
        "aggregation": AGGREGATIONS[job.loss_agg_mode],
        "objective": job.kd_objective,
        "temperature": job.kd_temperature,
        "weight": job.distill_loss_weight,
        "mixed_weight": job.mixed_kl_weight,
        "skew": job.skew_lambda,
        "adaptive_share": job.adaptive_kl_alpha,
        "zero_outside_topk": job.zero_outside_topk,
    }
    return {name: values[name] for name in loss.keys} | own


def advantage_arguments(job: JobKeys) -> dict[str, Any]:
    """The keyword arguments of the advantage estimator that `job` names; None is left out.

    Advantages per token are whitened and clipped after the estimator, so it does neither.
    """
    entry = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    values = {
        "mean": job.norm_mean_type,
        "std": job.norm_std_type,
        "reward_clip": job.reward_clip,
        "advantage_clip": job.advantage_clip,
        "whiten": job.whiten_advantages,
        "episode_weight": job.episode_reward_weight,
        "step_weight": job.step_reward_weight,
        "gamma": job.step_reward_gamma,
    }
    keywords = [] if entry is None else list(entry.keys.values())
    if job.advantages_of_tokens:
        values |= {"advantage_clip": None, "whiten": False}
        keywords += ["whiten"] if entry is not None and "whiten_advantages" in entry.implied else []
    return {name: values[name] for name in keywords if values[name] is not None}


def reward_norm_of(job: JobKeys) -> dict[str, Any]:
    """`norm_mean_type` and `norm_std_type` for `reward_norm`; empty where the estimator reads no norm.

    Source: ROLL's `reward_postprocess` before its commit 7b97eef8, which introduced the two keys.
    """
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if job.reward_norm is None or estimator is None or "norm_mean_type" not in estimator.keys:
        return {}
    scaled_only = job.reward_scale and not job.reward_shift
    return {
        "norm_mean_type": None if scaled_only else job.reward_norm,
        "norm_std_type": None if job.reward_shift else job.reward_norm,
    }


def whitens(job: JobKeys) -> bool:
    """Whether the registered estimator of `job` whitens advantages."""
    entry = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    return entry is not None and (job.whiten_advantages or bool(entry.implied.get("whiten_advantages")))


def wants_reference(job: JobKeys) -> bool:
    """Whether the job has a reference that its rewards or its loss read; a user's loss counts as reading it."""
    return job.reference is not None and _unread_reference(job) is None


def _unread_reference(job: JobKeys) -> str | None:
    """Why nothing reads the reference; None where the rewards or the loss do."""
    if job.add_token_level_kl:
        return None
    loss = LOSSES.get(job.loss_function)
    if loss is not None and "kl_coef" in loss.keys:
        return None if job.kl_coef else "use_kl_loss is false or kl_loss_coef is 0"
    if loss is None or "ref_log_probs" in loss.reads:
        return None
    return f"the loss {loss.name} does not read it"


def objective_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of a registered loss and its settings. A user's loss is checked when the job starts."""
    loss = LOSSES.get(job.loss_function)
    if loss is None:
        return
    fields = FIELDS[job.task]
    absent = [name for name in loss.reads if name not in fields]
    if absent and job.max_steps:
        whose = "rollouts" if job.task == "grpo" else f"samples of task: {job.task}"
        text = f"{loss.name} reads {' and '.join(absent)}, which {whose} do not have ({', '.join(fields)})"
        yield Problem(("loss_function",), f"{text}; choose another loss, or call strategy.train_step with this one")
    if "ref_log_probs" in loss.reads and supervised(job) and job.reference is None:
        yield Problem(
            ("loss_function",), f"{loss.name} needs the role `reference`; add that section (`reference: {{}}`)"
        )
    if "old_log_probs" in loss.reads and job.max_steps and not supervised(job):
        if job.actor_train.logprob_plan == "none":
            text = f"the loss {loss.name} reads old log-probs; use train or own"
            yield Problem(("actor_train", "logprob_plan"), text)
        if job.drop_zero_advantage_groups:
            text = f"the loss {loss.name} reads the old log-probs of all samples; set this to false"
            yield Problem(("drop_zero_advantage_groups",), text)
    for name in job.loss_args:
        if name in loss.keys:
            text = f"is given by a key of the job: {loss.keys[name]}; set that, and leave this out"
            yield Problem(("loss_args", name), text)
    if loss.name == "kto" and all(job.loss_args.get(name) == 0 for name in ("desirable_weight", "undesirable_weight")):
        text = "is 0, and so is desirable_weight: nothing is trained; leave one of them out"
        yield Problem(("loss_args", "undesirable_weight"), text)
    own = {name: value for name, value in job.loss_args.items() if name not in loss.keys}
    yield from _arguments(loss).read(own, ("loss_args",))[1]


def objective_notices(job: JobKeys, given: dict[str, Any]) -> Iterator[Notice]:
    """Notices on `given` keys that the loss or the advantage estimator does not read."""
    name = job.loss_function
    loss = LOSSES.get(name)
    read = {key for field in (loss.keys if loss else ()) for key in KEYS_OF_FIELDS[field]}
    for key in LOSS_KEYS:
        if key in given and key not in read:
            yield no_effect((key,), f"{name} does not read it; its own settings go into loss_args")
    yield from _unread_loss_args(job, read)
    yield from teacher_notices(job, given)
    unread_reference = _unread_reference(job)
    if job.reference is not None and unread_reference is not None:
        yield Notice(("reference",), f"is not built: {unread_reference}", kind=NoticeKind.NOT_BUILT)
    if supervised(job) or job.task == "distill":
        yield from critic_notices(job, given)
        return
    for key in ("kl_penalty", "init_kl_coef", "target_kl", "kl_horizon"):
        if key in given and not job.add_token_level_kl:
            yield no_effect((key,), "add_token_level_kl is false")
    if job.add_token_level_kl and not job.init_kl_coef:
        yield no_effect(("add_token_level_kl",), "init_kl_coef is 0, and target_kl only scales it")
    if "kl_horizon" in given and job.add_token_level_kl and job.target_kl is None:
        yield no_effect(("kl_horizon",), "without target_kl the weight is fixed")
    if loss is not None and "advantages" not in loss.reads:
        yield Notice(("loss_function",), f"{name} reads no advantages: rewards are measured and change nothing")
    yield from critic_notices(job, given)
    yield from _unread_norms(job, given)
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    for key in ADVANTAGE_KEYS:
        if key in given and estimator is None:
            yield no_effect((key,), f"{job.adv_estimator} alone computes the advantages")
        elif key in given and estimator is not None and key not in {*estimator.keys, *estimator.implied}:
            yield no_effect((key,), f"the advantages of {job.adv_estimator} do not depend on it")


def _unread_norms(job: JobKeys, given: dict[str, Any]) -> Iterator[Notice]:
    """Notices on reward_norm, reward_shift and reward_scale."""
    if given.get("reward_norm") is not None and not reward_norm_of(job):
        yield no_effect(("reward_norm",), f"{job.adv_estimator} does not read it")
    for key in ("reward_shift", "reward_scale"):
        if given.get(key) and not reward_norm_of(job):
            yield no_effect((key,), "it modifies reward_norm, which is not in effect")
    if given.get("reward_scale") and job.reward_shift and reward_norm_of(job):
        yield no_effect(("reward_scale",), "reward_shift takes precedence")


def _unread_loss_args(job: JobKeys, read: set[str]) -> Iterator[Notice]:
    """Settings in loss_args that other settings switch off."""
    if "kl_loss_coef" not in read:
        return
    for name in ("kl_estimator", "kl_gradient"):
        if name in job.loss_args and not job.kl_coef:
            yield no_effect(("loss_args", name), "use_kl_loss is false or kl_loss_coef is 0")
    for name in ("engine_correction", "engine_ratio_min"):
        if name in job.loss_args and job.loss_args.get("engine_ratio_cap") is None:
            yield no_effect(("loss_args", name), "engine_ratio_cap is not given")
    if job.loss_args.get("engine_ratio_cap") is not None and job.actor_train.logprob_plan == "rollout":
        yield no_effect(
            ("loss_args", "engine_ratio_cap"),
            "under logprob_plan: rollout the old log-probs are the engine's own: no other numbers to correct",
        )


def _arguments(loss: Loss) -> Arguments:
    return Arguments(f"the loss {loss.name!r}", loss.settings)
