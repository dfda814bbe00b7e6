"""The gated delta rule by the kernels of flash-linear-attention (`fla.ops.gated_delta_rule`), which need CUDA.

They compute sequences from given states, and so a tree of runs level by level. Pieces that context-parallel ranks hand
over need maps of states, which `recurrences.gated_delta_rule` computes on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from roll_batching.modeling.recurrences import Chunks, gated_delta_rule

PACKAGE = "flash-linear-attention"

Rule = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@functools.cache
def kernel() -> Any:
    """Fla's chunked rule; None where fla is not installed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None
    return chunk_gated_delta_rule


def rule_of(x: torch.Tensor, chunks: Chunks) -> Rule:
    """`recurrences.gated_delta_rule`, or the same by kernels for 16-bit inputs `x` on CUDA."""
    by_kernel = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and chunks.exchange is None
    return functools.partial(kernel_rule, dtype=x.dtype) if by_kernel and kernel() is not None else gated_delta_rule


def kernel_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor,
    chunks: Chunks, *, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """As `recurrences.gated_delta_rule`, with products of `dtype` and fp32 states, those of a tree level by level."""
    inputs = [query.to(dtype), key.to(dtype), value.to(dtype), decay.float(), rate.to(dtype)]
    if chunks.levels is None:
        return _run(inputs, chunks.starts, None)
    outputs: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    for tokens, starts, parents in chunks.levels:
        before = states[-1][parents] if states else None
        out, after = _run([x[tokens] for x in inputs], starts, before)
        outputs.append(out)
        states.append(after)
    tokens = torch.cat([tokens for tokens, *_ in chunks.levels])
    return torch.empty_like(torch.cat(outputs)).index_copy(0, tokens, torch.cat(outputs)), torch.cat(states)


def _run(
    inputs: list[torch.Tensor], starts: torch.Tensor, states: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, after = kernel()(
        *(x.unsqueeze(0) for x in inputs),
        scale=1.0,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=starts,
    )
    return out.squeeze(0), after
