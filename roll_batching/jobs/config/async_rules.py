"""Rules for rollouts that are sampled in separate processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.diagnostics import Notice, Problem, no_effect
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.settings.batching import LogprobPlan


def corrects_engine(job: JobKeys) -> bool:
    """Whether the loss corrects for the difference between trainer and sampler by weights."""
    correction = job.train_infer_correction
    return job.loss_args.get("engine_ratio_cap") is not None or (
        correction is not None and correction.is_weight is not None
    )


def reads_sampled_log_probs(job: JobKeys) -> bool:
    """Whether training reads the log-probs with which tokens were sampled."""
    return logprob_plan_of(job) == "rollout" or corrects_engine(job) or job.train_infer_correction is not None


def logprob_plan_of(job: JobKeys) -> LogprobPlan:
    """Source of old log-probs; by default the sampler in an asynchronous job without correction."""
    train = job.actor_train
    if job.asynchronous and "logprob_plan" not in train.model_fields_set and not corrects_engine(job):
        return "rollout" if job.train_infer_correction is None else train.chosen_logprob_plan
    return train.chosen_logprob_plan


def async_problems(job: JobKeys) -> Iterator[Problem]:
    """Keys that exclude sampling in a separate process."""
    if not job.has_sampler or not job.max_steps:
        return
    if job.asynchronous:
        yield from _old_log_probs(job)
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if estimator is not None and estimator.greedy:
        text = (
            f"{estimator.name} needs greedy completions from the current weights, which a separate sampler cannot give"
        )
        cure = "set async_generation_ratio to 0" if job.asynchronous else "leave actor_infer.device_mapping out"
        yield Problem(("adv_estimator",), f"{text}; {cure}, or choose another")


def _old_log_probs(job: JobKeys) -> Iterator[Problem]:
    where = ("actor_train", "logprob_plan")
    plan = job.actor_train.logprob_plan
    if plan == "none":
        text = "none assumes that the current weights sampled, which is wrong under async_generation_ratio"
        yield Problem(where, f"{text}; leave it out, or use rollout")
    elif plan != "rollout" and not corrects_engine(job):
        text = (
            f"{plan} takes old log-probs from the current weights, but older ones sampled (async_generation_ratio): "
            "use rollout, or correct for them with train_infer_correction.is_weight or loss_args.engine_ratio_cap "
            "(truncated importance sampling)"
        )
        yield Problem(where, text)


def async_notices(job: JobKeys, given: dict[str, Any]) -> Iterator[Notice]:
    """Notices on `given` keys of asynchronous rollouts that this job does not read."""
    has_processes = job.has_sampler or job.own_devices("reference") is not None
    for key in ("max_staleness", "sampler_restarts", "rollout_timeout"):
        if key in given and not (job.asynchronous if key == "max_staleness" else has_processes):
            yield no_effect((key,), "async_generation_ratio is 0")
