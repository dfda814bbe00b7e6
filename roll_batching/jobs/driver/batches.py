"""From a `SampleBatch` to columns and back, without a copy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from roll_batching.jobs.driver.columns import Column, Columns
from roll_batching.planning.arrays import Ints
from roll_batching.samples import FieldSpec, SampleBatch


def columns_of(batch: SampleBatch) -> dict[str, Column]:
    """The fields of `batch`, on the host."""
    return {name: _column(batch[name], spec) for name, spec in batch.schema.items()}


def batch_of(ids: Ints, lengths: Ints, columns: Columns, origin: str | None = None) -> SampleBatch:
    """The batch of `columns`: its tensors are the memory of the columns, and as read-only as that is."""
    schema = {name: FieldSpec(column.kind, column.pad) for name, column in columns.items()}
    fields = {name: _values(column) for name, column in columns.items()}
    return SampleBatch(torch.tensor(ids), torch.tensor(lengths), fields, schema, origin)


def _column(values: Any, spec: FieldSpec) -> Column:
    if spec.kind == "static":
        return Column(values=values, kind=spec.kind, pad=spec.pad, dtype="")
    dtype = str(values.dtype).removeprefix("torch.")
    held = values.detach().cpu().contiguous()
    bits = held.view(torch.int16) if held.dtype is torch.bfloat16 else held
    return Column(values=bits.numpy(), kind=spec.kind, pad=spec.pad, dtype=dtype)


def _values(column: Column) -> Any:
    if column.kind == "static":
        return column.values
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        held = torch.from_numpy(np.ascontiguousarray(column.values))
    dtype = getattr(torch, column.dtype)
    return held if held.dtype is dtype else held.view(dtype)
