"""Attention backends on packs against plain fp32 attention: outputs and gradients."""

from __future__ import annotations

import importlib.util
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from roll_batching.modeling.attention.core import PackedCore
from roll_batching.packing import PackLayout
from roll_batching.packing.attention_backend import attention_backend
from roll_batching.packing.collectives import LocalKeys

BF16, FP32 = 2e-2, 1e-4
"""Largest relative errors: rounding of bf16, and of fp32 sums in another order."""


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: list[tuple[int, int, int, int]], scale: float
) -> torch.Tensor:
    """Causal attention in plain fp32, span by span. query: [tokens, heads, dim]; key, value: [tokens, groups, dim]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    parts = []
    for first, count, key_first, keys in spans:
        q, k, v = query[first : first + count], key[key_first : key_first + keys], value[key_first : key_first + keys]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        rows = torch.arange(count, device=q.device)[:, None] + keys - count
        hidden = torch.arange(keys, device=q.device)[None] > rows
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v))
    return torch.cat(parts).flatten(1)


def core_of(backend: Any, heads: int, groups: int, dim: int) -> PackedCore:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=dim,
        attention_dropout=0.0,
    )
    core: PackedCore = backend.build_core(
        None, config=config, layer_number=1, pg_collection=types.SimpleNamespace(cp=None)
    )
    return core


def ragged(seed: int, tokens: int, unit: int = 1) -> np.ndarray:
    """int64 `[24]`: lengths of few long and many short sequences; one has `unit` tokens."""
    draw = np.random.default_rng(seed)
    shares = draw.lognormal(0.0, 1.2, 24)
    lengths = np.maximum((shares * tokens / shares.sum()).astype(np.int64) // unit, 1) * unit
    lengths[3] = unit
    return lengths


def compare(
    name: str, device: torch.device, dtype: torch.dtype, heads: int, groups: int, dim: int, cp: int, tokens: int
) -> dict[str, Any]:
    """Compare one case; with `cp` above 1 on each context-parallel rank, which has fewer queries than keys."""
    lengths = ragged(dim + heads, tokens, 2 * cp if cp > 1 else 1)
    layout = PackLayout(lengths=lengths, segments=lengths, cp_size=cp)
    backend = attention_backend(name, device.type)
    core = core_of(backend, heads, groups, dim)
    worst: dict[str, float] = {}
    over_ranks = torch.from_numpy(np.concatenate([layout.local_tokens(rank) for rank in range(cp)])).to(device)
    started, attended = time.perf_counter(), 0.0
    for rank in range(cp):
        rows = layout.local_tokens(rank)
        g = torch.Generator().manual_seed(rank)

        def draw(count: int, width: int, g: torch.Generator = g) -> torch.Tensor:
            made = torch.randn(count, width, dim, generator=g).to(device, dtype)
            return made.requires_grad_()

        query, key, value = draw(len(rows), heads), draw(layout.tokens, groups), draw(layout.tokens, groups)
        upstream = torch.randn(len(rows), heads * dim, generator=g).to(device, dtype)
        before = time.perf_counter()
        keys = LocalKeys(key[over_ranks], value[over_ranks])  # in the order of the all-gather
        out = core.attend(query, keys, backend.metadata(layout, rank, device))
        found = (out, *torch.autograd.grad(out, (query, key, value), upstream))
        found[1].sum().item()
        attended += time.perf_counter() - before
        exact = tuple(x.detach().float().requires_grad_() for x in (query, key, value))
        wanted = reference(*exact, spans_here(layout, rank), core.scale)
        expected = (wanted, *torch.autograd.grad(wanted, exact, upstream.float()))
        for what, a, b in zip(("output", "d query", "d key", "d value"), found, expected, strict=True):
            gap = float((a.double() - b.double()).norm() / b.double().norm())
            worst[what] = max(worst.get(what, 0.0), gap if np.isfinite(gap) else float("inf"))
    limit = FP32 if dtype is torch.float32 else BF16
    case = f"{name}, {str(dtype).removeprefix('torch.')}, {heads} heads on {groups}, width {dim}"
    case += f", a rank of context parallel size {cp}" if cp > 1 else ""
    figures = {"seconds": time.perf_counter() - started, "seconds of the backend, first call": attended}
    return {"case": case, "figures": figures, "limits": {what: [gap, limit] for what, gap in worst.items()}}


def spans_here(layout: PackLayout, rank: int) -> list[tuple[int, int, int, int]]:
    """(first query row, queries, first key row, keys) of every run of consecutive rows on a rank."""
    rows = layout.local_tokens(rank)
    starts, segment = layout.cu_seqlens, layout.segment_ids[rows]
    cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(segment) != 0)) + 1
    found = []
    for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        begin = int(starts[segment[first]])
        found.append((int(first), int(last - first), begin, int(rows[last - 1]) + 1 - begin))
    return found


def run(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Compare this package's backends on sizes of real models; on a CPU only the dense one."""
    tokens = 200 if dry else 4000
    shapes = [(16, 8, 128), (8, 8, 64), (12, 2, 96), (8, 1, 192), (8, 4, 256), (14, 2, 64)]
    kinds = [("dense", torch.float32, shapes[:2]), ("dense", torch.bfloat16, shapes[:3])]
    if device.type == "cuda":
        variable = ["varlen", *(["flash_attn"] if importlib.util.find_spec("flash_attn") else [])]
        for name in variable:
            kinds = [(name, torch.bfloat16, shapes), (name, torch.float16, shapes[:1]), *kinds]
    for name, dtype, some in kinds:
        for heads, groups, dim in some[:2] if dry else some:
            for cp in (1, 2):
                yield compare(name, device, dtype, heads, groups, dim, cp, tokens)
