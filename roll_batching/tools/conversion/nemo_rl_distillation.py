"""NeMo-RL's sections `distillation`, `loss_fn` and `teacher` as `task: distill`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll_batching.errors import PlanError
from roll_batching.jobs.config.layout_rules import PARALLEL_KEYS
from roll_batching.tools.conversion.foreign_file import ForeignFile, section_at
from roll_batching.tools.conversion.fp8 import convert_nemo_rl_fp8
from roll_batching.tools.conversion.nemo_rl_batching import convert_policy
from roll_batching.tools.conversion.nemo_rl_grpo import convert_evaluation

_OBJECTIVES = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
_FORWARD = (
    *("use_sequence_packing", "use_dynamic_batching_in_infer", "max_tokens_per_microbatch_in_infer"),
    *("sequence_length_round_in_infer", "planning_args"),
)
"""Keys of a role that batch passes without gradient."""
_LAYOUT = ("teacher", "strategy_args", "strategy_config")


def convert_distillation(file: ForeignFile) -> None:
    """Converts steps, evaluation, objective and teacher."""
    section = "distillation"
    file.draft.put(("task",), "distill", section)
    for key, ours in (
        ("num_prompts_per_step", "rollout_batch_size"),
        ("num_generations_per_prompt", "num_return_sequences_in_group"),
        ("topk_logits_k", "logits_topk"),
        ("seed", "seed"),
    ):
        file.move(f"{section}.{key}", (ours,))
    file.move(f"{section}.max_num_steps", ("max_steps",), meaning="ends the job; NeMo-RL also stops at max_num_epochs")
    turns = file.take(f"{section}.max_rollout_turns", 1)
    if turns not in (None, 1):
        file.draft.leave_out(f"{section}.max_rollout_turns", "refused", f"{turns}: rollouts have one turn")
    if file.take(f"{section}.max_num_epochs") is not None:
        file.draft.leave_out(f"{section}.max_num_epochs", "idle", "max_steps ends the job")
    convert_evaluation(file, section)
    objective = file.take("loss_fn.kl_type", "mixed")
    file.draft.put(("kd_objective",), _OBJECTIVES.get(objective, objective), "loss_fn.kl_type")
    weight = file.take("loss_fn.mixed_kl_weight", 0.5)
    if objective == "mixed":
        file.draft.put(("mixed_kl_weight",), weight, "loss_fn.mixed_kl_weight")
    file.move("loss_fn.zero_outside_topk", ("zero_outside_topk",))
    _temperatures(file)
    if isinstance(teacher := file.peek("teacher"), dict):
        _teacher(file, teacher)


def _temperatures(file: ForeignFile) -> None:
    """The sampling temperature of each model, by which NeMo-RL also divides its logits in the loss."""
    key = "generation.temperature"
    student, teacher = (file.peek(f"{role}.{key}", 1.0) for role in ("policy", "teacher"))
    if not all(isinstance(one, (int, float)) and one > 0 for one in (student, teacher)):
        return
    if student != 1:
        text = "NeMo-RL divides the logits of the loss by it, too"
        file.draft.put(("kd_temperature",), student, f"policy.{key}", text)
    if teacher != student:
        text = "teacher.generation.temperature / policy.generation.temperature, as kd_temperature divides both"
        file.draft.put(("teacher_temperature",), teacher / student, f"teacher.{key}", text)


def _teacher(file: ForeignFile, teacher: Mapping[str, Any]) -> None:
    """Model, parallel sizes and batching of the teacher; the rest of the section has no effect."""
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
        text = "DTensor's layout as Megatron's"
        for name, ours in (("tensor", "tensor_model"), ("context", "context")):
            key = f"teacher.dtensor_cfg.{name}_parallel_size"
            file.move(key, (*_LAYOUT, f"{ours}_parallel_size"), meaning=text)
        file.move("teacher.dtensor_cfg.sequence_parallel", (*_LAYOUT, "sequence_parallel"), meaning=text)
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
