"""NeMo-RL's sections `sft`, `dpo` and `distillation` as tasks of these names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.errors import PlanError
from roll_batching.jobs.config.layout_rules import PARALLEL_KEYS
from roll_batching.tools.conversion.foreign_file import ForeignFile, Given, section_at
from roll_batching.tools.conversion.foreign_job import Evaluation
from roll_batching.tools.conversion.layouts import convert_nemo_rl_fp8
from roll_batching.tools.conversion.nemo_rl_batching import convert_policy

_NO_LIMIT = 1_000_000
"""NeMo-RL's files write such a number of steps, or a larger one, for no limit."""
ALL_TEXTS = 1_000_000_000
"""Number of held-out texts that means: all of them."""


def task_of(file: ForeignFile) -> str:
    """Returns the task, by the first section that the file has; leaves out the sections of other tasks."""
    tasks = [task for task in ("sft", "dpo", "distillation", "grpo") if isinstance(file.peek(task), dict)]
    for other in tasks[1:]:
        file.take(other)
        why = f"the file also has a section {tasks[0]}, which is converted: put {other} into another file"
        file.draft.leave_out(other, "refused", why)
    return {"distillation": "distill"}.get(tasks[0], tasks[0]) if tasks else "grpo"


def convert_supervised(file: ForeignFile, task: str) -> None:
    """Converts the section `task`: length, evaluation and, for pairs, the loss."""
    draft = file.draft
    file.move(f"{task}.seed", ("seed",))
    _length(file, task)
    if file.take("sft.only_unmask_final"):
        draft.leave_out("sft.only_unmask_final", "refused", "all turns of the assistant are trained on")
    why = "a longer text is an error that names it; NeMo-RL leaves it out of the loss"
    draft.meanings["sequence_length",] = why
    if task == "dpo":
        _preferences(file)


def _length(file: ForeignFile, task: str) -> None:
    """Writes the length of the job: steps if the file limits them, otherwise epochs."""
    steps, epochs = file.take(f"{task}.max_num_steps"), file.take(f"{task}.max_num_epochs", 1)
    by_steps = isinstance(steps, int) and 0 < steps < _NO_LIMIT
    if by_steps:
        meaning = f"ends the job; NeMo-RL also stops at max_num_epochs ({epochs})" if epochs is not None else ""
        file.draft.put(("max_steps",), steps, f"{task}.max_num_steps", meaning)
    else:
        file.draft.put(("num_train_epochs",), epochs, f"{task}.max_num_epochs")


def read_texts_evaluation(file: ForeignFile, task: str) -> Evaluation:
    """Reads the evaluation on held-out texts or pairs."""
    period = Given(file.take(f"{task}.val_period", 0) or 0, f"{task}.val_period")
    batches, size = file.take(f"{task}.val_batches", 0), file.take(f"{task}.val_global_batch_size", 1)
    file.take(f"{task}.val_micro_batch_size")
    # A list, not `or`: all keys must be taken.
    is_on = any([file.take(f"{task}.val_at_start"), file.take(f"{task}.val_at_end"), period.value > 0])
    count = batches * size if batches and batches > 0 else ALL_TEXTS
    meaning = f"the first {count} held-out texts" if count != ALL_TEXTS else "all held-out texts"
    return Evaluation(period, is_on, samples=Given(count, f"{task}.val_batches", meaning))


def _preferences(file: ForeignFile) -> None:
    """Converts the loss of `dpo`. The weight of the pairs is 1 here, so the weight of SFT is divided by it."""
    draft = file.draft
    draft.put(("loss_function",), "dpo", "dpo.preference_loss")
    draft.put(("reference",), {}, "dpo")
    preference, supervised = file.take("dpo.preference_loss_weight", 1), file.take("dpo.sft_loss_weight", 0)
    file.move("dpo.reference_policy_kl_penalty", ("loss_args", "beta"))
    if file.take("dpo.preference_average_log_probs"):
        draft.put(("loss_args", "average_log_probs"), True, "dpo.preference_average_log_probs")
    averaged = file.take("dpo.sft_average_log_probs")
    if not preference:
        why = "is 0, but the loss is over pairs: task: sft trains on the better answers alone"
        draft.leave_out("dpo.preference_loss_weight", "refused", why)
        return
    if preference != 1:
        why = f"is {preference}, but the weight of the pairs is 1 here: the whole loss is scaled by 1 / {preference}"
        draft.leave_out("dpo.preference_loss_weight", "refused", why)
    if supervised:
        draft.put(("loss_args", "sft_coef"), supervised / preference, "dpo.sft_loss_weight")
        if averaged is not None:
            draft.put(("loss_args", "sft_average_log_probs"), averaged, "dpo.sft_average_log_probs")
    elif averaged:
        draft.leave_out("dpo.sft_average_log_probs", "idle", "sft_loss_weight is 0")


# ---- nemo rl distillation


_OBJECTIVES = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
_FORWARD = (
    *("use_sequence_packing", "use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer"),
    *("sequence_length_round_in_infer", "planning_args"),
)
"""Keys of a role that decide the micro-batches of passes without gradient."""
_LAYOUT = ("teacher", "strategy_args", "strategy_config")


def convert_distillation(file: ForeignFile) -> None:
    """Converts steps, evaluation, objective and teacher."""
    file.draft.put(("task",), "distill", "distillation")
    file.move_all("distill")
    file.check_all("distill")
    objective = file.take("loss_fn.kl_type", "mixed")
    file.draft.put(("kd_objective",), _OBJECTIVES.get(objective, objective), "loss_fn.kl_type")
    weight = file.take("loss_fn.mixed_kl_weight", 0.5)
    if objective == "mixed":
        file.draft.put(("mixed_kl_weight",), weight, "loss_fn.mixed_kl_weight")
    _temperatures(file)
    if isinstance(teacher := file.peek("teacher"), dict):
        _teacher(file, teacher)


def _temperatures(file: ForeignFile) -> None:
    """Converts the sampling temperatures of both models: NeMo-RL also divides the logits of the loss by them."""
    key = "generation.temperature"
    student, teacher = (file.peek(f"{role}.{key}", 1.0) for role in ("policy", "teacher"))
    if not all(isinstance(value, (int, float)) and value > 0 for value in (student, teacher)):
        return
    if student != 1:
        meaning = "NeMo-RL divides the logits of the loss by it, too"
        file.draft.put(("kd_temperature",), student, f"policy.{key}", meaning)
    if teacher != student:
        meaning = "teacher.generation.temperature / policy.generation.temperature, as kd_temperature divides both"
        file.draft.put(("teacher_temperature",), teacher / student, f"teacher.{key}", meaning)


def _teacher(file: ForeignFile, teacher: Mapping[str, Any]) -> None:
    """Converts model, parallel sizes and batching of the teacher; the rest of the section has no effect."""
    file.move("teacher.model_name", ("teacher", "model_args", "model_name_or_path"))
    file.draft.put(("teacher", "strategy_args", "strategy_name"), "megatron_infer", "teacher")
    precisions = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
    file.move("teacher.precision", ("teacher", "model_args", "dtype"), lambda name: precisions.get(str(name), name))
    if file.peek("teacher.megatron_cfg.enabled"):
        for name in PARALLEL_KEYS:
            if file.peek(f"teacher.megatron_cfg.{name}") is not None:
                file.move(f"teacher.megatron_cfg.{name}", (*_LAYOUT, name))
        if file.peek("teacher.megatron_cfg.fp8_cfg.enabled"):
            convert_nemo_rl_fp8(file, "teacher.megatron_cfg", _LAYOUT)
        elif section_at(file.draft.values, "actor_train", "strategy_args", "strategy_config").get("fp8"):
            file.draft.put((*_LAYOUT, "fp8"), None, "teacher.megatron_cfg.fp8_cfg.enabled", "the teacher is in bf16")
    else:
        for key, ours in (
            ("tensor_parallel_size", "tensor_model_parallel_size"),
            ("context_parallel_size", "context_parallel_size"),
            ("sequence_parallel", "sequence_parallel"),
        ):
            file.move(f"teacher.dtensor_cfg.{key}", (*_LAYOUT, ours), meaning="DTensor's layout as Megatron's")
    file.move("teacher.logprob_batch_size", ("teacher", "infer_batch_size"))
    try:
        worker, _ = convert_policy(teacher)
    except PlanError as error:
        file.draft.leave_out("teacher", "refused", f"teacher.{error}")
        return
    for name in _FORWARD:
        if name in worker:
            file.draft.put(("teacher", name), worker[name], "teacher")
    packing = worker.get("sequence_packing_args", {})
    for name in ("algorithm", "max_packed_sequence_length_forward"):
        if name in packing:
            file.draft.put(("teacher", "sequence_packing_args", name), packing[name], "teacher.sequence_packing")
    for name in ("sequence_packing", "dynamic_batching"):
        file.take(f"teacher.{name}")
