"""Errors of attention backends on packs, against plain fp64 attention: outputs and gradients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from roll_batching.packing import AttentionBackend, PackLayout
from roll_batching.packing.collectives import LocalKeys
from roll_batching.packing.params import packed_params

LARGEST_ERROR = {torch.float32: 1e-4}
"""Largest relative error by dtype: fp32 sums in another order."""
LARGEST_HALF_ERROR = 2e-2
"""Largest relative error in bf16 and fp16: their rounding."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Attention heads of a layer."""

    heads: int = 16
    groups: int = 8
    """Key-value heads."""
    dim: int = 128
    values: int = 0
    """Channels of values; 0: `dim`."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None: all before it."""
    has_sinks: bool = False


def relative_error(tensor: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; infinite where the tensor is not finite."""
    right = expected.detach().double()
    gap = (tensor.detach().double().to(right.device) - right).norm() / right.norm()
    return float(gap.nan_to_num(nan=float("inf")))


def draw_lengths(seed: int, tokens: int, unit: int = 1) -> np.ndarray:
    """int64 `[24]`: lengths of few long and many short sequences; one has `unit` tokens."""
    shares = np.random.default_rng(seed).lognormal(0.0, 1.2, 24)
    lengths = np.maximum((shares * tokens / shares.sum()).astype(np.int64) // unit, 1) * unit
    lengths[3] = unit
    return lengths


def measure_attention(
    backend: AttentionBackend,
    device: torch.device,
    dtype: torch.dtype,
    shape: Heads,
    tokens: int,
    *,
    cp: int = 1,
    reference: torch.device | None = None,
) -> tuple[dict[str, float], float]:
    """Largest relative errors of output and gradients on one pack, and the backend's seconds.

    Args:
        backend: the backend; `shape.window` and `shape.has_sinks` must be among its features.
        device: where the backend runs.
        dtype: of queries, keys and values.
        shape: the heads.
        tokens: of the pack, about.
        cp: with more than 1, each context-parallel rank of a `PackedCore` in turn; it has fewer queries than keys.
        reference: where the fp64 attention runs; None: on `device`.
    """
    values = shape.values or shape.dim
    lengths = draw_lengths(shape.dim + shape.heads, tokens, 2 * cp if cp > 1 else 1)
    layout = PackLayout(lengths=lengths, segments=lengths, cp_size=cp)
    backend = backend if shape.window is None else backend.for_window(shape.window)
    core = _build_core(backend, shape, dtype).to(device)
    over_ranks = torch.from_numpy(np.concatenate([layout.local_tokens(rank) for rank in range(cp)])).to(device)
    worst: dict[str, float] = {}
    seconds = 0.0
    for rank in range(cp):
        rows, g = len(layout.local_tokens(rank)), torch.Generator().manual_seed(rank)
        sizes = [(rows, shape.heads, shape.dim), (layout.tokens, shape.groups, shape.dim)]
        sizes += [(layout.tokens, shape.groups, values)]
        leaves = [torch.randn(size, generator=g).to(device, dtype).requires_grad_() for size in sizes]
        names = ["output", "d query", "d key", "d value"]
        if shape.has_sinks:
            with torch.no_grad():
                core.softmax_offset.copy_(torch.randn(shape.heads, generator=g))
            leaves, names = [*leaves, core.softmax_offset], [*names, "d sinks"]
        upstream = torch.randn(rows, shape.heads * values, generator=g).to(device, dtype)
        started = time.perf_counter()
        if cp == 1:
            params = packed_params(layout, 0, device, attention=backend)
            out = core(*leaves[:3], None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)
        else:  # what a core computes once keys and values are gathered
            padded = F.pad(leaves[2], (0, shape.dim - values)) if core.pads_values else leaves[2]
            keys = LocalKeys(leaves[1][over_ranks], padded[over_ranks])
            out = core.attend(leaves[0], keys, backend.metadata(layout, rank, device))
        measured = (out, *torch.autograd.grad(out, leaves, upstream))
        measured[1].sum().item()  # waits for the device
        seconds += time.perf_counter() - started
        exact = [leaf.detach().to(reference or device).double().requires_grad_() for leaf in leaves]
        right = _attend_plainly(exact, _runs(layout, rank), shape.window)
        expected = (right, *torch.autograd.grad(right, exact, upstream.to(right.device).double()))
        for name, one, other in zip(names, measured, expected, strict=True):
            worst[name] = max(worst.get(name, 0.0), relative_error(one, other))
    return worst, seconds


def _build_core(backend: AttentionBackend, shape: Heads, dtype: torch.dtype) -> Any:
    options: dict[str, Any] = {} if shape.window is None else {"window_size": (shape.window - 1, 0)}
    if shape.has_sinks:
        options |= {"softmax_type": "learnable", "params_dtype": dtype, "use_cpu_initialization": True}
    heads = {"num_attention_heads": shape.heads, "num_query_groups": shape.groups, "kv_channels": shape.dim}
    config = TransformerConfig(
        num_layers=1, hidden_size=shape.heads * shape.dim, attention_dropout=0.0, **heads, **options
    )
    groups = SimpleNamespace(cp=None, tp=SimpleNamespace(size=lambda: 1))
    arguments = {"config": config, "layer_number": 1, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
    if shape.values:
        arguments |= {"k_channels": shape.dim, "v_channels": shape.values}
    return backend.build_core(None, **arguments, pg_collection=groups)


def _attend_plainly(
    leaves: list[torch.Tensor], runs: list[tuple[int, int, int, int]], window: int | None
) -> torch.Tensor:
    """Causal attention run by run; `leaves`: query [tokens, heads, dim], key, value, and perhaps sinks [heads]."""
    query, key, value, *sinks = leaves
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    parts = []
    for first, count, key_first, keys in runs:
        q, k, v = query[first : first + count], key[key_first : key_first + keys], value[key_first : key_first + keys]
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        rows = torch.arange(count, device=q.device)[:, None] + keys - count
        seen = torch.arange(keys, device=q.device)[None]
        hidden = (seen > rows) if window is None else (seen > rows) | (seen <= rows - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks:
            scores = torch.cat([scores, sinks[0][:, None, None].expand(-1, count, 1)], -1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :keys], v))
    return torch.cat(parts).flatten(1)


def _runs(layout: PackLayout, rank: int) -> list[tuple[int, int, int, int]]:
    """(first query row, queries, first key row, keys) of every run of consecutive rows on a rank."""
    rows = layout.local_tokens(rank)
    starts, segment = layout.cu_seqlens, layout.segment_ids[rows]
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(segment) != 0)) + 1
    runs = []
    for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        begin = int(starts[segment[first]])
        runs.append((int(first), int(last - first), begin, int(rows[last - 1]) + 1 - begin))
    return runs
