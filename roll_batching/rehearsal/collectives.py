"""Collectives as torch's dispatcher sees them, whatever the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter


@dataclass(frozen=True)
class Collective:
    """One call."""

    name: str
    """Such as all_reduce."""
    group: str
    """The group's description, else its ranks."""
    size: int
    """Ranks of the group."""
    bytes: int
    """Of the tensors that this rank hands in; of what it receives where it hands in nothing."""
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
_SENT_LAST = {"_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allgather_", "reduce_scatter_"} | {
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_tensor_coalesced_",
}
"""Operators whose first argument is what they write, and the second what they read."""


def is_collective(func: Any) -> bool:
    """Whether `func` is an operator of torch.distributed that communicates."""
    return bool(func.namespace == "c10d" and func._opname in _NAMES)


def described(func: Any, args: tuple[Any, ...], phase: str) -> Collective:
    """The call of `func`."""
    operator = func._opname
    sent = args[1] if operator in _SENT_LAST else args[0]
    size = sum(x.numel() * x.element_size() for x in tree_iter(sent) if isinstance(x, torch.Tensor))
    group = next(_group(x) for x in args if isinstance(x, torch.ScriptObject))
    return Collective(_NAMES[operator], _words(group), group.size(), size, phase)


def _group(value: torch.ScriptObject) -> Any:
    return dist.ProcessGroup.unbox(value)  # type: ignore[attr-defined]


def _words(group: Any) -> str:
    words = group.group_desc
    return (
        words if words and words != "undefined" else "ranks " + ",".join(map(str, dist.get_process_group_ranks(group)))
    )
