"""ROLL's distillation pipelines: a teacher over given texts, and over the student's rollouts."""

from __future__ import annotations

from typing import Any

from roll_batching.tools.conversion.draft import Draft
from roll_batching.tools.conversion.foreign_file import section_at

_SEVERAL = "several teachers by tag: task: distill has one teacher, a section with model_args (docs/distillation.md)"
_ON_PROMPT = "is true: the teacher's distributions are compared over the answer alone"


def rename_students(draft: Draft, data: dict[str, Any]) -> bool:
    """Renames `student_train` and `student_infer` in `data` to our roles; returns whether the file has them."""
    if "student_train" not in data:
        return False
    for theirs, ours in (("student_train", "actor_train"), ("student_infer", "actor_infer")):
        data[ours] = data.pop(theirs, None) or {}
        record_origins(draft, (ours,), (theirs,), data[ours])
    return True


def convert_on_policy(draft: Draft) -> None:
    """Converts on-policy distillation to `task: distill`. In ROLL the teacher's divergence is the advantage."""
    values = draft.values
    draft.put(("task",), "distill", "student_train")
    meaning = (
        "the divergence over the teacher's likely tokens; ROLL estimates the same one from the sampled token alone"
    )
    draft.put(("kd_objective",), "reverse_kl", "teacher", meaning)
    if values.pop("adv_estimator", None) is not None and "adv_estimator" not in draft.defaults:
        draft.leave_out("adv_estimator", "idle", "the teacher's divergence is the whole loss, in ROLL the advantage")
    teacher = values.get("teacher")
    if isinstance(teacher, dict) and "model_args" not in teacher:
        del values["teacher"]
        draft.leave_out("teacher", "refused", _SEVERAL)
    elif isinstance(teacher, dict) and teacher.get("opd_kl_coef") in (None, 1, 1.0):
        teacher.pop("opd_kl_coef", None)


def convert_texts(draft: Draft, student: dict[str, Any]) -> None:
    """Converts distillation over given texts to `task: sft` with the loss `distill`."""
    values = draft.values
    draft.put(("task",), "sft", "student")
    draft.put(("loss_function",), "distill", "student")
    epochs = section_at(student, "training_args").pop("num_train_epochs", 1)
    draft.put(("num_train_epochs",), epochs, "student.training_args.num_train_epochs")
    if values.pop("max_steps", None) is not None:
        draft.leave_out("max_steps", "idle", "ROLL's distillation does not read it, but num_train_epochs")
    for key, value in student.items():
        draft.put(("actor_train", key), value, f"student.{key}")
        record_origins(draft, ("actor_train", key), ("student", key), value)
    _models(draft)
    teacher = section_at(values, "teacher")
    rows = section_at(teacher, "training_args").pop("per_device_train_batch_size", None)
    if rows is not None and "infer_batch_size" not in teacher:
        where = "teacher.training_args.per_device_train_batch_size"
        draft.put(("teacher", "infer_batch_size"), rows, where)
    _texts(draft)
    if values.pop("distill_on_prompt", None):
        draft.leave_out("distill_on_prompt", "refused", _ON_PROMPT)
    if values.pop("logits_transfer_backend", None) is not None:
        draft.leave_out("logits_transfer_backend", "idle", "samples carry the teacher's tokens, by all-to-all")
    draft.meanings["sequence_length",] = "a longer text is an error that names it; ROLL truncates it"


def _models(draft: Draft) -> None:
    """Writes the models of both roles: `student_pretrain` and `teacher_pretrain` unless both roles name one."""
    values, path = draft.values, ("model_args", "model_name_or_path")
    named = {role: section_at(values, role, path[0]).get(path[1]) for role in ("actor_train", "teacher")}
    for role, key in (("actor_train", "student_pretrain"), ("teacher", "teacher_pretrain")):
        name = values.pop(key, None)
        if name is not None and not all(named.values()):
            draft.put((role, *path), name, key)


def _texts(draft: Draft) -> None:
    """Converts the keys of a line: an optional prompt, the question after it, and the answer."""
    values, data = draft.values, ("actor_train", "data_args")
    prompt, question = values.pop("prompt_key", None), values.pop("question_key", "question")
    draft.put((*data, "prompt"), prompt or question, "prompt_key" if prompt else "question_key")
    if prompt:
        draft.put((*data, "query"), question, "question_key")
    draft.put((*data, "response"), values.pop("answer_key", "answer"), "answer_key")
    if (system := values.pop("system_key", None)) is not None:
        draft.put((*data, "system"), system, "system_key")
    meaning = "texts go through the tokenizer's chat template; in ROLL, through the one that `template` names"
    draft.put((*data, "chat"), True, "data_args.template", meaning)


def record_origins(draft: Draft, ours: tuple[str, ...], theirs: tuple[str, ...], value: Any) -> None:
    """Records in `draft` that each key below `ours` in `value` came from the same key below `theirs`."""
    if isinstance(value, dict):
        for key, below in value.items():
            draft.origins[(*ours, key)] = ".".join((*theirs, str(key)))
            record_origins(draft, (*ours, key), (*theirs, str(key)), below)
