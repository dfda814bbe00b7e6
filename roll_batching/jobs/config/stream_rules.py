"""Rules and notices of `train`, load-balanced batching over a stream, and of TRL's `token_budget`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll_batching.jobs.config.diagnostics import Notice, Problem, no_effect
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.stream import TrainPolicy
from roll_batching.jobs.config.supervised import supervised

_POLICY = ("train", "train_policy")
_REPLACED = (
    "use_sequence_packing",
    "use_dynamic_batching",
    "use_dynamic_batching_in_train",
    "use_dynamic_batching_in_infer",
    "max_tokens_per_microbatch_in_train",
    "max_tokens_per_microbatch_in_infer",
    "padded_length",
    "infer_batch_size",
)
"""Keys of actor_train that load-balanced batching replaces."""


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
    if not supervised(job):
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


def stream_notices(job: JobKeys, given: Mapping[str, Any]) -> Iterator[Notice]:
    """Notices on `given` keys that such a job does not read."""
    train, section = job.train, given.get("train") or {}
    if train is None:
        return
    policy = section.get("train_policy") or {}
    if not train.train_policy.enable_dp_load_balancing:
        off = "train.train_policy.enable_dp_load_balancing is false"
        if section.get("max_num_steps") is not None:
            yield no_effect(("train", "max_num_steps"), off)
        for key in policy:
            if key in TrainPolicy.model_fields and key != "enable_dp_load_balancing":
                yield no_effect((*_POLICY, key), off)
        return
    if train.sequence_packing and "load_balanced_batching_strategy" in policy:
        yield no_effect((*_POLICY, "load_balanced_batching_strategy"), "sequence_packing takes every sample that fits")
    for key in ("max_steps", "num_train_epochs"):
        if given.get(key) is not None and not (key == "max_steps" and job.max_steps == given[key]):
            yield no_effect((key,), "train.max_num_steps is the job's length")
    role = given.get("actor_train") or {}
    for key in _REPLACED:
        if role.get(key) is not None and getattr(job.actor_train, key) != role[key]:
            yield no_effect(("actor_train", key), "train.train_policy replaces it")
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if (role.get("training_args") or {}).get(key) is not None:
            text = "an optimizer step is load_balanced_batches_per_optimizer_step micro-batches per rank"
            yield no_effect(("actor_train", "training_args", key), text)
