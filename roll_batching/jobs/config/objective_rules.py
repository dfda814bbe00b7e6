"""Arguments of the loss and the advantage estimator that a job names, and the problems of these settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.arguments import Arguments
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.losses import FIELDS, LOSSES, Loss

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
_RATIO = {"token": "token", "seq": "sequence", "seq-token": "sequence_token"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant_mean",
    "token-sum": "constant_sum",
    "rollout-mean": "rollout_mean",
    "rollout-token-mean": "rollout_token_mean",
}
"""By `loss_agg_mode`, the name of `losses.aggregation`; constant_mean and constant_sum take `loss_agg_length`."""


def loss_arguments(job: JobKeys, loss: Loss) -> dict[str, Any]:
    """The keyword arguments of the registered loss that `job` names.

    `aggregation` is a name of `losses.aggregation`; constant_mean and constant_sum take the job's `loss_agg_length`.
    """
    given_arguments, _ = _arguments(loss).read(job.loss_args, ("loss_args",))
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
    return {name: values[name] for name in loss.keys} | given_arguments


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


def whitens(job: JobKeys) -> bool:
    """Whether the registered estimator of `job` whitens advantages."""
    entry = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    return entry is not None and (job.whiten_advantages or bool(entry.implied.get("whiten_advantages")))


def wants_reference(job: JobKeys) -> bool:
    """Whether the job has a reference that its rewards or its loss read; a user's loss counts as reading it."""
    return job.reference is not None and unread_reference(job) is None


def unread_reference(job: JobKeys) -> str | None:
    """Why nothing reads the reference, or None if the rewards or the loss do."""
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
    if "ref_log_probs" in loss.reads and job.is_supervised and job.reference is None:
        yield Problem(
            ("loss_function",), f"{loss.name} needs the role `reference`; add that section (`reference: {{}}`)"
        )
    if "old_log_probs" in loss.reads and job.max_steps and not job.is_supervised:
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
    unreported = {name: value for name, value in job.loss_args.items() if name not in loss.keys}
    yield from _arguments(loss).read(unreported, ("loss_args",))[1]


def _arguments(loss: Loss) -> Arguments:
    return Arguments(f"the loss {loss.name!r}", loss.settings)
