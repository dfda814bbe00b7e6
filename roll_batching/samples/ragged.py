"""Vectorised index arithmetic on ragged rows, on the host."""

from __future__ import annotations

import torch
from torch import Tensor


def starts_of(lengths: Tensor) -> Tensor:
    """Offsets of the rows: int64 `[n + 1]`, from int64 `lengths` `[n]`; the last is the total."""
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def row_indices(starts: Tensor, lengths: Tensor) -> Tensor:
    """Flat indices of rows that begin at `starts` and have `lengths` values: int64 `[sum(lengths)]`.

    Row j contributes `starts[j], starts[j] + 1, ..., starts[j] + lengths[j] - 1`, in order of j.
    """
    offsets = starts_of(lengths)
    shift = torch.repeat_interleave(starts - offsets[:-1], lengths)
    return shift + torch.arange(int(offsets[-1]), dtype=torch.int64)


def take(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` along the first dimension; a host index is copied to the device of `values`."""
    return values.index_select(0, index.to(values.device, non_blocking=True))


def place(values: Tensor, index: Tensor, rows: int, pad: int | float | bool) -> Tensor:
    """A tensor of `rows` rows with `values` at `index` and `pad` elsewhere.

    `values` is `[len(index), ...]`, the result `[rows, ...]` of the same dtype and device.
    """
    result = torch.full((rows, *values.shape[1:]), pad, dtype=values.dtype, device=values.device)
    result.index_copy_(0, index.to(values.device, non_blocking=True), values)
    return result
