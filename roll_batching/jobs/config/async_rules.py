"""What rollouts of processes that do not train ask of other keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.diagnostics import Notice, Problem, no_effect
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.settings.batching import LogprobPlan


def corrects_engine(job: JobKeys) -> bool:
    """Whether the loss weighs samples by the weights in training against those that drew them."""
    return job.loss_args.get("engine_ratio_cap") is not None


def logprob_plan_of(job: JobKeys) -> LogprobPlan:
    """Where old log-probs come from: in an asynchronous job from the sampler, unless the loss corrects for it."""
    train = job.actor_train
    if job.asynchronous and "logprob_plan" not in train.model_fields_set and not corrects_engine(job):
        return "rollout"
    return train.chosen_logprob_plan


def async_problems(job: JobKeys) -> Iterator[Problem]:
    """What does not go together with rollouts of a process that does not train."""
    if not job.has_sampler or not job.max_steps:
        return
    if job.asynchronous:
        yield from _old_log_probs(job)
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if estimator is not None and estimator.greedy:
        text = f"{estimator.name} compares with greedy answers of the weights in training, which a sampler has not"
        cure = "set async_generation_ratio to 0" if job.asynchronous else "leave actor_infer.device_mapping out"
        yield Problem(("adv_estimator",), f"{text}; {cure}, or choose another")


def _old_log_probs(job: JobKeys) -> Iterator[Problem]:
    where = ("actor_train", "logprob_plan")
    plan = job.actor_train.logprob_plan
    if plan == "none":
        text = "none takes the samples for those of the weights in training, which async_generation_ratio makes untrue"
        yield Problem(where, f"{text}; leave it out, or use rollout")
    elif plan != "rollout" and not corrects_engine(job):
        text = (
            f"{plan} compares with the weights in training, and older ones drew the samples (async_generation_ratio): "
            "use rollout, or correct for them with loss_args.engine_ratio_cap (truncated importance sampling)"
        )
        yield Problem(where, text)


def async_notices(job: JobKeys, given: dict[str, Any]) -> Iterator[Notice]:
    """Paths of the `given` keys that this job does not read."""
    apart = job.has_sampler or job.own_devices("reference") is not None
    for key in ("max_staleness", "sampler_restarts", "rollout_timeout"):
        if key in given and not (job.asynchronous if key == "max_staleness" else apart):
            yield no_effect((key,), "async_generation_ratio is 0")
