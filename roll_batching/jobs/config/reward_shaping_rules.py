"""Rules of `reward_scaling` and `overlong_buffer`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roll_batching.jobs.config.advantages import ADVANTAGE_ESTIMATORS
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys


def reward_shaping_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of `reward_scaling` and `overlong_buffer`."""
    scaling, buffer = job.reward_scaling, job.overlong_buffer
    given = "reward_scaling" if scaling is not None else "overlong_buffer"
    if not job.shapes_rewards or not job.max_steps:
        return
    if job.task != "grpo":
        yield Problem((given,), f"changes rewards, which task: {job.task} does not have; leave it out")
        return
    estimator = ADVANTAGE_ESTIMATORS.get(job.adv_estimator)
    if estimator is not None and estimator.greedy:
        text = (
            f"does not change the rewards of the greedy responses that {estimator.name} compares with; choose another"
        )
        yield Problem((given,), f"{text} adv_estimator")
    if scaling is not None:
        for key in ("source", "target"):
            low, high = getattr(scaling, f"{key}_min"), getattr(scaling, f"{key}_max")
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                yield Problem(("reward_scaling", f"{key}_min"), f"is {low}, not below {key}_max {high}")
    if buffer is not None:
        longest = buffer.response_length or job.response_length
        if longest is not None and buffer.length > longest:
            yield Problem(("overlong_buffer", "length"), f"is {buffer.length}, more than the {longest} of a response")
        if not math.isfinite(buffer.penalty):
            yield Problem(("overlong_buffer", "penalty"), f"is {buffer.penalty}, no number to subtract")
