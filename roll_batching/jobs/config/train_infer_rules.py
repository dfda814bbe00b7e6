"""Rules of `train_infer_correction`."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.supervised import supervised

_KEY = "train_infer_correction"


def train_infer_problems(job: JobKeys) -> Iterator[Problem]:
    """Contradictions in the section, and keys of the job that exclude it."""
    correction = job.train_infer_correction
    if correction is None or supervised(job) or not job.max_steps:
        return
    if job.task == "distill":
        yield Problem((_KEY,), "concerns old log-probs, which task: distill does not have; leave it out")
        return
    for path, text in correction.problems():
        yield Problem((_KEY, *path), text)
    if job.loss_args.get("engine_ratio_cap") is not None:
        text = f"corrects in the loss what {_KEY} corrects before it; keep one of the two"
        yield Problem(("loss_args", "engine_ratio_cap"), text)
    plan = job.actor_train.logprob_plan
    if plan in ("none", "rollout"):
        cause = "computes no old log-probs" if plan == "none" else "takes the sampler's log-probs for old ones"
        text = f"{plan} {cause}, so {_KEY} has nothing to compare; use train or own"
        yield Problem(("actor_train", "logprob_plan"), text)
    if job.drop_zero_advantage_groups:
        text = f"leaves groups without old log-probs, which {_KEY} reads; set it to false"
        yield Problem(("drop_zero_advantage_groups",), text)
