"""NeMo-RL's sections `sft` and `dpo` as `task: sft` and `task: dpo`."""

from __future__ import annotations

from roll_batching.tools.conversion.foreign_file import ForeignFile

_NO_LIMIT = 1_000_000
"""Numbers of steps from here on mean no limit in NeMo-RL's files."""
ALL_TEXTS = 1_000_000_000
"""Number of held-out texts that stands for all of them."""


def task_of(file: ForeignFile) -> str:
    """The task by the sections of the file: `sft`, `dpo`, `distill`, else `grpo`."""
    tasks = [task for task in ("sft", "dpo", "distillation", "grpo") if isinstance(file.peek(task), dict)]
    for other in tasks[1:]:
        file.take(other)
        text = f"the file also has a section {tasks[0]}, which is converted: put {other} into another file"
        file.draft.leave_out(other, "refused", text)
    return {"distillation": "distill"}.get(tasks[0], tasks[0]) if tasks else "grpo"


def convert_supervised(file: ForeignFile, task: str) -> None:
    """Converts the section `task`: length, evaluation and, for pairs, the loss."""
    draft = file.draft
    draft.put(("task",), task, task)
    file.move(f"{task}.seed", ("seed",))
    _length(file, task)
    _evaluation(file, task)
    if file.take("sft.only_unmask_final"):
        draft.leave_out("sft.only_unmask_final", "refused", "all turns of the assistant are trained on")
    text = "a longer text is an error that names it; NeMo-RL leaves it out of the loss"
    draft.meanings["sequence_length",] = text
    if task == "dpo":
        _preferences(file)


def _length(file: ForeignFile, task: str) -> None:
    steps, epochs = file.take(f"{task}.max_num_steps"), file.take(f"{task}.max_num_epochs", 1)
    by_steps = isinstance(steps, int) and 0 < steps < _NO_LIMIT
    if by_steps:
        text = f"ends the job; NeMo-RL also stops at max_num_epochs ({epochs})" if epochs is not None else ""
        file.draft.put(("max_steps",), steps, f"{task}.max_num_steps", text)
    else:
        file.draft.put(("num_train_epochs",), epochs, f"{task}.max_num_epochs")


def _evaluation(file: ForeignFile, task: str) -> None:
    period, batches = file.take(f"{task}.val_period", 0), file.take(f"{task}.val_batches", 0)
    size = file.take(f"{task}.val_global_batch_size", 1)
    file.take(f"{task}.val_micro_batch_size")
    wanted = any([file.take(f"{task}.val_at_start"), file.take(f"{task}.val_at_end"), period and period > 0])
    if not wanted:
        file.draft.put(("eval_samples",), 0, f"{task}.val_period", "there is no evaluation")
        return
    text = "the first and the last step are evaluated, too"
    file.draft.put(("eval_steps",), max(0, period or 0), f"{task}.val_period", text)
    count = batches * size if batches and batches > 0 else ALL_TEXTS
    text = f"the first {count} held-out texts" if count != ALL_TEXTS else "all held-out texts"
    file.draft.put(("eval_samples",), count, f"{task}.val_batches", text)


def _preferences(file: ForeignFile) -> None:
    draft = file.draft
    draft.put(("loss_function",), "dpo", "dpo.preference_loss")
    draft.put(("reference",), {}, "dpo")
    preference, supervised = file.take("dpo.preference_loss_weight", 1), file.take("dpo.sft_loss_weight", 0)
    file.move("dpo.reference_policy_kl_penalty", ("loss_args", "beta"))
    if file.take("dpo.preference_average_log_probs"):
        draft.put(("loss_args", "average_log_probs"), True, "dpo.preference_average_log_probs")
    averaged = file.take("dpo.sft_average_log_probs")
    if not preference:
        text = "is 0, but the loss is over pairs: task: sft trains on the better answers alone"
        draft.leave_out("dpo.preference_loss_weight", "refused", text)
        return
    if preference != 1:
        text = f"is {preference}, but the weight of the pairs is 1 here: the whole loss is scaled by 1 / {preference}"
        draft.leave_out("dpo.preference_loss_weight", "refused", text)
    if supervised:
        draft.put(("loss_args", "sft_coef"), supervised / preference, "dpo.sft_loss_weight")
        if averaged is not None:
            draft.put(("loss_args", "sft_average_log_probs"), averaged, "dpo.sft_average_log_probs")
    elif averaged:
        draft.leave_out("dpo.sft_average_log_probs", "idle", "sft_loss_weight is 0")
