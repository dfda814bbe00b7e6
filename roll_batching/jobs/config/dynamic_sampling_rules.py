"""Rules and notices of dynamic sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.diagnostics import Notice, Problem, no_effect
from roll_batching.jobs.config.job_keys import JobKeys


def dynamic_sampling_problems(job: JobKeys) -> Iterator[Problem]:
    """Settings that exclude dynamic sampling."""
    here = ("dynamic_sampling",)
    if not job.dynamic_sampling or not job.max_steps:
        return
    if job.task != "grpo":
        yield Problem(here, f"compares rewards, which task: {job.task} does not have; set it to false")
        return
    if job.group_size < 2:
        text = "compares the responses to one prompt, and there is one: raise num_return_sequences_in_group"
        yield Problem(here, text)
    if job.asynchronous:
        text = "needs async_generation_ratio: 0, since the prompts of later steps are asked before a step is known to"
        yield Problem(here, f"{text} need more")
    if job.actor_train.data_args.domain_interleave_probs is not None:
        text = "would change the shares of domains that domain_interleave_probs fixes; leave one of the two out"
        yield Problem(here, text)
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if estimator is not None and estimator.greedy:
        yield Problem(
            here, f"does not work with the greedy responses of {estimator.name}; choose another adv_estimator"
        )


def dynamic_sampling_notices(job: JobKeys, given: dict[str, Any]) -> Iterator[Notice]:
    """Notices on `given` keys without effect."""
    for key in ("dynamic_sampling_max_batches", "dynamic_sampling_batch_size"):
        if key in given and not job.dynamic_sampling:
            yield no_effect((key,), "dynamic_sampling is false")
