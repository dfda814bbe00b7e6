"""NeMo-RL's optimizers and schedules, of Megatron and of torch.

NeMo-RL steps a schedule after all optimizer steps of one pass over a rollout (a call of `train`), in every worker:
`models/policy/workers/megatron_policy_worker.py:1055` (in samples, of which Megatron-Bridge counts
`train_global_batch_size` for each iteration of the file), `dtensor_policy_worker_v2.py:572`,
`models/value/workers/megatron_value_worker.py:602`. PPO calls it `ppo_epochs` times in an RL step
(`algorithms/ppo.py:735`). A pass of `sft` and `dpo` is one optimizer step; `algorithms/dpo.py:274` doubles iterations
because its pairs are two samples.
"""

from __future__ import annotations

from typing import Any

from roll_batching.tools.conversion.foreign_file import ForeignFile
from roll_batching.tools.conversion.mini_batch import optimizer_steps
from roll_batching.tools.conversion.nemo_rl_file import RL_TASKS

_TRAIN = ("actor_train", "training_args")
_SCHEDULER = "policy.megatron_cfg.scheduler"
_PASS = "a pass over a rollout"
_SPANNED = (*RL_TASKS, "value")
"""Tasks and roles whose schedule may have another length than the job."""
_ABSENT = object()
_LINEAR = {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5}
"""Defaults of torch.optim.lr_scheduler.LinearLR."""


def convert_optimizer(file: ForeignFile, task: str, steps: int, job: ForeignFile | None = None) -> None:
    """Converts optimizer and schedule, which counts passes of `steps` optimizer steps; `job` has the job's length."""
    megatron = "megatron_cfg" in file.data["policy"]
    if megatron:
        for name in ("optimizer", "scheduler"):
            if file.take(f"policy.{name}") is not None:
                text = f"DTensor's; Megatron's is policy.megatron_cfg.{name}"
                file.draft.leave_out(f"policy.{name}", "idle", text)
    names = {"lr": "learning_rate", "eps": "adam_epsilon", "adam_eps": "adam_epsilon"}
    for section in ("policy.megatron_cfg.optimizer", "policy.optimizer.kwargs"):
        betas = file.take(f"{section}.betas")
        if isinstance(betas, list) and len(betas) == 2:
            for number, beta in enumerate(betas, 1):
                file.draft.put((*_TRAIN, f"adam_beta{number}"), beta, f"{section}.betas")
        for name in ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "eps"):
            file.move(f"{section}.{name}", (*_TRAIN, names.get(name, name)))
    for key in ("policy.optimizer.name", "policy.megatron_cfg.optimizer.optimizer"):
        name = file.take(key)
        if name is not None and "adam" not in str(name).lower():
            file.draft.leave_out(key, "refused", f"{name}: parameters are trained by AdamW")
    _clipping(file, megatron)
    for name in ("bf16", "fp16", "params_dtype", "sgd_momentum", "use_precision_aware_optimizer"):
        if file.take(f"policy.megatron_cfg.optimizer.{name}") is not None:
            why = "AdamW keeps fp32 parameters and moments here (strategy_config.use_precision_aware_optimizer is "
            why += "TransformerEngine's); precision is model_args.dtype"
            file.draft.leave_out(f"policy.megatron_cfg.optimizer.{name}", "idle", why)
    _megatron_schedule(file, task, steps, _passes_of_job(job or file, task))
    _torch_schedule(file, task, steps)


def _clipping(file: ForeignFile, megatron: bool) -> None:
    """Gradient clipping: Megatron's clip_grad, or DTensor's max_grad_norm. Null switches it off."""
    keys = ["policy.megatron_cfg.optimizer.clip_grad", "policy.max_grad_norm"]
    key, other = keys if megatron else reversed(keys)
    file.take(other)
    if (norm := file.take(key, _ABSENT)) is not _ABSENT:
        file.draft.put((*_TRAIN, "max_grad_norm"), 0.0 if norm is None else norm, key)


def _passes_of_job(file: ForeignFile, task: str) -> int | None:
    """Passes of the whole job, which a schedule of Megatron spans by default; None where the file has no number."""
    section = {"distill": "distillation", "value": "grpo"}.get(task, task)
    steps, each = file.peek(f"{section}.max_num_steps"), file.peek(f"{section}.ppo_epochs", 1)
    return steps * each if isinstance(steps, int) and isinstance(each, int) else None


def _megatron_schedule(file: ForeignFile, task: str, steps: int, passes: int | None) -> None:
    constant = file.peek(f"{_SCHEDULER}.lr_decay_style", "constant") == "constant"
    file.move(f"{_SCHEDULER}.lr_decay_style", (*_TRAIN, "lr_scheduler_type"))
    decay = file.peek(f"{_SCHEDULER}.lr_decay_iters")
    if (warmup := file.take(f"{_SCHEDULER}.lr_warmup_iters")) is not None:
        text, horizon = "", passes if decay is None else decay
        if isinstance(warmup, int) and isinstance(horizon, int) and warmup > horizon > 0:
            text = f"{warmup}, but Megatron-Bridge ends a warm-up with the schedule's length, {horizon}; "
            warmup = horizon
        count, unit = optimizer_steps(warmup, steps, _PASS)
        file.draft.put((*_TRAIN, "warmup_steps"), count, f"{_SCHEDULER}.lr_warmup_iters", text + unit)
    file.move(f"{_SCHEDULER}.lr_warmup_init", (*_TRAIN, "lr_warmup_init"))
    if constant or task not in _SPANNED:
        why = "is constant" if constant else "ends with the job's last step"
        if file.take(f"{_SCHEDULER}.lr_decay_iters") is not None:
            key = f"{_SCHEDULER}.lr_decay_iters"
            file.draft.leave_out(key, "idle" if constant else "refused", f"the learning rate's schedule {why}")
    elif (decay := file.take(f"{_SCHEDULER}.lr_decay_iters")) is not None:
        count, unit = optimizer_steps(decay, steps, _PASS)
        file.draft.put((*_TRAIN, "max_steps"), count, f"{_SCHEDULER}.lr_decay_iters", unit)
    for name in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"):
        if file.take(f"{_SCHEDULER}.{name}") is not None:
            file.draft.leave_out(f"{_SCHEDULER}.{name}", "idle", "weight decay is constant")


def _torch_schedule(file: ForeignFile, task: str, steps: int) -> None:
    """The list of torch's schedules. A linear one that ends at 1 is a warm-up; a cosine may follow it."""
    given = file.take("policy.scheduler")
    entries = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, dict)]
    named = [(str(one["name"]), one.get("kwargs")) for one in entries if one.get("name")]
    schedules = [(name, settings if isinstance(settings, dict) else {}) for name, settings in named]
    ends: list[Any] = next((one["milestones"] for one in entries if isinstance(one.get("milestones"), list)), [])
    for number, (name, settings) in enumerate(schedules):
        begin = ends[number - 1] if 0 < number <= len(ends) else 0
        end = ends[number] if number < min(len(ends), len(schedules) - 1) else None
        if name.endswith("LinearLR") and _warmup(file, _LINEAR | settings, end, steps):
            continue
        if name.endswith("ConstantLR") and settings.get("factor") == 1.0:
            continue
        if name.endswith("CosineAnnealingLR") and task in _SPANNED and number == len(schedules) - 1:
            _cosine(file, settings, begin, steps)
        else:
            text = "set lr_scheduler_type, min_lr, max_steps"
            file.draft.leave_out(f"policy.scheduler ({name})", "refused", text)


def _warmup(file: ForeignFile, linear: dict[str, Any], end: Any, steps: int) -> bool:
    """Converts LinearLR if it is a warm-up that is not cut off; whether it is."""
    count, start = linear["total_iters"], linear["start_factor"]
    if linear["end_factor"] != 1.0 or not isinstance(count, int) or (isinstance(end, int) and end < count):
        return False
    count, unit = optimizer_steps(count, steps, _PASS)
    file.draft.put((*_TRAIN, "warmup_steps"), count, "policy.scheduler", unit)
    rate = file.draft.values["actor_train"].get("training_args", {}).get("learning_rate")
    if isinstance(rate, int | float) and isinstance(start, int | float):
        text = f"start_factor, {start:.4g}, x the learning rate"
        file.draft.put((*_TRAIN, "lr_warmup_init"), float(f"{rate * start:.12g}"), "policy.scheduler", text)
    return True


def _cosine(file: ForeignFile, settings: dict[str, Any], begin: Any, steps: int) -> None:
    """Converts CosineAnnealingLR, which begins after `begin` passes and rises again after its end."""
    file.draft.put((*_TRAIN, "lr_scheduler_type"), "cosine", "policy.scheduler", "constant after T_max")
    file.draft.put((*_TRAIN, "min_lr"), settings.get("eta_min", 0.0), "policy.scheduler")
    if isinstance(length := settings.get("T_max"), int) and isinstance(begin, int):
        count, unit = optimizer_steps(begin + length, steps, _PASS)
        file.draft.put((*_TRAIN, "max_steps"), count, "policy.scheduler", unit)
