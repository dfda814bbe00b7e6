"""The state of Megatron's optimizers as whole parameters: one form in checkpoints for all of them.

The distributed optimizer lays all parameters of a bucket end to end, pads them, and cuts that into one equal share per
data-parallel rank, so that a share begins and ends anywhere inside a parameter. Whole parameters know nothing of shares
and buckets: any layout can load them, and an optimizer that is not distributed as well. Each is put together by the
first rank that holds a part of it: all ranks write at once, and none holds more than its own share and what crosses its
edge. On loading, every rank reads the parameters that its share touches.

Megatron's own `fully_reshardable` (core/optimizer/distrib_optimizer.py, 0.16.1 and 0.19.2) gathers all on one rank,
looks behind a padded bucket in the wrong place, and cannot load the state of torch's Adam, which counts steps for
every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed.groups import group_device

_PREFIX = "optimizer.state"
_MAIN = "fp32_param"
"""Megatron's name for the fp32 copy of a parameter of 16 bits."""


@dataclass(frozen=True, kw_only=True)
class _Spread:
    """One parameter and the ranks of the data-parallel group that hold its state, first to last."""

    index: int
    """Its number among all parameters of the optimizer, in the order of the buffers: the same on these ranks."""
    parameter: torch.nn.Parameter
    parts: dict[int, slice]
    """By rank: which of the flat parameter's values it holds."""

    @property
    def first(self) -> int:
        """The rank that puts the parameter together."""
        return min(self.parts)


def is_distributed(part: Any) -> bool:
    """Whether `part` is Megatron's distributed optimizer."""
    return any(kind.__name__ == "DistributedOptimizer" for kind in type(part).__mro__)


def unsaved_kind(part: Any) -> str | None:
    """What this optimizer does that its checkpoints would not hold, by the key that sets it; or None."""
    places = {"use_precision_aware_optimizer": part.config, "optimizer_cpu_offload": part.config}
    if is_distributed(part):
        places["use_megatron_fsdp"] = part.ddp_config
    return next((key for key, config in places.items() if getattr(config, key, False)), None)


@torch.no_grad()
def whole_state(part: Any, model_state: dict[str, Any], *, loading: bool) -> dict[int, dict[str, Any]]:
    """By number of the parameter: the state of those that this rank puts together, as shards of global tensors.

    When `loading`, of those that its share touches, empty and on the CPU. Collective over the optimizer's data-parallel
    group unless `loading`.

    Args:
        part: a distributed optimizer whose state exists.
        model_state: the sharded state of the model chunks that it steps.
    """
    of_model = _shards_by_parameter(model_state)
    rank = part.data_parallel_group.rank()
    state: dict[int, dict[str, Any]] = {}
    for spread in _spreads(part):
        if rank not in spread.parts:
            continue
        own = _own_state(part, spread.parameter)
        if loading:
            values = {name: torch.empty(spread.parameter.numel(), dtype=piece.dtype) for name, piece in own.items()}
        else:
            values = _put_together(part, spread, own)
        if not values:
            continue  # another rank puts it together
        like = of_model[id(spread.parameter)]
        replica = _replica(part, spread, like)
        state[spread.index] = {name: _sharded(like, name, flat, replica) for name, flat in values.items()}
    return state


@torch.no_grad()
def take_state(part: Any, loaded: dict[int, dict[str, torch.Tensor]]) -> None:
    """Each rank copies its share of what was loaded for `whole_state(..., loading=True)`."""
    rank = part.data_parallel_group.rank()
    for spread in _spreads(part):
        if rank not in spread.parts:
            continue
        for name, mine in _own_state(part, spread.parameter).items():
            mine.copy_(loaded[spread.index][name].flatten()[spread.parts[rank]])


def replicated_state(part: Any, model_state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """As `whole_state`, of an optimizer that is not distributed; its own tensors, also to load into."""
    of_model = _shards_by_parameter(model_state)
    state: dict[int, dict[str, Any]] = {}
    for index, (parameter, own) in enumerate(_replicated(part)):
        like = of_model[id(parameter)]
        state[index] = {name: _sharded(like, name, values, like.replica_id) for name, values in own.items()}
    return state


@torch.no_grad()
def take_replicated(part: Any, loaded: dict[int, dict[str, torch.Tensor]]) -> None:
    """Copies what was loaded for `replicated_state`, where it was not read into place."""
    for index, (_, own) in enumerate(_replicated(part)):
        for name, values in own.items():
            values.copy_(loaded[index][name])


def _replicated(part: Any) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """The model's parameters that an optimizer steps, each with its state by Megatron's names."""
    stepped = [p for group in part.optimizer.param_groups for p in group["params"]]
    parameters = {id(p): p for p in stepped}
    if hasattr(part, "float16_groups"):  # it steps fp32 copies of these
        for model, main in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            parameters |= {id(copy): p for p, copy in zip(model, main, strict=True)}
    for main in stepped:
        held, parameter = part.optimizer.state[main], parameters[id(main)]
        own = {name: held[name] for name in sorted(held) if name != "step" and isinstance(held[name], torch.Tensor)}
        yield parameter, own if parameter is main else {**own, _MAIN: main}


def _shards_by_parameter(model_state: dict[str, Any]) -> dict[int, Any]:
    """By id of a parameter: its shard in the model's sharded state."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    kinds = (ShardedTensor, ShardedTensorFactory)
    return {id(item.data): item for item in nested_values(model_state) if isinstance(item, kinds)}


def _spreads(part: Any) -> Iterator[_Spread]:
    """All parameters of a distributed optimizer: `_build_model_gbuf_range` cuts a bucket into equal shares."""
    ranks = part.data_parallel_group.size()
    places = (
        (buffer.buckets[bucket], parameter, start)
        for buffer in part.buffers
        for parameter, (start, _, bucket) in buffer.param_index_map.items()
    )
    for index, (bucket, parameter, start) in enumerate(places):
        share, begin, size = bucket.grad_data.numel() // ranks, start - bucket.offset, parameter.numel()
        holders = range(begin // share, (begin + size - 1) // share + 1)
        parts = {r: slice(max(r * share - begin, 0), min((r + 1) * share - begin, size)) for r in holders}
        yield _Spread(index=index, parameter=parameter, parts=parts)


def _own_state(part: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """This rank's share of a parameter's state, flat, by Megatron's names; a parameter of fp32 is the model's own."""
    held = part._get_main_param_and_optimizer_states(parameter)
    main = held.pop("param")
    own = {name: held[name] for name in sorted(held) if name != "step" and isinstance(held[name], torch.Tensor)}
    return own if parameter.dtype is torch.float32 else {**own, _MAIN: main}


def _put_together(part: Any, spread: _Spread, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On the parameter's first rank its whole state, flat; on the others that hold some of it, nothing."""
    if len(spread.parts) == 1:
        return own
    group = part.data_parallel_group_gloo or part.data_parallel_group
    rank, whole = group.rank(), {}
    for name, piece in own.items():
        device = group_device(group, piece.device)
        if rank != spread.first:
            dist.send(piece.detach().to(device), dist.get_global_rank(group, spread.first), group=group)
            continue
        values = torch.empty(spread.parameter.numel(), dtype=piece.dtype)
        values[spread.parts[rank]] = piece.cpu()
        for other in spread.parts.keys() - {rank}:
            received = torch.empty_like(values[spread.parts[other]], device=device)
            dist.recv(received, dist.get_global_rank(group, other), group=group)
            values[spread.parts[other]] = received.cpu()
        whole[name] = values
    return whole


def _replica(part: Any, spread: _Spread, like: Any) -> tuple[int, int, int]:
    """As the model's parameter, and 0 for one rank of those that hold it: the first, of the first such optimizer."""
    group = part.data_parallel_group
    number = part.distributed_optimizer_instance_id * group.size() + group.rank() - spread.first
    return (*like.replica_id[:2], number)


def _sharded(like: Any, name: str, flat: torch.Tensor, replica: Any) -> Any:
    """A parameter's state, cut into a global tensor as the parameter `like` is."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    values = flat.detach().view(like.data.shape)
    changed: dict[str, Any] = {"key": f"{_PREFIX}.{name}.{like.key}", "data": values, "replica_id": replica}
    if isinstance(like, ShardedTensor):
        changed["dtype"] = values.dtype
    return replace(like, **changed)
