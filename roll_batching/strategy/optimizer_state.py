"""An optimizer's state in a checkpoint: shards of global tensors, named alike in all layouts and for all optimizers.

Options of the parameter groups are left out: they are the present configuration's.
"""

from __future__ import annotations

from typing import Any

import torch

from roll_batching.errors import CheckpointError
from roll_batching.strategy.sharded_optimizer import (
    is_distributed,
    replicated_state,
    take_replicated,
    take_state,
    unsaved_kind,
    whole_state,
)
from roll_batching.strategy.update import parts_of


def check_optimizer(optimizer: Any) -> None:
    """Raises `CheckpointError` when this kind of optimizer cannot be saved."""
    for part in parts_of(optimizer):
        if (key := unsaved_kind(part)) is not None:
            raise CheckpointError(
                f"the state of Megatron's optimizers is not saved with {key}: leave it out, or do not save"
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


def sharded_optimizer(optimizer: Any, model_state: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """The state of a prepared optimizer as Megatron's shards, or what to load into. Collective unless `loading`.

    Nothing but shards, by numbers of this rank's own: ranks differ in what they step (a pipeline stage may have no
    experts), and Megatron joins whatever is no shard with what rank 0 saved. The loss scale is the one exception.
    """
    shards = {
        index: whole_state(part, model_state, loading=loading)
        if is_distributed(part)
        else replicated_state(part, model_state)
        for index, part in _stepping(optimizer)
    }
    scalers = _scalers(optimizer)
    state = {"parameters": shards, "grad_scaler": scalers[0].state_dict() if scalers else {}}
    return {name: value for name, value in state.items() if value}  # Megatron warns of empty ones


def restore_optimizer(optimizer: Any, loaded: dict[str, Any], steps: int) -> None:
    """Takes over what was loaded for `sharded_optimizer(..., loading=True)`; `steps` were made when it was saved."""
    shards = loaded.get("parameters", {})
    for index, part in _stepping(optimizer):
        (take_state if is_distributed(part) else take_replicated)(part, shards.get(index, {}))
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(float(steps))
        if not _counts_per_parameter(part):  # fused optimizers count in their groups
            for group in part.optimizer.param_groups:
                group["step"] = steps
    for scaler in _scalers(optimizer):
        if "grad_scaler" in loaded:
            scaler.load_state_dict(loaded["grad_scaler"])


def _stepping(optimizer: Any) -> list[tuple[int, Any]]:
    """The parts that have parameters, by number: a stage of which all are frozen has stand-ins."""
    return [(i, part) for i, part in enumerate(parts_of(optimizer)) if not getattr(part, "is_stub_optimizer", False)]


def _counts_per_parameter(part: Any) -> bool:
    return isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _scalers(optimizer: Any) -> list[Any]:
    """The loss scales of the parts: equal, as all parts see each step that one of them skips."""
    return [part.grad_scaler for _, part in _stepping(optimizer) if getattr(part, "grad_scaler", None) is not None]
