"""What rollouts ahead of training ask of other keys."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.config.batching import LogprobPlan
from roll_batching.config.diagnostics import Problem
from roll_batching.config.job_keys import JobKeys


def corrects_engine(job: JobKeys) -> bool:
    """Whether the loss weighs samples by the weights in training against those that drew them."""
    return job.loss_args.get("engine_ratio_cap") is not None


def logprob_plan_of(job: JobKeys) -> LogprobPlan:
    """Where old log-probs come from: in an asynchronous job from the sampler, unless the loss corrects for it."""
    train = job.actor_train
    if not job.asynchronous or "logprob_plan" in train.model_fields_set:
        return train.logprob_plan
    return "train" if corrects_engine(job) else "rollout"


def async_problems(job: JobKeys) -> Iterator[Problem]:
    """What does not go together with rollouts ahead of training."""
    if not job.asynchronous or not job.max_steps:
        return
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
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if estimator is not None and estimator.greedy:
        text = f"{estimator.name} compares with greedy answers of the weights in training, which a sampler has not"
        yield Problem(("adv_estimator",), f"{text}; set async_generation_ratio to 0, or choose another")
    devices = job.actor_infer.device_mapping
    engine = not job.actor_infer.strategy_args.runs_on_megatron  # its devices get a notice
    if not engine and devices is not None and devices != job.actor_train.device_mapping and len(devices) != 1:
        text = f"names {len(devices)} devices, and the sampler of async_generation_ratio is one process; name one"
        yield Problem(("actor_infer", "device_mapping"), text)
