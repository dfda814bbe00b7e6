"""Context-parallel gathers whose backward passes we define.

Both put local rows back into pack order. They differ in who uses the result. Keys are used
differently by every rank, so their gradients are summed over ranks. A loss is computed alike on
every rank, so each already holds the whole gradient and only takes its own rows; summing there
would multiply gradients by the context-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from roll_batching.packing.params import PackedParams


def _gather(x: torch.Tensor, restore: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)[restore]


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: torch.Tensor, restore: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(rows)
        return _gather(x, restore, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total[rows], None, None, None


class _GatherResults(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: torch.Tensor, restore: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _gather(x, restore, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return grads[0][rows], None, None, None


def gather_keys(x: torch.Tensor, params: PackedParams, group: dist.ProcessGroup) -> torch.Tensor:
    """Local rows [tokens / cp, ...] -> [tokens, ...] in pack order; the backward sums over CP ranks."""
    if params.rows is None:
        return x
    gathered: torch.Tensor = _GatherKeys.apply(x, params.rows, params.restore, group)  # type: ignore[no-untyped-call]
    return gathered


def gather_results(x: torch.Tensor, params: PackedParams, group: dist.ProcessGroup) -> torch.Tensor:
    """Local rows [tokens / cp, ...] -> [tokens, ...] in pack order; the backward takes this rank's rows."""
    if params.rows is None:
        return x
    gathered: torch.Tensor = _GatherResults.apply(x, params.rows, params.restore, group)  # type: ignore[no-untyped-call]
    return gathered
