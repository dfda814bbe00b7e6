"""Packed micro-batches without their values, on the device. Packing itself happens on the host, for real."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from roll_batching.modeling.attention.varlen import VarlenSpans
from roll_batching.rehearsal.operations import tell_pairs


def hollow(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it, at any depth, replaced by one of its shape on `device`. Under the fake mode.

    The same tensor object stays the same object.
    """
    return _hollow(value, device, {})


def _hollow(value: Any, device: torch.device, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in made:
            made[id(value)] = torch.empty(value.shape, dtype=value.dtype, device=device)
        return made[id(value)]
    if isinstance(value, dict):
        return {key: _hollow(item, device, made) for key, item in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_hollow(item, device, made) for item in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    copy = object.__new__(type(value))
    for field in dataclasses.fields(value):
        object.__setattr__(copy, field.name, _hollow(getattr(value, field.name), device, made))
    if isinstance(value, VarlenSpans):
        made_spans: Any = copy
        tell_pairs(made_spans.cu_queries, _pairs(value))
    return copy


def _pairs(spans: VarlenSpans) -> int:
    """Pairs of a query and a key that it sees; the last query of a span sees all of its keys."""
    queries, keys = spans.cu_queries.long().diff(), spans.cu_keys.long().diff()
    return int((queries * keys - queries * (queries - 1) // 2).sum())
