"""Rules and notices of `train`, load-balanced batching over a stream, and of TRL's `token_budget`."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys

_POLICY = ("train", "train_policy")


def stream_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of `train`."""
    train = job.train
    if train is None:
        return
    policy = train.train_policy
    if not policy.enable_dp_load_balancing:
        if train.sequence_packing:
            text = "needs train.train_policy.enable_dp_load_balancing: true; or pack planned mini-batches with"
            yield Problem(("train", "sequence_packing"), f"{text} actor_train.use_sequence_packing: true")
        return
    if not job.is_supervised:
        path = (*_POLICY, "enable_dp_load_balancing")
        yield Problem(path, f"is for task: sft or dpo, and this job's is {job.task}; leave the section `train` out")
    if train.max_num_steps is None:
        text = "is missing: with enable_dp_load_balancing it is the number of optimizer steps"
        yield Problem(("train", "max_num_steps"), text)
    both = {"load_balanced_accumulate_steps", "load_balanced_batches_per_optimizer_step"}
    if both <= policy.model_fields_set and train.batches_per_step != policy.load_balanced_batches_per_optimizer_step:
        text = "is another name for load_balanced_batches_per_optimizer_step, with another value; keep one of them"
        yield Problem((*_POLICY, "load_balanced_accumulate_steps"), text)


def token_budget_problems(job: JobKeys) -> Iterator[Problem]:
    """Keys that say something else than TRL's short form."""
    train, path = job.actor_train, ("token_budget",)
    if job.token_budget <= 0:
        return
    if job.stream is not None:
        yield Problem(path, "is the cap of planned packs, but the section train forms its own batches; keep one")
    elif not train.use_sequence_packing:
        yield Problem(path, "packs samples, and actor_train.use_sequence_packing is false; leave one of them out")
    elif (cap := train.sequence_packing_args.max_packed_sequence_length_train) != job.token_budget:
        text = f"is {job.token_budget}, but actor_train.sequence_packing_args.max_packed_sequence_length_train is {cap}"
        yield Problem(path, f"{text}: both are the cap of a pack; leave one of them out")
