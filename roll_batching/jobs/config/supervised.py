"""Rules for supervised fine-tuning (`task: sft`), preference pairs (`dpo`) and judged answers (`kto`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from roll_batching.jobs.config.diagnostics import Notice, Problem, no_effect
from roll_batching.jobs.config.job_keys import SUPERVISED_TASKS, JobKeys
from roll_batching.jobs.config.losses import LOSSES, ROLLOUT_FIELDS
from roll_batching.jobs.config.objective import ObjectiveKeys
from roll_batching.jobs.config.rewards import RewardKeys
from roll_batching.jobs.config.rollout_keys import DynamicSamplingKeys, RewardShapingKeys, RolloutKeys

TEACHER_FIELDS = ("teacher_log_probs", "teacher_ids")
FIELDS: Mapping[str, tuple[str, ...]] = {
    "grpo": tuple(ROLLOUT_FIELDS),
    "distill": ("response_mask", "rewards", *TEACHER_FIELDS),
    "sft": ("response_mask", "ref_log_probs", *TEACHER_FIELDS),
    "dpo": ("response_mask", "ref_log_probs", "pair", "chosen"),
    "kto": ("response_mask", "ref_log_probs", "desirable", "reference_point"),
}
"""Fields of the samples by task; `ref_log_probs` only with a reference, those of a teacher only with one."""

_ROLLOUT_KEYS = (
    "rollout_batch_size",
    "batch_balance",
    "is_offload_states",
    "rollout_samples",
    "num_return_sequences_in_group",
    "prompt_length",
    "response_length",
    "actor_infer",
    "validation",
    *RewardKeys.model_fields,
    *RewardShapingKeys.model_fields,
    *RolloutKeys.model_fields,
    *DynamicSamplingKeys.model_fields,
    *(name for name in ObjectiveKeys.model_fields if name not in ("loss_function", "loss_args")),
)
_REPLACED = {"sft": ("prompt", "response"), "dpo": ("prompt",), "kto": ("prompt",)}
"""By task, the keys of data that `messages` replaces."""
_PROMPT_KEYS = ("tag", "domain_interleave_probs", "long_prompts")
_DATA_KEYS = {
    "sft": ("prompt", "response", "messages"),
    "dpo": ("prompt", "messages", "chosen", "rejected"),
    "kto": ("prompt", "response", "messages", "label"),
}


def supervised(job: JobKeys) -> bool:
    """Whether `job` trains on texts or pairs from a file, without rollouts."""
    return job.task in SUPERVISED_TASKS


def supervised_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of keys that exclude each other in such a job, or in an RL job."""
    if not supervised(job):
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


def supervised_notices(job: JobKeys, given: Mapping[str, Any]) -> Iterator[Notice]:
    """Notices on `given` keys that the other kinds of jobs read: RL, or SFT and DPO."""
    train = given.get("actor_train") or {}
    data = train.get("data_args") or {}
    if not supervised(job):
        for key in ("chosen", "rejected", "label"):
            if key in data:
                yield no_effect(("actor_train", "data_args", key), f"task is {job.task}")
        return
    for key in _ROLLOUT_KEYS:
        if given.get(key) is None or (key in ("prompt_length", "response_length") and "sequence_length" not in given):
            continue  # their sum is the sequence_length where that is not given
        yield no_effect((key,), f"task is {job.task}, which makes no rollouts")
    for key in ("logprob_plan", "logprob_temperature", "router_replay"):
        if train.get(key) is not None:
            yield no_effect(("actor_train", key), f"task is {job.task}, which samples nothing")
    for key in _PROMPT_KEYS:
        if data.get(key) is not None:
            yield no_effect(("actor_train", "data_args", key), f"task is {job.task}, which has no prompts")
    for key in ("prompt", "response", "messages", "chosen", "rejected", "label"):
        if data.get(key) is None:
            continue
        if key not in _DATA_KEYS[job.task]:
            yield no_effect(("actor_train", "data_args", key), f"task is {job.task}")
        elif key in _REPLACED[job.task] and job.actor_train.data_args.messages is not None:
            yield no_effect(("actor_train", "data_args", key), "messages is given")
