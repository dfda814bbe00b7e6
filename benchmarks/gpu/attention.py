"""Attention backends on packs against plain fp32 attention: outputs and gradients."""

from __future__ import annotations

import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from roll_batching.modeling.attention.core import PackedCore
from roll_batching.packing import PackLayout
from roll_batching.packing.attention_backend import attention_backend, installed_versions
from roll_batching.packing.collectives import LocalKeys

BF16, FP32 = 2e-2, 1e-4
"""Largest relative errors: rounding of bf16, and of fp32 sums in another order."""


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    spans: list[tuple[int, int, int, int]],
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Causal attention in plain fp32, span by span. query: [tokens, heads, dim]; key, value: [tokens, groups, ...]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    parts = []
    for first, count, key_first, keys in spans:
        q, k, v = query[first : first + count], key[key_first : key_first + keys], value[key_first : key_first + keys]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        rows = torch.arange(count, device=q.device)[:, None] + keys - count
        seen = torch.arange(keys, device=q.device)[None]
        hidden = (seen > rows) if window is None else (seen > rows) | (seen <= rows - window)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, count, 1)], -1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :keys], v))
    return torch.cat(parts).flatten(1)


def core_of(
    backend: Any, heads: int, groups: int, dim: int, values: int, window: int | None, dtype: torch.dtype | None
) -> PackedCore:
    """A core, with attention sinks of `dtype` unless that is None."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    options: dict[str, Any] = {} if window is None else {"window_size": (window - 1, 0)}
    if dtype is not None:
        options |= {"softmax_type": "learnable", "params_dtype": dtype, "use_cpu_initialization": True}
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * dim,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=dim,
        attention_dropout=0.0,
        **options,
    )
    groups_of_ranks = types.SimpleNamespace(cp=None, tp=types.SimpleNamespace(size=lambda: 1))
    core: PackedCore = backend.build_core(
        None, config=config, layer_number=1, pg_collection=groups_of_ranks, k_channels=dim, v_channels=values
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
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    dim: int,
    cp: int,
    tokens: int,
    *,
    values: int = 0,
    window: int | None = None,
    has_sinks: bool = False,
) -> dict[str, Any]:
    """Compare one case; with `cp` above 1 on each context-parallel rank, which has fewer queries than keys."""
    lengths, values = ragged(dim + heads, tokens, 2 * cp if cp > 1 else 1), values or dim
    layout = PackLayout(lengths=lengths, segments=lengths, cp_size=cp)
    backend = attention_backend(name, device.type)
    backend = backend if window is None else backend.for_window(window)
    core = core_of(backend, heads, groups, dim, values, window, dtype if has_sinks else None).to(device)
    worst: dict[str, float] = {}
    over_ranks = torch.from_numpy(np.concatenate([layout.local_tokens(rank) for rank in range(cp)])).to(device)
    started, attended = time.perf_counter(), 0.0
    for rank in range(cp):
        rows = layout.local_tokens(rank)
        g = torch.Generator().manual_seed(rank)

        def draw(*shape: int, g: torch.Generator = g) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(device, dtype).requires_grad_()

        query, key = draw(len(rows), heads, dim), draw(layout.tokens, groups, dim)
        value, inputs = draw(layout.tokens, groups, values), ["query", "key", "value"]
        leaves = [query, key, value]
        if core.softmax_offset is not None:
            with torch.no_grad():
                core.softmax_offset.copy_(draw(heads))
            leaves, inputs = [*leaves, core.softmax_offset], [*inputs, "sinks"]
        upstream = torch.randn(len(rows), heads * values, generator=g).to(device, dtype)
        before = time.perf_counter()
        padded = F.pad(value, (0, dim - values)) if core.pads_values else value
        keys = LocalKeys(key[over_ranks], padded[over_ranks])  # in the order of the all-gather
        out = core.attend(query, keys, backend.metadata(layout, rank, device))
        found = (out, *torch.autograd.grad(out, leaves, upstream))
        found[1].sum().item()
        attended += time.perf_counter() - before
        exact = [x.detach().float().requires_grad_() for x in leaves]
        sinks = exact[3] if has_sinks else None
        wanted = reference(*exact[:3], sinks, spans_here(layout, rank), core.scale, window)
        expected = (wanted, *torch.autograd.grad(wanted, exact, upstream.float()))
        for what, a, b in zip(("output", *(f"d {one}" for one in inputs)), found, expected, strict=True):
            gap = float((a.double() - b.double()).norm() / b.double().norm())
            worst[what] = max(worst.get(what, 0.0), gap if np.isfinite(gap) else float("inf"))
    limit = FP32 if dtype is torch.float32 else BF16
    case = f"{name}, {str(dtype).removeprefix('torch.')}, {heads} heads on {groups}, width {dim}"
    case += f", values {values}" * (values != dim) + f", window {window}" * (window is not None) + ", sinks" * has_sinks
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


def is_refused(name: str, device: torch.device, dim: int, values: int, window: int | None, has_sinks: bool) -> bool:
    """Whether the backend refuses such heads on this device."""
    limits = attention_backend(name, device.type).requirements.device_limits
    return limits is not None and bool(
        limits(
            compute_capability=torch.cuda.get_device_capability(device),
            head_dim=dim,
            value_dim=values,
            has_window=window is not None,
            has_sinks=has_sinks,
        )
    )


def run(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Compare this package's backends on sizes of real models; on a CPU only the dense one."""
    tokens = 200 if dry else 4000
    shapes = [(16, 8, 128), (8, 8, 64), (12, 2, 96), (8, 1, 192), (8, 4, 256), (14, 2, 64)]
    kinds = [("dense", torch.float32, shapes[:2]), ("dense", torch.bfloat16, shapes[:3])]
    named = {"flash-attn": "flash_attn", "flash-attn-4": "flash_attn_4"}
    variable = ["varlen", *(named[one] for one in installed_versions(named))] if device.type == "cuda" else []
    for name in variable:
        kinds = [(name, torch.bfloat16, shapes), (name, torch.float16, shapes[:1]), *kinds]
    for name, dtype, some in kinds:
        for heads, groups, dim in some[:2] if dry else some:
            if not is_refused(name, device, dim, dim, None, False):
                for cp in (1, 2):
                    yield compare(name, device, dtype, heads, groups, dim, cp, tokens)
    # Gemma's windows, gpt-oss's windows and sinks, DeepSeek's values.
    special = [(8, 4, 128, 128, 48, False), (8, 1, 64, 64, 32, True), (4, 4, 192, 128, None, False)]
    for name, dtype in [*((one, torch.bfloat16) for one in variable), ("dense", torch.float32)]:
        for heads, groups, dim, values, window, has_sinks in special:
            if has_sinks and not getattr(attention_backend(name, device.type), "sinks", False):
                continue
            if not is_refused(name, device, dim, values, window, has_sinks):
                for cp in (1, 2):
                    yield compare(
                        *(name, device, dtype, heads, groups, dim, cp, tokens),
                        values=values,
                        window=window,
                        has_sinks=has_sinks,
                    )
