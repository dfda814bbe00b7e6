"""Rules for tasks: supervised jobs, batching over a stream (`train`), `token_budget`, and distillation."""

from __future__ import annotations

from collections.abc import Iterator

from roll_batching.errors import ConfigError
from roll_batching.huggingface.directory import directory_of
from roll_batching.jobs.config.diagnostics import Problem
from roll_batching.jobs.config.job_keys import JobKeys
from roll_batching.jobs.config.layout_rules import size_problems
from roll_batching.jobs.config.losses import LOSSES


def supervised_problems(job: JobKeys) -> Iterator[Problem]:
    """Problems of keys that exclude each other in a supervised job, or that only a supervised job reads."""
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
    """Problems of missing keys without which a supervised job cannot run."""
    data = job.actor_train.data_args
    if data.file_name is None:
        contents = {"sft": "texts", "dpo": "pairs", "kto": "judged answers"}[job.task]
        yield Problem(
            ("actor_train", "data_args", "file_name"), f"is missing: the file of {contents} (JSONL, Parquet, ...)"
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
    """Problems of the section `train`, batching over a stream."""
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
    """The problem that the cap of packs differs from `token_budget`, TRL's short form of it."""
    train, path = job.actor_train, ("token_budget",)
    if job.token_budget <= 0:
        return
    cap = train.sequence_packing_args.max_packed_sequence_length_train
    if job.stream is None and train.use_sequence_packing and cap != job.token_budget:
        text = f"is {job.token_budget}, but actor_train.sequence_packing_args.max_packed_sequence_length_train is {cap}"
        yield Problem(path, f"{text}: both are the cap of a pack; leave one of them out")


# ---- distillation


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
    yield from _teacher_model(job)
    yield from _teacher_settings(job)


def _teacher_model(job: JobKeys) -> Iterator[Problem]:
    """Problems of the teacher's strategy, model, devices and vocabulary."""
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
    models = [model for model in (student.architecture, teacher.architecture) if model is not None]
    vocabulary = [model.vocab_size for model in models]
    if len(vocabulary) == 2 and vocabulary[0] != vocabulary[1]:
        text = f"has a vocabulary of {vocabulary[1]:,} tokens, the student {vocabulary[0]:,}: the same id would "
        text += "be another text; choose a teacher of the student's family"
        yield Problem((*path, "model_name_or_path"), text)
    if vocabulary and job.logits_topk > min(vocabulary):
        text = f"is {job.logits_topk:,}, above the vocabulary of {min(vocabulary):,}; 0 takes all of it"
        yield Problem(("logits_topk",), text)


def _teacher_settings(job: JobKeys) -> Iterator[Problem]:
    """Problems of the keys of the loss of distillation."""
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
