"""NeMo-RL's batching as the batching keys of actor_train, and its optimizers and schedules, of Megatron and of torch.

NeMo-RL steps a schedule after all optimizer steps of one pass over a rollout (a call of `train`), in every worker:
`models/policy/workers/megatron_policy_worker.py:1055` (in samples, of which Megatron-Bridge counts
`train_global_batch_size` for each iteration of the file), `dtensor_policy_worker_v2.py:572`,
`models/value/workers/megatron_value_worker.py:602`. PPO calls it `ppo_epochs` times in an RL step
(`algorithms/ppo.py:735`). A pass of `sft` and `dpo` is one optimizer step; `algorithms/dpo.py:274` doubles iterations
because its pairs are two samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from roll_batching.errors import ConfigError, PlanError
from roll_batching.integrations.nemo_rl_names import microbatch_order
from roll_batching.tools.conversion.foreign_file import LAYOUT, ROLE, TRAIN, ForeignFile, Given, section_at
from roll_batching.tools.conversion.foreign_job import Batch, Schedule
from roll_batching.tools.conversion.nemo_rl_file import RL_TASKS
from roll_batching.tools.conversion.optimizers import convert_muon_keys, convert_optimizer

_PACKING, _DYNAMIC = "sequence_packing", "dynamic_batching"
_ORIGINS: Mapping[tuple[str, ...], str] = {
    ("use_sequence_packing",): f"{_PACKING}.enabled",
    ("sequence_packing_args", "algorithm"): f"{_PACKING}.algorithm",
    ("sequence_packing_args", "max_packed_sequence_length_train"): f"{_PACKING}.train_mb_tokens",
    ("sequence_packing_args", "max_packed_sequence_length_forward"): f"{_PACKING}.logprob_mb_tokens",
    ("use_dynamic_batching_in_train",): f"{_DYNAMIC}.enabled",
    ("use_dynamic_batching_in_infer",): f"{_DYNAMIC}.enabled",
    ("max_tokens_per_microbatch_in_train",): f"{_DYNAMIC}.train_mb_tokens",
    ("max_tokens_per_microbatch_in_infer",): f"{_DYNAMIC}.logprob_mb_tokens",
    ("sequence_length_round_in_train",): f"{_DYNAMIC}.sequence_length_round",
    ("sequence_length_round_in_infer",): f"{_DYNAMIC}.sequence_length_round",
    ("planning_args", "dynamic_algorithm"): f"{_DYNAMIC}.enabled",
    ("planning_args", "shared_shapes"): f"{_DYNAMIC}.enabled",
}
"""Key of NeMo-RL's `policy`, by the key of actor_train that `convert_policy` makes of it."""


def read_batch(file: ForeignFile, source: str, task: str, devices: int) -> Batch:
    """Converts `policy.sequence_packing` and `policy.dynamic_batching`; returns the batch sizes of `policy`."""
    policy = file.peek("policy")
    try:
        worker, without_effect = convert_policy({key: _integers(value) for key, value in policy.items()})
    except PlanError as error:
        raise ConfigError(f"{source}: policy.{error}") from None
    for key, value in worker.items():
        file.draft.put((ROLE, key), value)
    key = f"policy.{_PACKING}.microbatch_order"
    layout = section_at(file.draft.values, *LAYOUT)
    if file.peek(key) == "largest_first" and layout.get("pipeline_model_parallel_size", 1) != 1:
        why = "micro-batches of a pipeline run in the order of the smallest predicted step time"
        file.draft.leave_out(key, "refused", why)
    for path, name in _ORIGINS.items():
        file.draft.origins[(ROLE, *path)] = f"policy.{name}"
    for name, why in without_effect.items():
        file.draft.leave_out(f"policy.{name}", "idle", why)
    for name in (_PACKING, _DYNAMIC, "make_sequence_length_divisible_by"):
        file.take(f"policy.{name}")
    size, rows, meaning = file.take("policy.train_global_batch_size"), file.take("policy.train_micro_batch_size", 1), ""
    if task == "dpo" and isinstance(size, int) and isinstance(rows, int):
        size, rows, meaning = 2 * size, 2 * rows, "counts sequences, two per pair; NeMo-RL counts pairs"
    sequences = Given(size, "policy.train_global_batch_size")
    return Batch(devices, sequences, Given(rows, "policy.train_micro_batch_size", meaning))


def steps_of_a_rollout(file: ForeignFile, section: str, size: Any = None) -> int:
    """Optimizer steps of one pass over the samples of a rollout; 1 if the file has no numbers.

    `section` of the file has the number of samples. `size`: samples of a mini-batch; None: the policy's.
    """
    size = file.peek("policy.train_global_batch_size") if size is None else size
    numbers = [file.peek(f"{section}.num_{name}") for name in ("prompts_per_step", "generations_per_prompt")]
    if not all(isinstance(number, int) and number > 0 for number in (*numbers, size)):
        return 1
    return max(1, int(numbers[0] * numbers[1]) // int(size))


def _integers(value: Any) -> Any:
    """Converts whole floats in `value` and its sections to int: `${div:...}` makes floats of all numbers."""
    if isinstance(value, dict):
        return {key: _integers(below) for key, below in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def convert_policy(policy: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """(Keys of actor_train; reason by each key of NeMo-RL's section `policy` that has no effect here).

    Reads `sequence_packing`, `dynamic_batching` and `make_sequence_length_divisible_by`. Raises `PlanError` when both
    are enabled, and for a token budget that is missing or no number (such as an unresolved `${mul:...}`).
    """
    packing, dynamic = _section(policy, _PACKING), _section(policy, _DYNAMIC)
    use_packing = bool(packing.pop("enabled", False))
    use_dynamic = bool(dynamic.pop("enabled", False))
    if use_packing and use_dynamic:
        raise PlanError("sequence_packing and dynamic_batching are both enabled; enable one of them")
    without_effect: dict[str, str] = {}
    result: dict[str, Any] = {"use_sequence_packing": use_packing}
    if use_packing:
        train, forward = _budgets(_PACKING, packing)
        result["sequence_packing_args"] = {
            "algorithm": packing.pop("algorithm", "modified_first_fit_decreasing"),
            "max_packed_sequence_length_train": train,
            "max_packed_sequence_length_forward": forward,
        }
        if packing.pop("sequence_length_round", None) is not None:
            text = "NeMo-RL never reads it; here packs are aligned as the parallel layout needs"
            without_effect[f"{_PACKING}.sequence_length_round"] = text
        if microbatch_order(packing.pop("microbatch_order", None)) == "largest_first":
            text = "a rank's micro-batches run by falling cost, which is largest first"
            without_effect[f"{_PACKING}.microbatch_order"] = text
        without_effect |= {f"{_PACKING}.{key}": "has no counterpart" for key in sorted(packing)}
    if use_dynamic:
        train, forward = _budgets(_DYNAMIC, dynamic)
        result |= {
            "use_dynamic_batching_in_train": True,
            "max_tokens_per_microbatch_in_train": train,
            "use_dynamic_batching_in_infer": True,
            "max_tokens_per_microbatch_in_infer": forward,
            "planning_args": {"dynamic_algorithm": "nemo_rl", "shared_shapes": True},
        }
        multiple = dynamic.pop("sequence_length_round", None)
        if multiple is not None:
            multiple = _whole_number(f"{_DYNAMIC}.sequence_length_round", multiple)
            result["sequence_length_round_in_train"] = result["sequence_length_round_in_infer"] = multiple
        without_effect |= {f"{_DYNAMIC}.{key}": "has no counterpart" for key in sorted(dynamic)}
    if policy.get("make_sequence_length_divisible_by") is not None:
        text = "alignment follows from TP, CP, sequence parallelism and precision"
        without_effect["make_sequence_length_divisible_by"] = text
    return result, without_effect


def _budgets(section: str, values: dict[str, Any]) -> tuple[int, int]:
    """Most tokens of a micro-batch (in training, in passes without gradient); removes both from `values`."""
    if values.get("train_mb_tokens") is None:
        raise PlanError(f"{section}.train_mb_tokens is missing; it is the cap of a micro-batch in tokens")
    train = _whole_number(f"{section}.train_mb_tokens", values.pop("train_mb_tokens"))
    forward = values.pop("logprob_mb_tokens", None)
    return train, train if forward is None else _whole_number(f"{section}.logprob_mb_tokens", forward)


def _section(policy: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = policy.get(name) or {}
    if not isinstance(section, Mapping):
        raise PlanError(f"{name} is {section!r}; it is a section of keys and values")
    return dict(section)


def _whole_number(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{key} is {value!r}; write a whole number of tokens, at least 1")
    return value


# ---- nemo rl optimizer


_SCHEDULER = "policy.megatron_cfg.scheduler"
_PASS = "a pass over a rollout"
_SPANNED = (*RL_TASKS, "value")
"""Tasks and roles whose learning-rate schedule may be shorter or longer than the job."""
_ABSENT = object()
_LINEAR = {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5}
"""Defaults of torch.optim.lr_scheduler.LinearLR."""


def read_schedule(file: ForeignFile, task: str, steps: int, job: ForeignFile | None = None) -> Schedule:
    """Converts the optimizer; returns its learning-rate schedule, whose unit is a pass of `steps` optimizer steps.

    `job`: the file with the length of the job, if `file` has only the settings of a critic.
    """
    megatron = "megatron_cfg" in file.data["policy"]
    if megatron:
        for name in ("optimizer", "scheduler"):
            file.leave_out(f"policy.{name}", "idle", f"DTensor's; Megatron's is policy.megatron_cfg.{name}")
    for section in ("policy.megatron_cfg.optimizer", "policy.optimizer.kwargs"):
        betas = file.take(f"{section}.betas")
        if isinstance(betas, list) and len(betas) == 2:
            for number, beta in enumerate(betas, 1):
                file.draft.put((*TRAIN, f"adam_beta{number}"), beta, f"{section}.betas")
        file.move_all("optimizer", section)
    convert_optimizer(file, "policy.optimizer.name", megatron=False)
    convert_optimizer(file, "policy.megatron_cfg.optimizer.optimizer")
    convert_muon_keys(file, lambda name: f"policy.megatron_cfg.optimizer.{name}")
    keys = ["policy.megatron_cfg.optimizer.clip_grad", "policy.max_grad_norm"]
    key, unused = keys if megatron else reversed(keys)
    file.take(unused)
    if (norm := file.take(key, _ABSENT)) is not _ABSENT:  # null switches clipping off
        file.draft.put((*TRAIN, "max_grad_norm"), 0.0 if norm is None else norm, key)
    file.check_all("training")
    return _megatron_schedule(file, task, steps, job or file) if megatron else _torch_schedule(file, task, steps)


def _megatron_schedule(file: ForeignFile, task: str, steps: int, job: ForeignFile) -> Schedule:
    """Converts `policy.megatron_cfg.scheduler`; arguments as in `read_schedule`."""
    shape, start = file.given(f"{_SCHEDULER}.lr_decay_style"), file.given(f"{_SCHEDULER}.lr_warmup_init")
    length, warmup = file.given(f"{_SCHEDULER}.lr_decay_iters"), file.given(f"{_SCHEDULER}.lr_warmup_iters")
    section = {"distill": "distillation", "value": "grpo"}.get(task, task)
    total, passes = job.peek(f"{section}.max_num_steps"), job.peek(f"{section}.ppo_epochs", 1)
    horizon = total * passes if isinstance(total, int) and isinstance(passes, int) else None
    horizon = horizon if length is None else length.value
    if warmup and isinstance(warmup.value, int) and isinstance(horizon, int) and warmup.value > horizon > 0:
        meaning = f"{warmup.value}, but Megatron-Bridge ends a warm-up with the schedule's length, {horizon}"
        warmup = Given(horizon, warmup.key, meaning)
    is_constant = shape is None or shape.value == "constant"
    if length is not None and (is_constant or task not in _SPANNED):
        why = "the learning rate's schedule " + ("is constant" if is_constant else "ends with the job's last step")
        file.draft.leave_out(length.key, "idle" if is_constant else "refused", why)
        length = None
    return Schedule(steps, _PASS, shape, None, start, warmup, None, length)


def _torch_schedule(file: ForeignFile, task: str, steps: int) -> Schedule:
    """Converts `policy.scheduler`, a list of torch's schedulers: a LinearLR up to 1 (the warm-up), then a cosine.

    Others are left out. `milestones`, an entry of the list, holds the passes at which the next scheduler begins.
    """
    schedulers = file.take("policy.scheduler")
    schedulers = schedulers if isinstance(schedulers, list) else [schedulers]
    entries = [entry for entry in schedulers if isinstance(entry, dict)]
    named = [(str(entry["name"]), entry.get("kwargs")) for entry in entries if entry.get("name")]
    schedules = [(name, settings if isinstance(settings, dict) else {}) for name, settings in named]
    milestones = (entry["milestones"] for entry in entries if isinstance(entry.get("milestones"), list))
    ends: list[Any] = next(milestones, [])
    schedule = Schedule(steps, _PASS)
    for number, (name, settings) in enumerate(schedules):
        begin = ends[number - 1] if 0 < number <= len(ends) else 0
        end = ends[number] if number < min(len(ends), len(schedules) - 1) else None
        if name.endswith("LinearLR") and (warmup := _warmup(_LINEAR | settings, end)):
            schedule = replace(schedule, warmup=warmup, start=_start(file, (_LINEAR | settings)["start_factor"]))
        elif name.endswith("ConstantLR") and settings.get("factor") == 1.0:
            continue
        elif name.endswith("CosineAnnealingLR") and task in _SPANNED and number == len(schedules) - 1:
            shape = Given("cosine", "policy.scheduler", "constant after T_max")
            schedule = replace(schedule, shape=shape, lowest=Given(settings.get("eta_min", 0.0), "policy.scheduler"))
            if isinstance(length := settings.get("T_max"), int) and isinstance(begin, int):
                schedule = replace(schedule, length=Given(begin + length, "policy.scheduler"))
        else:
            file.draft.leave_out(f"policy.scheduler ({name})", "refused", "set lr_scheduler_type, min_lr, max_steps")
    return schedule


def _warmup(linear: dict[str, Any], end: Any) -> Given | None:
    """Passes of a LinearLR; None unless it is a warm-up that is complete before the pass `end`."""
    count = linear["total_iters"]
    if linear["end_factor"] != 1.0 or not isinstance(count, int) or (isinstance(end, int) and end < count):
        return None
    return Given(count, "policy.scheduler")


def _start(file: ForeignFile, factor: Any) -> Given | None:
    """The learning rate at the beginning of a LinearLR with this `start_factor`; None without numbers."""
    rate = section_at(file.draft.values, *TRAIN).get("learning_rate")
    if not isinstance(rate, int | float) or not isinstance(factor, int | float):
        return None
    meaning = f"start_factor, {factor:.4g}, x the learning rate"
    return Given(float(f"{rate * factor:.12g}"), "policy.scheduler", meaning)
