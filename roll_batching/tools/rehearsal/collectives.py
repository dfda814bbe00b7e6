"""Collectives as operators of torch's dispatcher, for every backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter


@dataclass(frozen=True)
class Collective:
    """One call of a collective."""

    name: str
    """all_reduce, send, barrier, ..."""
    group: str
    """Description of the group, or its ranks if it has none."""
    size: int
    """Number of ranks in the group."""
    bytes: int
    """Bytes of the tensors that this rank sends, or receives if it sends nothing."""
    phase: str


_NAMES = {
    "allreduce_": "all_reduce",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all_single",
    "alltoall_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
}
_INPUT_SECOND = {"_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allgather_", "reduce_scatter_"} | {
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
}
"""Operators whose first argument is the output and the second the input."""


def is_collective(func: Any) -> bool:
    """Whether `func` is a communicating operator of torch.distributed."""
    return bool(func.namespace == "c10d" and func._opname in _NAMES)


def collective_of(func: Any, args: tuple[Any, ...], phase: str) -> Collective:
    """Record of one call of the operator `func`."""
    operator = func._opname
    tensors = args[1] if operator in _INPUT_SECOND else args[0]
    size = sum(x.numel() * x.element_size() for x in tree_iter(tensors) if isinstance(x, torch.Tensor))
    group = next(_group(x) for x in args if isinstance(x, torch.ScriptObject))
    return Collective(_NAMES[operator], _group_name(group), group.size(), size, phase)


def _group(value: torch.ScriptObject) -> Any:
    return dist.ProcessGroup.unbox(value)  # type: ignore[attr-defined]


def _group_name(group: Any) -> str:
    name: str = group.group_desc
    if name and name != "undefined":
        return name
    return "ranks " + ",".join(map(str, dist.get_process_group_ranks(group)))
