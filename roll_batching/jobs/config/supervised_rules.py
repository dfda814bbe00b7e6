"""Rules for supervised jobs (`task: sft`, `dpo`, `kto`), for batching over a stream (`train`) and `token_budget`."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys


def supervised_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of keys that exclude each other in such a job, or in an RL job."""
    if not job.is_supervised:
        if job.num_train_epochs is not None:
            yield Problem(("num_train_epochs",), "is read under task: sft and task: dpo; RL has max_steps")
        return
    if (
        job.stream is None
        and job.num_train_epochs is not None
        and job.max_steps != JobKeys.model_fields["max_steps"].default
    ):
        yield Problem(("num_train_epochs",), "replaces max_steps; keep one of the two")
    if job.actor_train.training_args.max_steps > 0:
        text = "is the length of the schedule, which follows from the top-level max_steps or num_train_epochs"
        yield Problem(("actor_train", "training_args", "max_steps"), f"{text}; leave it out")
    rows = job.actor_train.training_args.per_device_train_batch_size
    if job.task == "dpo" and job.stream is None and rows % 2:
        path = ("actor_train", "training_args", "per_device_train_batch_size")
        yield Problem(path, f"is {rows}; it counts sequences, and a pair is two of them: make it even")
    if job.task == "kto" and job.world_size is not None:
        model_size = job.actor_train.strategy_args.strategy_config.model_size
        if job.world_size % model_size == 0 and job.mini_batch_size(job.world_size // model_size) < 2:
            path = ("actor_train", "training_args", "per_device_train_batch_size")
            yield Problem(path, "makes steps of one answer; the reference point of KTO takes answers to other prompts")


def missing_for_supervised(job: JobKeys) -> Iterator[Problem]:
    """Keys that such a job cannot run without."""
    data = job.actor_train.data_args
    if data.file_name is None:
        what = {"sft": "texts", "dpo": "pairs", "kto": "judged answers"}[job.task]
        yield Problem(
            ("actor_train", "data_args", "file_name"), f"is missing: the file of {what} (JSONL, Parquet, ...)"
        )
    if job.sequence_length is None:
        yield Problem(("sequence_length",), "is missing: the most tokens that a text may have")
    if not job.max_steps:
        yield Problem(
            ("max_steps",),
            "is 0: nothing to do; set it to the number of optimizer steps, or set num_train_epochs instead",
        )


# ---- streams, and TRL's token budget


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
    cap = train.sequence_packing_args.max_packed_sequence_length_train
    if job.stream is None and train.use_sequence_packing and cap != job.token_budget:
        text = f"is {job.token_budget}, but actor_train.sequence_packing_args.max_packed_sequence_length_train is {cap}"
        yield Problem(path, f"{text}: both are the cap of a pack; leave one of them out")
