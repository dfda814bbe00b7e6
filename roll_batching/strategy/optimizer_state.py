"""An optimizer's state in a checkpoint: shards of global tensors, named alike in all layouts and for all optimizers.

Options of the parameter groups are left out: they are the present configuration's.
"""

from __future__ import annotations

from typing import Any

import torch

from roll_batching.errors import CheckpointError
from roll_batching.strategy.sharded_optimizer import is_distributed, take_state, unsaved_kind, whole_state
from roll_batching.strategy.update import parts_of


def check_optimizer(optimizer: Any) -> None:
    """Raises `CheckpointError` when this kind of optimizer cannot be saved."""
    for part in filter(is_distributed, parts_of(optimizer)):
        if (key := unsaved_kind(part)) is not None:
            raise CheckpointError(
                f"the state of Megatron's distributed optimizer is not saved with {key}: leave it out, or do not save"
            )


def prepare_optimizer(optimizer: Any) -> int:
    """Gives every parameter the state that the first step would create; returns the steps made so far.

    Megatron's own initialisation leaves torch's step counter out, and torch then fails for want of it.
    """
    steps = 0
    for _, part in _stepping(optimizer):
        if part.init_state_fn is None:
            continue
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            steps = max(steps, int(group.get("step", 0)))
            if not _counts_per_parameter(part):
                continue
            for parameter in group["params"]:
                step = part.optimizer.state[parameter].setdefault("step", torch.tensor(0.0))
                steps = max(steps, int(step))
    return steps


def sharded_optimizer(
    optimizer: Any, model_state: dict[str, Any], metadata: dict[str, Any], *, loading: bool
) -> dict[Any, Any]:
    """The state of a prepared optimizer as Megatron's shards, or what to load into. Collective unless `loading`."""
    found: dict[Any, Any] = {}
    for index, part in _stepping(optimizer):
        if is_distributed(part):
            held: dict[str, Any] = {"parameters": whole_state(part, model_state, loading=loading)}
            if part.grad_scaler is not None:
                held["grad_scaler"] = part.grad_scaler.state_dict()
            if held := {name: value for name, value in held.items() if value}:  # Megatron warns of empty ones
                found[index] = held
            continue
        found[index] = part.sharded_state_dict(dict(model_state), metadata=dict(metadata))
        inner = _inner(found[index])
        inner.pop("param_groups")
        inner["state"].pop("common_step", None)
    return found if len(parts_of(optimizer)) > 1 else found.get(0, {})


def restore_optimizer(optimizer: Any, loaded: dict[Any, Any], steps: int) -> None:
    """Takes over what was loaded for `sharded_optimizer(..., loading=True)`; `steps` were made when it was saved."""
    for index, part in _stepping(optimizer):
        state = loaded.get(index, {}) if len(parts_of(optimizer)) > 1 else loaded
        if is_distributed(part):
            take_state(part, state.get("parameters", {}), steps)
            if part.grad_scaler is not None and "grad_scaler" in state:
                part.grad_scaler.load_state_dict(state["grad_scaler"])
            _count_per_group(part, part.optimizer.param_groups, steps)
            continue
        inner = _inner(state)
        inner["param_groups"] = part.optimizer.state_dict()["param_groups"]
        if _counts_per_parameter(part):
            inner["state"]["common_step"] = torch.tensor(float(steps))
        _count_per_group(part, inner["param_groups"], steps)
        part.load_state_dict(state)


def _stepping(optimizer: Any) -> list[tuple[int, Any]]:
    """The parts that have parameters, by number: a stage of which all are frozen has stand-ins."""
    return [(i, part) for i, part in enumerate(parts_of(optimizer)) if not getattr(part, "is_stub_optimizer", False)]


def _counts_per_parameter(part: Any) -> bool:
    return isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _count_per_group(part: Any, groups: list[dict[str, Any]], steps: int) -> None:
    """Sets the steps made in the groups of a fused optimizer, which counts there."""
    if not _counts_per_parameter(part):
        for group in groups:
            group["step"] = steps


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """The torch optimizer's dict in Megatron's: mixed precision nests it."""
    inner: dict[str, Any] = state.get("optimizer", state)
    return inner
