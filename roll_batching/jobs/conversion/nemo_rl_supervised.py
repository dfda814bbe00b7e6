"""NeMo-RL's sections `sft` and `dpo` as `task: sft` and `task: dpo`."""

from __future__ import annotations

from roll_batching.jobs.conversion.nemo_rl_given import Given

_NO_LIMIT = 1_000_000
"""Steps or epochs from which NeMo-RL's files mean no limit."""
ALL_TEXTS = 1_000_000_000
"""Held-out texts of an evaluation that takes all of them."""


def task_of(given: Given) -> str:
    """What the job does, in our words: `sft` and `dpo` by their sections; all else is taken for `grpo`."""
    tasks = [task for task in ("sft", "dpo", "grpo") if isinstance(given.peek(task), dict)]
    for other in tasks[1:]:
        given.take(other)
        text = f"the file has a section {tasks[0]}, too, which the job is: convert a file with {other} alone for it"
        given.draft.leave_out(other, "refused", text)
    return tasks[0] if tasks else "grpo"


def supervised(given: Given, task: str) -> None:
    """The section `task`: length, evaluation and, of pairs, the loss."""
    draft = given.draft
    draft.put(("task",), task, task)
    given.move(f"{task}.seed", ("seed",))
    _length(given, task)
    _evaluation(given, task)
    if given.take("sft.only_unmask_final"):
        draft.leave_out("sft.only_unmask_final", "refused", "every turn of the assistant's is learnt")
    text = "no more than these tokens: a longer text is an error that names it; there, it is left out of the loss"
    draft.meanings["sequence_length",] = text
    if task == "dpo":
        _preferences(given)


def _length(given: Given, task: str) -> None:
    steps, epochs = given.take(f"{task}.max_num_steps"), given.take(f"{task}.max_num_epochs", 1)
    by_steps = isinstance(steps, int) and 0 < steps < _NO_LIMIT
    if by_steps:
        text = f"ends the job alone; there, max_num_epochs ({epochs}) ends it, too" if epochs is not None else ""
        given.draft.put(("max_steps",), steps, f"{task}.max_num_steps", text)
    else:
        given.draft.put(("num_train_epochs",), epochs, f"{task}.max_num_epochs")


def _evaluation(given: Given, task: str) -> None:
    period, batches = given.take(f"{task}.val_period", 0), given.take(f"{task}.val_batches", 0)
    size = given.take(f"{task}.val_global_batch_size", 1)
    given.take(f"{task}.val_micro_batch_size")
    wanted = any([given.take(f"{task}.val_at_start"), given.take(f"{task}.val_at_end"), period and period > 0])
    if not wanted:
        given.draft.put(("eval_samples",), 0, f"{task}.val_period", "there is no evaluation")
        return
    text = "first and last step are evaluated, too"
    given.draft.put(("eval_steps",), max(0, period or 0), f"{task}.val_period", text)
    count = batches * size if batches and batches > 0 else ALL_TEXTS
    text = f"the first {count} held-out ones" if count != ALL_TEXTS else "all that are held out"
    given.draft.put(("eval_samples",), count, f"{task}.val_batches", text)


def _preferences(given: Given) -> None:
    draft = given.draft
    draft.put(("loss_function",), "dpo", "dpo.preference_loss")
    draft.put(("reference",), {}, "dpo")
    preference, supervised = given.take("dpo.preference_loss_weight", 1), given.take("dpo.sft_loss_weight", 0)
    given.move("dpo.reference_policy_kl_penalty", ("loss_args", "beta"))
    if given.take("dpo.preference_average_log_probs"):
        draft.put(("loss_args", "average_log_probs"), True, "dpo.preference_average_log_probs")
    averaged = given.take("dpo.sft_average_log_probs")
    if not preference:
        text = "is 0, and the loss is that of the pairs: task: sft learns from the better answers alone"
        draft.leave_out("dpo.preference_loss_weight", "refused", text)
        return
    if preference != 1:
        text = f"is {preference}, and the pairs' weight is 1: the whole loss is that many times smaller here"
        draft.leave_out("dpo.preference_loss_weight", "refused", text)
    if supervised:
        draft.put(("loss_args", "sft_coef"), supervised / preference, "dpo.sft_loss_weight")
        if averaged is not None:
            draft.put(("loss_args", "sft_average_log_probs"), averaged, "dpo.sft_average_log_probs")
    elif averaged:
        draft.leave_out("dpo.sft_average_log_probs", "idle", "sft_loss_weight is 0")
