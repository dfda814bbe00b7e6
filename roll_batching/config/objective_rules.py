"""What a job optimises: from its keys to the settings of its loss, and what of them is wrong or without effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_batching.config.advantages import ADVANTAGE_ESTIMATORS, ADVANTAGE_KEYS
from roll_batching.config.arguments import Arguments
from roll_batching.config.diagnostics import Problem
from roll_batching.config.job_keys import JobKeys
from roll_batching.config.losses import LOSSES, ROLLOUT_FIELDS, Loss

POLICY_KEYS = (
    "pg_clip",
    "use_pg_clip_range",
    "pg_clip_low",
    "pg_clip_high",
    "importance_sampling",
    "dual_clip_loss",
    "use_kl_loss",
    "kl_loss_coef",
    "kl_loss_bound",
    "entropy_loss_coef",
    "loss_agg_mode",
)
"""Keys of the job that are settings of the loss `policy`."""
_AGGREGATION = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
}


def loss_arguments(job: JobKeys, loss: Loss) -> dict[str, Any]:
    """The keyword arguments of the registered loss that `job` names."""
    given, _ = _arguments(loss).read(job.loss_args, ("loss_args",))
    if loss.name != "policy":
        return given
    low, high = job.clip_range
    return {
        "clip_low": low,
        "clip_high": high,
        "dual_clip": 1 + 2 * job.pg_clip if job.dual_clip_loss else None,
        "ratio": "sequence" if job.importance_sampling == "seq" else "token",
        "kl_coef": job.kl_coef,
        "kl_bound": job.kl_loss_bound,
        "entropy_coef": job.entropy_loss_coef,
        "aggregation": _AGGREGATION[job.loss_agg_mode],
        **given,
    }


def advantage_arguments(job: JobKeys) -> dict[str, Any]:
    """The keyword arguments of the advantage estimator that `job` names: settings that differ from its own defaults."""
    entry = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    values = {
        "mean": job.norm_mean_type,
        "std": job.norm_std_type,
        "reward_clip": job.reward_clip,
        "advantage_clip": job.advantage_clip,
        "whiten": job.whiten_advantages,
    }
    taken = () if entry is None else entry.keys.values()
    return {name: values[name] for name in taken if values[name] is not None}


def wants_reference(job: JobKeys) -> bool:
    """Whether the job has a reference and its loss reads it: `policy` where it weighs it, anybody's own always."""
    return job.reference is not None and _idle_reference(job) is None


def _idle_reference(job: JobKeys) -> str | None:
    """Why the loss does not read the reference; None where it does."""
    loss = LOSSES.get(job.loss_function)
    if job.loss_function == "policy":
        return None if job.kl_coef else "use_kl_loss is false or kl_loss_coef is 0"
    if loss is None or "ref_log_probs" in loss.reads:
        return None
    return f"the loss {loss.name} does not read it"


def objective_problems(job: JobKeys) -> Iterator[Problem]:
    """What is wrong with a registered loss and its settings. Anybody's own is looked at when the job starts."""
    loss = LOSSES.get(job.loss_function)
    if loss is None:
        return
    absent = [name for name in loss.reads if name not in ROLLOUT_FIELDS]
    if absent and job.max_steps:
        text = f"{loss.name} reads {' and '.join(absent)}, which rollouts do not have ({', '.join(ROLLOUT_FIELDS)})"
        yield Problem(("loss_function",), f"{text}; choose another loss, or call strategy.train_step with this one")
    for name in job.loss_args:
        if name in loss.keys:
            text = f"is given by a key of the job: {loss.keys[name]}; set that, and leave this out"
            yield Problem(("loss_args", name), text)
    own = {name: value for name, value in job.loss_args.items() if name not in loss.keys}
    yield from _arguments(loss).read(own, ("loss_args",))[1]


def idle_objective_keys(job: JobKeys, given: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Paths of the `given` keys that this loss and this advantage estimator do not read, with what rules instead."""
    name = job.loss_function
    if name != "policy":
        for key in POLICY_KEYS:
            if key in given:
                yield (key,), f"has no effect: a setting of the loss policy; those of {name} stand in loss_args"
    elif "kl_estimator" in job.loss_args and not job.kl_coef:
        yield ("loss_args", "kl_estimator"), "has no effect: use_kl_loss is false or kl_loss_coef is 0"
    idle_reference = _idle_reference(job)
    if job.reference is not None and idle_reference is not None:
        yield ("reference",), f"is not built: {idle_reference}"
    loss = LOSSES.get(name)
    if loss is not None and "advantages" not in loss.reads:
        yield ("loss_function",), f"{name} reads no advantages: rewards are measured and change nothing"
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    for key in ADVANTAGE_KEYS:
        if key in given and estimator is None:
            yield (key,), f"has no effect: {job.adv_estimator} alone makes the advantages"
        elif key in given and estimator is not None and key not in {*estimator.keys, *estimator.implied}:
            yield (key,), f"has no effect: the advantages of {job.adv_estimator} do not depend on it"


def _arguments(loss: Loss) -> Arguments:
    return Arguments(f"the loss {loss.name!r}", loss.settings)
