"""Rules for supervised fine-tuning (`task: sft`), preference pairs (`dpo`) and judged answers (`kto`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.losses import LOSSES, ROLLOUT_FIELDS

TEACHER_FIELDS = ("teacher_log_probs", "teacher_ids")
FIELDS: Mapping[str, tuple[str, ...]] = {
    "grpo": tuple(ROLLOUT_FIELDS),
    "distill": ("response_mask", "rewards", *TEACHER_FIELDS),
    "sft": ("response_mask", "ref_log_probs", *TEACHER_FIELDS),
    "dpo": ("response_mask", "ref_log_probs", "pair", "chosen"),
    "kto": ("response_mask", "ref_log_probs", "desirable", "reference_point"),
}
"""Fields of the samples by task; `ref_log_probs` only with a reference, those of a teacher only with one."""


def supervised_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of keys that exclude each other in such a job, or in an RL job."""
    if not job.is_supervised:
        if job.num_train_epochs is not None:
            yield Problem(("num_train_epochs",), "is read under task: sft and task: dpo; RL has max_steps")
        return
    if job.warmup is not None:
        text = f"precedes RL, and task: {job.task} has one phase: put its keys into actor_train, or choose task: grpo"
        yield Problem(("warmup",), text)
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
    if job.task == "kto" and job.stream is not None:
        text = "forms steps while it reads, and the reference point of KTO is over planned mini-batches; leave it out"
        yield Problem(("train",), text)
    if job.stream is not None and "teacher_ids" in getattr(LOSSES.get(job.loss_function), "reads", ()):
        yield Problem(("train",), "forms steps while it reads, without a teacher for now; leave it out")
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
