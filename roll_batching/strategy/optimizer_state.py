"""Optimizer state in checkpoints: shards of global tensors, with the same names in all layouts and optimizers.

The distributed optimizer lays the parameters of a bucket end to end, pads them, and gives each data-parallel rank an
equal share of that, so that a share begins and ends anywhere inside a parameter. The layer-wise one (Muon) gives each
rank whole parameters. A checkpoint has the state of whole parameters: every layout can load it, and so can an optimizer
that is not distributed. The first rank with a part of a parameter assembles it: all ranks write at once, and none holds
more than its share and the parameters at its edges. On loading, every rank reads the parameters that its share touches.

Megatron's own `fully_reshardable` (core/optimizer/distrib_optimizer.py, 0.16.1 and 0.19.2) gathers everything on one
rank, reads a padded bucket at the wrong offset, and cannot load the state of torch's Adam, which has a step counter per
parameter.

Options of the parameter groups (learning rate, weight decay) are not saved: they come from the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.distributed import exchange
from roll_batching.distributed.groups import group_device
from roll_batching.errors import CheckpointError
from roll_batching.strategy.optimizer_step import layer_wise_chains, layer_wise_parameters, optimizer_parts

_PREFIX = "optimizer.state"
_MAIN = "fp32_param"
"""Megatron's name for the fp32 copy of a 16-bit parameter."""


def check_optimizer(optimizer: Any) -> None:
    """Raises `CheckpointError` for an optimizer whose state is not saved, with the key that makes it so."""
    for part in optimizer_parts(optimizer):
        configs = {"use_precision_aware_optimizer": part.config, "optimizer_cpu_offload": part.config}
        if _is_distributed(part):
            configs["use_megatron_fsdp"] = part.ddp_config
        key = next((key for key, config in configs.items() if getattr(config, key, False)), None)
        if key is not None:
            raise CheckpointError(
                f"the state of Megatron's optimizers is not saved with {key}: leave it out, or do not save"
            )


def prepare_optimizer(optimizer: Any) -> int:
    """Creates the state of every parameter, as a first step would; returns the number of steps so far.

    Megatron's own initialisation leaves torch's step counter out, without which torch's Adam fails.
    """
    steps = 0
    for _, part in _numbered_parts(optimizer):
        if part.init_state_fn is None:
            continue
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            steps = max(steps, int(group.get("step", 0)))
            if not _has_step_per_parameter(part):
                continue
            for parameter in group["params"]:
                step = part.optimizer.state[parameter].setdefault("step", torch.tensor(0.0))
                steps = max(steps, int(step))
    return steps


def grad_scaler_state(optimizer: Any) -> dict[str, Any]:
    """The loss scale of fp16; empty without one."""
    scalers = _grad_scalers(optimizer)
    return scalers[0].state_dict() if scalers else {}


def partial_stacks(optimizer: Any, model_state: dict[str, Any], group: Any, what: str) -> frozenset[str]:
    """Keys under which some layers are trained and some frozen, over all ranks. Collective; errors on all.

    Megatron stacks equal layers under one key. The optimizer state of such a stack would have holes, which Megatron
    refuses to save: it is saved layer by layer.
    """

    def local_keys() -> tuple[set[str], set[str]]:
        trained = {id(parameter) for _, part in _numbered_parts(optimizer) for parameter in _trained_by(part)}
        trained |= {id(parameter) for parameter in layer_wise_parameters(optimizer)}
        shards = _shards_by_parameter(model_state)
        keys = {True: set[str](), False: set[str]()}
        for parameter_id, shard in shards.items():
            keys[parameter_id in trained].add(shard.key)
        return keys[True], keys[False]

    keys_by_rank = exchange(group, what, local_keys)
    return frozenset(
        {key for trained, _ in keys_by_rank for key in trained} & {key for _, rest in keys_by_rank for key in rest}
    )


def sharded_optimizer(
    optimizer: Any, model_state: dict[str, Any], stacks: frozenset[str], *, loading: bool
) -> dict[str, Any]:
    """Megatron's shards of a prepared optimizer's state, to save or (`loading`) to load into.

    Collective unless `loading`. `stacks` are the `partial_stacks`. The result has shards only, numbered on this rank:
    ranks step different parameters (a pipeline stage may have no experts), and Megatron merges everything that is not a
    shard with the state of rank 0.
    """
    layer_wise = {id(part) for chain in layer_wise_chains(optimizer) for part in chain.chained_optimizers}
    shards = {
        number: _distributed_state(part, model_state, stacks, loading=loading)
        if _is_distributed(part)
        else _whole_state(part, model_state, stacks, on_one_rank=id(part) in layer_wise)
        for number, part in _numbered_parts(optimizer)
    }
    shards = {number: state for number, state in shards.items() if state}  # Megatron warns of empty ones
    return {"parameters": shards} if shards else {}


def restore_optimizer(optimizer: Any, loaded: dict[str, Any], steps: int) -> None:
    """Copy into the optimizer the state that a load has put in `sharded_optimizer(..., loading=True)`.

    `steps`: optimizer steps done at the save.
    """
    shards = loaded.get("parameters", {})
    for number, part in _numbered_parts(optimizer):
        (_load_distributed if _is_distributed(part) else _load_whole)(part, shards.get(number, {}))
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(float(steps))
        if not _has_step_per_parameter(part):  # fused optimizers have one counter per group
            for group in part.optimizer.param_groups:
                group["step"] = steps
    for scaler in _grad_scalers(optimizer):
        if "grad_scaler" in loaded:
            scaler.load_state_dict(loaded["grad_scaler"])


def _numbered_parts(optimizer: Any) -> list[tuple[int, Any]]:
    """The chained optimizers that have parameters, by number; a stage that is frozen as a whole has stubs."""
    return [
        (number, part)
        for number, part in enumerate(optimizer_parts(optimizer))
        if not getattr(part, "is_stub_optimizer", False)
    ]


def _is_distributed(part: Any) -> bool:
    return any(kind.__name__ == "DistributedOptimizer" for kind in type(part).__mro__)


def _trained_by(part: Any) -> Iterator[torch.nn.Parameter]:
    """The model's parameters that an optimizer steps."""
    if _is_distributed(part):
        yield from (parameter for buffer in part.buffers for parameter in buffer.param_index_map)
    else:
        yield from (parameter for parameter, _ in _whole_parameters(part))


def _has_step_per_parameter(part: Any) -> bool:
    return isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _grad_scalers(optimizer: Any) -> list[Any]:
    """The loss scales of all parts with parameters. They are equal: a step that one part skips is skipped by all."""
    return [
        part.grad_scaler for _, part in _numbered_parts(optimizer) if getattr(part, "grad_scaler", None) is not None
    ]


def _shards_by_parameter(model_state: dict[str, Any]) -> dict[int, Any]:
    """The model's sharded state, by id of the parameter."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    kinds = (ShardedTensor, ShardedTensorFactory)
    return {id(item.data): item for item in nested_values(model_state) if isinstance(item, kinds)}


def _state_shard(parameter_shard: Any, name: str, flat: torch.Tensor, replica_id: Any, stacks: frozenset[str]) -> Any:
    """A parameter's state as a shard of a global tensor, cut like the parameter itself.

    If the parameter's key is in `stacks`, the global tensor is that of one layer.
    """
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    values = flat.detach().view(parameter_shard.data.shape)
    changes: dict[str, Any] = {
        "key": f"{_PREFIX}.{name}.{parameter_shard.key}",
        "data": values,
        "replica_id": replica_id,
    }
    if isinstance(parameter_shard, ShardedTensor):
        changes["dtype"] = values.dtype
    shard = replace(parameter_shard, **changes)
    return _unstacked(shard) if parameter_shard.key in stacks else shard


def _unstacked(shard: Any) -> Any:
    """A shard whose place in a stack of layers (and experts) is part of its key instead of axes."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(shard, ShardedTensorFactory):
        build = shard.build_fn
        return replace(shard, build_fn=lambda *arguments: dict_list_map_outplace(_unstacked, build(*arguments)))
    axes = shard.prepend_axis_num
    return replace(
        shard,
        key=".".join([shard.key, *map(str, shard.global_offset[:axes])]),
        global_shape=shard.global_shape[axes:],
        global_offset=shard.global_offset[axes:],
        axis_fragmentations=shard.axis_fragmentations[axes:],
        prepend_axis_num=0,
    )


def _tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of one parameter's optimizer state, without the step counter."""
    return {name: state[name] for name in sorted(state) if name != "step" and isinstance(state[name], torch.Tensor)}


# ---- the distributed optimizer


@dataclass(frozen=True, kw_only=True)
class _PartitionedParameter:
    """A parameter and the ranks of the data-parallel group that hold parts of its state."""

    index: int
    """Its number among all parameters of the optimizer, in the order of the buffers: the same on these ranks."""
    parameter: torch.nn.Parameter
    parts: dict[int, slice]
    """Range of the flat parameter that each rank holds, by rank."""

    @property
    def first_rank(self) -> int:
        """The rank that assembles the parameter."""
        return min(self.parts)


@torch.no_grad()
def _distributed_state(
    part: Any, model_state: dict[str, Any], stacks: frozenset[str], *, loading: bool
) -> dict[int, dict[str, Any]]:
    """State shards by parameter number.

    For saving they are of the parameters that this rank assembles. Collective over the optimizer's data-parallel group.
    For `loading` they are of the parameters that this rank's share touches, uninitialised on the CPU. Not collective.

    Args:
        part: a distributed optimizer whose state exists.
        model_state: the sharded state of its model chunks.
        stacks: the `partial_stacks`.
        loading: as above.
    """
    parameter_shards = _shards_by_parameter(model_state)
    rank = part.data_parallel_group.rank()
    state: dict[int, dict[str, Any]] = {}
    for partitioned in _partitioned_parameters(part):
        if rank not in partitioned.parts:
            continue
        local = _local_state(part, partitioned.parameter)
        if loading:
            size = partitioned.parameter.numel()
            values = {name: torch.empty(size, dtype=tensor.dtype) for name, tensor in local.items()}
        else:
            values = _assemble(part, partitioned, local)
        if not values:
            continue  # another rank assembles it
        shard = parameter_shards[id(partitioned.parameter)]
        replica_id = _replica_id(part, partitioned, shard)
        state[partitioned.index] = {
            name: _state_shard(shard, name, flat, replica_id, stacks) for name, flat in values.items()
        }
    return state


@torch.no_grad()
def _load_distributed(part: Any, loaded: dict[int, dict[str, torch.Tensor]]) -> None:
    """Copies this rank's share of loaded parameters."""
    rank = part.data_parallel_group.rank()
    for partitioned in _partitioned_parameters(part):
        if rank not in partitioned.parts:
            continue
        for name, local in _local_state(part, partitioned.parameter).items():
            local.copy_(loaded[partitioned.index][name].flatten()[partitioned.parts[rank]])


def _partitioned_parameters(part: Any) -> Iterator[_PartitionedParameter]:
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
        yield _PartitionedParameter(index=index, parameter=parameter, parts=parts)


def _local_state(part: Any, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """This rank's flat share of a parameter's state, by Megatron's names, with its fp32 copy if it has one."""
    state = part._get_main_param_and_optimizer_states(parameter)
    main = state.pop("param")
    tensors = _tensors_of(state)
    return tensors if parameter.dtype is torch.float32 else {**tensors, _MAIN: main}


def _assemble(part: Any, partitioned: _PartitionedParameter, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The flat state of the whole parameter on its first rank; empty on the other ranks with a part of it."""
    if len(partitioned.parts) == 1:
        return local
    group = part.data_parallel_group_gloo or part.data_parallel_group
    rank, assembled = group.rank(), {}
    for name, tensor in local.items():
        device = group_device(group, tensor.device)
        if rank != partitioned.first_rank:
            dist.send(tensor.detach().to(device), dist.get_global_rank(group, partitioned.first_rank), group=group)
            continue
        values = torch.empty(partitioned.parameter.numel(), dtype=tensor.dtype)
        values[partitioned.parts[rank]] = tensor.cpu()
        for other in partitioned.parts.keys() - {rank}:
            received = torch.empty_like(values[partitioned.parts[other]], device=device)
            dist.recv(received, dist.get_global_rank(group, other), group=group)
            values[partitioned.parts[other]] = received.cpu()
        assembled[name] = values
    return assembled


def _replica_id(part: Any, partitioned: _PartitionedParameter, shard: Any) -> tuple[int, int, int]:
    """Replica id of a state shard. Megatron writes a shard on the rank whose id ends with 0, so exactly one has it.

    That is the first rank with a part of the parameter, in the first instance of a partially distributed optimizer.
    """
    group = part.data_parallel_group
    number = part.distributed_optimizer_instance_id * group.size() + group.rank() - partitioned.first_rank
    return (*shard.replica_id[:2], number)


# ---- other optimizers


def _whole_state(
    part: Any, model_state: dict[str, Any], stacks: frozenset[str], *, on_one_rank: bool
) -> dict[int, dict[str, Any]]:
    """State shards by number of the parameter. They are the optimizer's own tensors, also when loading.

    `on_one_rank`: a single data-parallel rank has this state (layer-wise optimizers), and so writes it.
    """
    parameter_shards = _shards_by_parameter(model_state)
    state: dict[int, dict[str, Any]] = {}
    for index, (parameter, tensors) in enumerate(_whole_parameters(part)):
        shard = parameter_shards[id(parameter)]
        replica_id = (*shard.replica_id[:2], 0) if on_one_rank else shard.replica_id
        state[index] = {name: _state_shard(shard, name, values, replica_id, stacks) for name, values in tensors.items()}
    return state


@torch.no_grad()
def _load_whole(part: Any, loaded: dict[int, dict[str, torch.Tensor]]) -> None:
    """Copies loaded state, in case Megatron did not read it into the optimizer's own tensors."""
    for index, (_, tensors) in enumerate(_whole_parameters(part)):
        for name, values in tensors.items():
            values.copy_(loaded[index][name])


def _whole_parameters(part: Any) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """The model parameters that an optimizer steps, each with its state by Megatron's names."""
    stepped = [p for group in part.optimizer.param_groups for p in group["params"]]
    model_parameters = {id(p): p for p in stepped}
    if hasattr(part, "float16_groups"):  # it steps fp32 copies of these
        for model_group, main_group in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            model_parameters |= {id(main): p for p, main in zip(model_group, main_group, strict=True)}
    for main in stepped:
        parameter, tensors = model_parameters[id(main)], _tensors_of(part.optimizer.state[main])
        yield parameter, tensors if parameter is main else {**tensors, _MAIN: main}
