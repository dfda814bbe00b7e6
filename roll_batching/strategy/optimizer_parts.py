"""What must hold of an optimizer and a schedule that are handed over with a model, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from roll_batching.modeling.head import gpt_of
from roll_batching.planning.plain_values import kind_of
from roll_batching.strategy.update import has_loss_scale, parts_of


def scheduler_problems(optimizer: Any, scheduler: Any, scheduler_unit: str | None) -> list[str]:
    """What about a learning-rate schedule cannot work, each with what to set."""
    problems = []
    if scheduler is not None and scheduler_unit is None:
        problems.append(
            "scheduler_unit, which says what the scheduler counts, was left out: pass 'samples' if its lr_warmup_steps "
            "and lr_decay_steps are samples (as Megatron's training loop has them), 'steps' if they are optimizer steps"
        )
    if scheduler_unit not in (None, "steps", "samples"):
        problems.append(f"scheduler_unit={scheduler_unit!r} is unknown: pass 'steps' or 'samples'")
    if scheduler is None:
        return problems
    if not isinstance(scheduler, OptimizerParamScheduler):
        problems.append(f"scheduler is {kind_of(scheduler)}: pass Megatron's OptimizerParamScheduler, or None")
    elif optimizer is None:
        problems.append("optimizer is None, so the scheduler is never stepped: leave it out, and step yours")
    elif scheduler.optimizer is not optimizer:
        problems.append("this is the scheduler of another optimizer: make it with the optimizer that is passed")
    return problems


def optimizer_problems(chunks: Sequence[Any], optimizer: Any) -> list[str]:
    """What about an optimizer cannot work with the model of `chunks`, each with what to set."""
    if optimizer is None:
        return []
    if not isinstance(optimizer, MegatronOptimizer):
        name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        return [
            f"{name} is not a Megatron optimizer: make one with megatron.core.optimizer.get_megatron_optimizer, or "
            "pass optimizer=None and step yours after forward_backward"
        ]
    problems = _ownership_problems(chunks, optimizer)
    if has_loss_scale(optimizer) and gpt_of(chunks[0]).config.grad_scale_func is None:
        problems.append(
            "the optimizer divides gradients by a loss scale, and config.grad_scale_func is None, so that the loss is "
            "never multiplied by it: set config.grad_scale_func=optimizer.scale_loss"
        )
    return problems


def _ownership_problems(chunks: Sequence[Any], optimizer: Any) -> list[str]:
    if any(getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False) for chunk in chunks):
        return []  # steps shards of its own
    names = {parameter: name for chunk in chunks for name, parameter in gpt_of(chunk).named_parameters()}
    held = {parameter for part in parts_of(optimizer) for parameter in _model_parameters(part)}
    problems = []
    if foreign := len(held - names.keys()):
        problems.append(
            f"the optimizer holds {foreign} parameters of another model, which no gradient would reach: make it from "
            "these model_chunks, after they are wrapped"
        )
    # Megatron's layer-wise optimizer deals whole parameters out to ranks.
    dealt_out = type(optimizer).__module__.endswith("layer_wise_optimizer")
    lacking = [name for parameter, name in names.items() if parameter.requires_grad and parameter not in held]
    if lacking and not foreign and not dealt_out:
        problems.append(
            f"the model has {len(lacking)} trainable parameters that the optimizer does not hold, such as "
            f"{lacking[0]}: make it from all model_chunks, or freeze what it leaves out (requires_grad=False)"
        )
    return problems


def _model_parameters(part: Any) -> list[Any]:
    """The model's parameters that an optimizer steps, though it may keep copies or shards of them."""
    if getattr(part, "is_stub_optimizer", False):
        return []
    if hasattr(part, "model_param_gbuf_map"):  # Megatron's distributed optimizer: all that share its buffers
        return [parameter for buffer in part.buffers for parameter in buffer.params]
    groups = [group["params"] for group in part.optimizer.param_groups]
    if hasattr(part, "float16_groups"):
        groups = [*part.float16_groups, *part.fp32_from_fp32_groups]
    return [parameter for group in groups for parameter in group]
