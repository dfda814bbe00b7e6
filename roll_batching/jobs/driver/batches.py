"""Converts a `SampleBatch` to columns and back, without a copy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from roll_batching.errors import DataError
from roll_batching.jobs.driver.columns import Column, Columns
from roll_batching.planning.arrays import Ints
from roll_batching.samples import FieldSpec, SampleBatch


def to_columns(batch: SampleBatch) -> dict[str, Column]:
    """The fields of `batch` as numpy columns, on the host. Raises `DataError` for fields of kind rows."""
    if counted := [name for name, spec in batch.schema.items() if spec.kind == "rows"]:
        raise DataError(
            f"fields {', '.join(counted)} are of kind rows, which a worker group on Ray does not send: train from a "
            "YAML job, or call the strategy's train_step on every rank"
        )
    return {name: _column(batch[name], spec) for name, spec in batch.schema.items()}


def from_columns(ids: Ints, lengths: Ints, columns: Columns, origin: str | None = None) -> SampleBatch:
    """A batch whose tensors share the memory of `columns`, which is read-only in Ray's object store."""
    schema = {name: FieldSpec(column.kind, column.pad) for name, column in columns.items()}
    fields = {name: _tensor(column) for name, column in columns.items()}
    return SampleBatch(torch.tensor(ids), torch.tensor(lengths), fields, schema, origin)


def _column(values: Any, spec: FieldSpec) -> Column:
    if spec.kind == "static":
        return Column(values=values, kind=spec.kind, pad=spec.pad, dtype="")
    dtype = str(values.dtype).removeprefix("torch.")
    tensor = values.detach().cpu().contiguous()
    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor  # numpy has no bfloat16
    assert spec.kind != "rows"  # `to_columns` refuses them
    return Column(values=bits.numpy(), kind=spec.kind, pad=spec.pad, dtype=dtype)


def _tensor(column: Column) -> Any:
    if column.kind == "static":
        return column.values
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(np.ascontiguousarray(column.values))
    dtype = getattr(torch, column.dtype)
    return tensor if tensor.dtype is dtype else tensor.view(dtype)
