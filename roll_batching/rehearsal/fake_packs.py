"""Packed micro-batches without their values, on the device. Packing itself happens on the host, for real."""

from __future__ import annotations

import torch

from roll_batching.modeling.attention.varlen import VarlenSpans
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.prefetch import mapped
from roll_batching.rehearsal.operations import tell_pairs


def hollow(pack: PackedBatch, device: torch.device) -> PackedBatch:
    """`pack` with every tensor in it replaced by one of its shape on `device`. Under the fake mode.

    The same tensor object stays the same object.
    """
    made: dict[int, torch.Tensor] = {}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return made[id(tensor)]

    found: PackedBatch = mapped(pack, empty)
    spans = pack.params.attention
    if isinstance(spans, VarlenSpans):
        tell_pairs(found.params.attention.cu_queries, _pairs(spans))
    return found


def _pairs(spans: VarlenSpans) -> int:
    """Pairs of a query and a key that it sees; the last query of a span sees all of its keys."""
    queries, keys = spans.cu_queries.long().diff(), spans.cu_keys.long().diff()
    return int((queries * keys - queries * (queries - 1) // 2).sum())
