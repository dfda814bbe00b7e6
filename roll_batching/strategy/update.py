"""One step of the optimizer, unless the gradient's norm is not finite: found alike on all ranks, beforehand."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

_LARGEST_SQUARE = torch.finfo(torch.float32).max / 2
"""Megatron adds squares in fp32: below this its norm is finite, whatever the order of its sum."""


def gradient_square(chunks: Sequence[Any]) -> torch.Tensor:
    """The sum of squares of the gradients of `chunks`, fp64 on their device; no host read.

    Of gradients that are reduced: behind the schedule's end.
    """
    norms = [torch.linalg.vector_norm(gradient, dtype=_at_least_fp32(gradient)) for gradient in _gradients(chunks)]
    # A stage whose parameters are all frozen has none.
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def step_optimizer(optimizer: Any, chunks: Sequence[Any], square: float) -> float | None:
    """Steps a Megatron optimizer; the gradient's norm before clipping, or None when the step was skipped. Collective.

    Weights and moments are untouched by a skipped step. An optimizer with a loss scale hears of it, as it
    would in Megatron's own loop, so that a dynamic scale comes down.

    Args:
        optimizer: a Megatron optimizer over the parameters of `chunks`.
        chunks: this stage's model chunks, their gradients reduced.
        square: `gradient_square` over all ranks: where Megatron's sum of squares would not be finite, the step is
            skipped.
    """
    if not square < _LARGEST_SQUARE:
        if has_loss_scale(optimizer):
            # Its own check lowers the scale. What one rank saw, all ranks and all chained optimizers must see.
            for gradient in _gradients(chunks):
                gradient.fill_(float("inf"))
            optimizer.step()
        return None
    stepped, norm, _ = optimizer.step()
    if not stepped:
        return None
    return float(norm) if norm is not None else float(optimizer.get_grad_norm())


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that Megatron chained (dense and expert parameters), or the only one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def has_loss_scale(optimizer: Any) -> bool:
    """Whether the optimizer divides gradients by a loss scale (fp16, or bf16 with a constant one)."""
    return any(getattr(part, "grad_scaler", None) is not None for part in parts_of(optimizer))


def free_optimizer_memory(chunks: Sequence[Any]) -> None:
    """Gives back what an optimizer that nobody refers to any more left with the parameters of `chunks`."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            if hasattr(parameter, "main_param"):  # its fp32 copy
                del parameter.main_param
    gc.collect()  # Megatron's optimizers refer to themselves


def _at_least_fp32(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _gradients(chunks: Sequence[Any]) -> list[torch.Tensor]:
    return [gradient for chunk in chunks for gradient in _gradient_storage(chunk)]


def _gradient_storage(chunk: Any) -> list[torch.Tensor]:
    """The tensors that hold a chunk's gradients: DDP's buffers, or each parameter's own."""
    if hasattr(chunk, "buffers") and hasattr(chunk, "expert_parallel_buffers"):
        return [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return [p.grad for p in chunk.parameters() if p.grad is not None]
