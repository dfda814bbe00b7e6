"""Triton kernels that process a tile of logits in one pass instead of the dozen of `vocab_parallel`.

Registered as torch operators, so that they work under FakeTensorMode.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
"""Vocabulary columns that a Triton program reads at once."""


@triton.jit
def _accumulate_kernel(  # type: ignore[no-untyped-def]  # Triton reads this function, Python never runs it
    logits, index, place, top, total, moment, target, columns, stride, scale,
    HAS_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # rows x vocabulary passes 2^31
    start = (tl.load(index + row) if HAS_INDEX else row) * stride
    # Bound, sum of exponentials and its moment, as `vocab_parallel` defines them.
    m, z, s = tl.load(top + row), tl.load(total + row), tl.load(moment + row)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32) * scale
        bound = tl.maximum(m, tl.max(x, 0))
        shift = m - bound
        shrink = tl.exp(shift)
        x = tl.where(inside, x - bound, 0.0)
        e = tl.where(inside, tl.exp(x), 0.0)
        s = shrink * (s + shift * z) + tl.sum(e * x, 0)  # before z changes
        z = shrink * z + tl.sum(e, 0)
        m = bound
    tl.store(top + row, m)
    tl.store(total + row, z)
    tl.store(moment + row, s)
    label = tl.load(place + row)
    in_tile = (label >= 0) & (label < columns)
    x = tl.load(logits + start + label, mask=in_tile, other=0.0).to(tl.float32) * scale
    tl.store(target + row, tl.load(target + row) + x)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits, out, index, place, lse, entropy, d_log_prob, d_entropy, columns, stride, out_stride, scale,
    HAS_INDEX: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(index + row) if HAS_INDEX else row
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    log_p = tl.load(logits + source * stride + column, mask=inside, other=0.0).to(tl.float32) * scale - tl.load(
        lse + row
    )
    upstream = tl.load(d_log_prob + row)
    factor = -upstream
    if HAS_ENTROPY:
        of_entropy = tl.load(d_entropy + row)
        factor = factor - of_entropy * (log_p + tl.load(entropy + row))
    gradient = tl.exp(log_p) * factor
    gradient = tl.where(column == tl.load(place + row), gradient + upstream, gradient) * scale
    tl.store(out + source * out_stride + column, gradient.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("roll_batching::accumulate_tile", mutates_args=("top", "total", "moment", "target"))
def accumulate_tile(
    logits: torch.Tensor,
    index: torch.Tensor | None,
    place: torch.Tensor,
    top: torch.Tensor,
    total: torch.Tensor,
    moment: torch.Tensor,
    target: torch.Tensor,
    temperature: float,
) -> None:
    """Adds a tile to the running statistics of its rows.

    Args:
        logits: [any, columns] before temperature, with column stride 1.
        index: [rows] int64: the row of `logits` for each row; None: rows correspond.
        place: [rows] int64: the label's column in the tile; out of range if it is in another tile.
        top, total, moment, target: [rows] fp32 running statistics (see `vocab_parallel`), updated in place.
        temperature: logits are divided by it.
    """
    if len(place):
        _accumulate_kernel[(len(place),)](
            logits, index, place, top, total, moment, target, logits.shape[1], logits.stride(0), 1.0 / temperature,
            HAS_INDEX=index is not None, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


@torch.library.custom_op("roll_batching::tile_gradient", mutates_args=("out",))
def tile_gradient(
    logits: torch.Tensor,
    out: torch.Tensor,
    index: torch.Tensor | None,
    place: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    d_log_prob: torch.Tensor,
    d_entropy: torch.Tensor | None,
    temperature: float,
) -> None:
    """Writes the gradient of a tile of logits before temperature to `out`, of the shape of `logits`.

    Arguments as in `accumulate_tile`; lse, entropy and the gradients of log-probs and entropies are [rows] fp32.
    """
    if len(place):
        columns = logits.shape[1]
        _gradient_kernel[(len(place), triton.cdiv(columns, _BLOCK))](
            logits, out, index, place, lse, entropy, d_log_prob, d_entropy, columns, logits.stride(0), out.stride(0),
            1.0 / temperature, HAS_INDEX=index is not None, HAS_ENTROPY=d_entropy is not None, BLOCK=_BLOCK,
            num_warps=8,
        )  # fmt: skip


def _write_nothing(*arguments: object) -> None:
    """Both operators on fake tensors: their outputs are arguments."""


accumulate_tile.register_fake(_write_nothing)
tile_gradient.register_fake(_write_nothing)
