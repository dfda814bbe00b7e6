"""A Triton kernel for RoPE that reads and writes queries or keys once, forward and backward.

Registered as a torch operator, so that it works under FakeTensorMode.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]  # Triton reads this function, Python never runs it
    x, out, cos, sin, heads, token_stride, head_stride, sign,
    HALF: tl.constexpr, DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    j = tl.arange(0, HALF_BLOCK)
    c = tl.load(cos + token * 2 * HALF + j, mask=j < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + token * 2 * HALF + j, mask=j < HALF, other=0.0).to(tl.float32) * sign
    inside = (head < heads)[:, None] & (j < HALF)[None]
    source = x + token * token_stride + head[:, None] * head_stride + j[None]
    target = out + (token * heads + head[:, None]) * DIM + j[None]
    a = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, (a * c[None] - b * s[None]).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (b * c[None] + a * s[None]).to(out.dtype.element_ty), mask=inside)
    if DIM > 2 * HALF:
        k = tl.arange(0, REST_BLOCK)
        inside = (head < heads)[:, None] & (k < DIM - 2 * HALF)[None]
        source = x + token * token_stride + head[:, None] * head_stride + 2 * HALF + k[None]
        target = out + (token * heads + head[:, None]) * DIM + 2 * HALF + k[None]
        tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)


@torch.library.custom_op("roll_batching::rotate_tokens", mutates_args=())
def rotate_tokens(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backwards: bool) -> torch.Tensor:
    """A contiguous copy of x [tokens, heads, dim] with its first channels rotated by tables [tokens, rotated].

    The tables' halves are equal. `backwards` rotates by the negative angles, which is the gradient.
    """
    tokens, heads, dim = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    half = cos.shape[-1] // 2
    out = torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(triton.next_power_of_2(heads), 16)
        _rotate_kernel[(tokens, triton.cdiv(heads, block))](
            x, out, cos, sin, heads, x.stride(0), x.stride(1), -1.0 if backwards else 1.0,
            HALF=half, DIM=dim, HALF_BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(max(dim - 2 * half, 1)), HEADS=block, num_warps=4,
        )  # fmt: skip
    return out


@rotate_tokens.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, backwards: bool) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _Rotated(torch.autograd.Function):
    """`rotate_tokens` with its gradient, for which only the tables are saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_tokens(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        return rotate_tokens(grads[0], *ctx.saved_tensors, True), None, None


def rotate_fused(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`modeling.rotary.rotate` for CUDA: x [..., heads, dim], tables [..., rotated] with the same leading sizes."""
    cos, sin = (table.reshape(-1, table.shape[-1]) for table in tables)
    return _Rotated.apply(x.reshape(-1, *x.shape[-2:]), cos.contiguous(), sin.contiguous()).view(x.shape)
