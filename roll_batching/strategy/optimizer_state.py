"""The state of Megatron's optimizers in checkpoints: one tensor per parameter, whoever holds its pieces.

For the distributed optimizer Megatron calls this format `fully_reshardable` (`core/optimizer/distrib_optimizer.py`).
One rank of each data-parallel group gathers the group's shards in host memory and writes them like the state of an
optimizer that is not sharded; every rank reads the whole of its parameters' state and keeps its pieces. So any layout
reads what any other wrote.
"""

from __future__ import annotations

from typing import Any

import torch

from roll_batching.errors import CheckpointError
from roll_batching.strategy.update import parts_of

FORMAT = "fully_reshardable"


def is_sharded(optimizer: Any) -> bool:
    """Whether `optimizer` keeps its state in shards over the data-parallel ranks."""
    return any(type(part).__name__ == "DistributedOptimizer" for part in parts_of(optimizer))


def check_optimizer(optimizer: Any) -> None:
    """Raises `CheckpointError` for a sharded optimizer whose state this Megatron cannot write in `FORMAT`."""
    for part in parts_of(optimizer):
        if type(part).__name__ != "DistributedOptimizer":
            continue
        if part.ddp_config.use_megatron_fsdp:
            raise CheckpointError(
                "the optimizer's state under Megatron's FSDP is not saved: use its DDP, or do not save"
            )
        if FORMAT not in getattr(type(part), "checkpoint_fully_reshardable_formats", ()):
            raise CheckpointError(
                f"this Megatron-Core cannot write the distributed optimizer's state as {FORMAT}: install "
                "megatron-core>=0.16.1, or set use_distributed_optimizer: false"
            )


def tensors_of(
    optimizer: Any, model: dict[str, Any], metadata: dict[str, Any], *, loading: bool = False
) -> dict[Any, Any]:
    """The state as shards of global tensors, to be written or (`loading`) read; `model` holds those of the weights.

    Collective. Options of the parameter groups are left out: they are the present configuration's.
    """
    sharded = is_sharded(optimizer)
    told = {**metadata, **(_sharding_metadata(optimizer) if sharded else {})}
    # A sharded optimizer gathers its state where it is to be written, and asks for the whole where it is read.
    found: dict[Any, Any] = optimizer.sharded_state_dict(dict(model), is_loading=loading and sharded, metadata=told)
    for part in _inner(optimizer, found):
        part.pop("param_groups")
        part.get("state", {}).pop("common_step", None)
    for part in _by_part(optimizer, found) if sharded else ():
        del part["param_state_sharding_type"]
    return found


def prepare_state(optimizer: Any) -> int:
    """Gives every parameter the state that the first step would create; returns the steps made so far.

    Megatron's own initialisation leaves torch's step counter out, and torch then fails for want of it.
    """
    steps = 0
    for part in parts_of(optimizer):
        if part.init_state_fn is None:
            continue
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            steps = max(steps, int(group.get("step", 0)))
            if not isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
                continue
            for parameter in group["params"]:
                step = part.optimizer.state[parameter].setdefault("step", torch.tensor(0.0))
                steps = max(steps, int(step))
    return steps


def restore_state(optimizer: Any, loaded: dict[Any, Any], steps: int) -> None:
    """Gives `optimizer` the state that was read into `tensors_of`, after `steps` steps."""
    if is_sharded(optimizer):
        _load_sharded(optimizer, loaded, steps)
    else:
        _load_whole(optimizer, loaded, steps)


def _sharding_metadata(optimizer: Any) -> dict[str, Any]:
    """What `sharded_state_dict` is told: the format, and to gather on one rank of a group where gloo can do it."""
    gloo = all(getattr(part, "data_parallel_group_gloo", None) is not None for part in parts_of(optimizer))
    return {"distrib_optim_sharding_type": FORMAT, "distrib_optim_fully_reshardable_mem_efficient": gloo}


def _by_part(optimizer: Any, state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The states of the optimizers that Megatron chained, dense and expert parameters, or of the only one."""
    count = len(parts_of(optimizer))
    return [state] if count == 1 else [state[index] for index in range(count)]


def _load_sharded(optimizer: Any, loaded: dict[Any, Any], steps: int) -> None:
    """Gives every part its pieces of `loaded`, which has made `steps` steps."""
    for part, state in zip(parts_of(optimizer), _by_part(optimizer, loaded), strict=True):
        groups = part.state_dict()["optimizer"]["param_groups"]
        for group in groups:
            group["step"] = steps
        part.load_state_dict({"optimizer": {"param_groups": groups}})
        # Megatron copies every entry of a parameter's state from the checkpoint, which has no counter of torch's.
        held = part.optimizer.state.values()
        for one in held:
            one.pop("step", None)
        part.load_parameter_state_from_fully_reshardable(state["param_state"])
        if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for one in held:
                one["step"] = torch.tensor(float(steps))


def _load_whole(optimizer: Any, loaded: dict[Any, Any], steps: int) -> None:
    for part, state in zip(parts_of(optimizer), _inner(optimizer, loaded), strict=True):
        state["param_groups"] = part.optimizer.state_dict()["param_groups"]
        if isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            state["state"]["common_step"] = torch.tensor(float(steps))
        else:  # fused optimizers count per group
            for group in state["param_groups"]:
                group["step"] = steps
    optimizer.load_state_dict(loaded)


def _inner(optimizer: Any, state: dict[Any, Any]) -> list[dict[str, Any]]:
    """The torch optimizers' dicts in Megatron's, one per part: mixed precision nests them."""
    return [part.get("optimizer", part) for part in _by_part(optimizer, state)]
