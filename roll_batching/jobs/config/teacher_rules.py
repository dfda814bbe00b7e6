"""Rules and notices of the role `teacher` and of `task: distill`."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import directory_of
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import size_problems
from roll_batching.jobs.config.losses import LOSSES


def distills(job: JobKeys) -> bool:
    """Whether the loss of `job` reads a teacher."""
    loss = LOSSES.get(job.loss_function)
    return loss is not None and "teacher_ids" in loss.reads


def uses_teacher(job: JobKeys) -> bool:
    """Whether the job builds its teacher."""
    return job.teacher is not None and distills(job) and bool(job.max_steps)


def teacher_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of the teacher and of keys that distillation excludes."""
    if job.task == "distill" and LOSSES.get(job.loss_function) is None:
        yield Problem(("loss_function",), f"is {job.loss_function}; task: distill has the loss distill: leave it out")
    if not distills(job) or not job.max_steps or job.task not in ("distill", "sft"):
        return  # objective_rules reports a loss that reads other fields than the task has
    if job.teacher is None:
        text = "is missing: distillation needs the role `teacher` with model_args.model_name_or_path"
        yield Problem(("teacher",), text)
        return
    yield from _model(job)
    yield from _settings(job)


def _model(job: JobKeys) -> Iterator[Problem]:
    assert job.teacher is not None
    path, teacher, student = ("teacher", "model_args"), job.teacher.model_args, job.actor_train.model_args
    if not job.teacher.strategy_args.runs_on_megatron:
        text = f"{job.teacher.strategy_args.strategy_name} cannot serve the teacher; use megatron_infer"
        yield Problem(("teacher", "strategy_args", "strategy_name"), text)
    if teacher.model_name_or_path is None:
        text = "is missing: the model directory of the teacher, which has its weights"
        yield Problem((*path, "model_name_or_path"), text)
    if job.own_devices("teacher") is not None:
        text = "differs from actor_train's: the teacher shares its devices for now; leave it out here"
        yield Problem(("teacher", "device_mapping"), text)
    else:
        yield from size_problems("teacher", job.teacher)
    mine, theirs = student.architecture, teacher.architecture
    if mine is not None and theirs is not None and mine.vocab_size != theirs.vocab_size:
        text = f"has a vocabulary of {theirs.vocab_size:,} tokens, the student {mine.vocab_size:,}: the same id would "
        text += "be another text; choose a teacher of the student's family"
        yield Problem((*path, "model_name_or_path"), text)
    vocabulary = [one.vocab_size for one in (mine, theirs) if one is not None]
    if vocabulary and job.logits_topk > min(vocabulary):
        text = f"is {job.logits_topk:,}, above the vocabulary of {min(vocabulary):,}; 0 takes all of it"
        yield Problem(("logits_topk",), text)


def _settings(job: JobKeys) -> Iterator[Problem]:
    if job.zero_outside_topk and job.kd_objective not in ("forward_kl", "reverse_kl", "mixed_kl"):
        text = f"is for forward_kl, reverse_kl and mixed_kl, not {job.kd_objective}; set it to false"
        yield Problem(("zero_outside_topk",), text)
    if job.zero_outside_topk and job.kd_temperature != 1:
        text = f"has no temperature, and kd_temperature is {job.kd_temperature}; set one of the two to its default"
        yield Problem(("zero_outside_topk",), text)
    if job.task == "distill" and job.distill_loss_weight != 1:
        text = f"is {job.distill_loss_weight}; the rest of 1 would teach the student its own tokens; set it to 1"
        yield Problem(("distill_loss_weight",), text)


def missing_for_distillation(job: JobKeys) -> Iterator[Problem]:
    """The problem that the teacher's model directory does not exist."""
    name = None if job.teacher is None else job.teacher.model_args.model_name_or_path
    if not uses_teacher(job) or name is None:
        return
    try:
        directory_of(name)
    except ConfigError as error:
        yield Problem(("teacher", "model_args", "model_name_or_path"), str(error))
