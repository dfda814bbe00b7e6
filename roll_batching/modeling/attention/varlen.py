"""The attention backend of torch's variable-length flash attention, for CUDA without TransformerEngine."""

from __future__ import annotations

import functools
import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.attention.core import PackedCore
from roll_batching.packing.attention_backend import AttentionBackend, AttentionRequirements, Rotation
from roll_batching.packing.collectives import GatheredKeys, LocalKeys
from roll_batching.packing.pack_layout import IntArray, PackLayout, PackSlice
from roll_batching.packing.spans import spans_of


@dataclass(frozen=True, kw_only=True)
class VarlenSpans:
    """Spans for a variable-length kernel, as cumulative lengths on the device."""

    cu_queries: torch.Tensor
    """[spans + 1] int32: offsets of the spans' queries in the local rows."""
    cu_keys: torch.Tensor
    """[spans + 1] int32: offsets of the spans' keys among `key_rows`."""
    max_queries: int
    max_keys: int
    key_rows: torch.Tensor | None
    """[keys] key rows in the order of gathered context-parallel shards (`PackLayout.restore`); None for the local
    rows."""


class VarlenCore(PackedCore):
    """Attention over all spans in one call."""

    metadata_type = VarlenSpans
    applies_windows = True

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.window is not None and not self.kernel_has_windows():
            raise LayoutError(
                f"the kernel of {type(self).__name__} has no sliding windows in the installed version: update torch or "
                "flash-attn, or choose attention_backend: dense"
            )

    @staticmethod
    def kernel_has_windows() -> bool:
        """Whether the installed kernel takes a sliding window."""
        from torch.nn.attention.varlen import varlen_attn

        return "window_size" in _parameters(varlen_attn)

    def attend(self, query: torch.Tensor, keys: LocalKeys | GatheredKeys, metadata: VarlenSpans) -> torch.Tensor:
        """See `PackedCore.attend`."""
        out = self.kernel(query, keys, metadata)
        return out[..., : self.value_dim].reshape(out.shape[0], -1)

    def kernel(self, query: torch.Tensor, keys: LocalKeys | GatheredKeys, spans: VarlenSpans) -> torch.Tensor:
        """Causal attention of every span, aligned to its last key; [rows, heads, dim] as the queries."""
        return _varlen_attention(query, keys, spans, self.scale, self.window)


class VarlenBackend(AttentionBackend):
    """torch.nn.attention.varlen; the limits are those of `mha_varlen_fwd` in PyTorch's `flash_attn/flash_api.cpp`."""

    name = "varlen"
    core_type: type[VarlenCore] = VarlenCore
    requirements = AttentionRequirements(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        largest_head=256,
        head_multiple=8,
        compute_capability=(8, 0),
        libraries=(("torch", "2.10"),),
    )
    rotates = True
    decodes = True
    shares_prefixes = True
    narrow_values = True
    windows = True
    context_size_per_pack = True
    slices = True

    def build_core(self, rotation: Rotation | None, **arguments: Any) -> torch.nn.Module:
        """See `AttentionBackend.build_core`."""
        return self.core_type(rotation=rotation, **arguments)

    def metadata(self, layout: PackLayout | PackSlice, cp_rank: int, device: torch.device) -> VarlenSpans:
        """The pack's spans as cumulative lengths."""
        return varlen_spans(layout, cp_rank, device)


def kernel_window(window: int | None) -> tuple[int, int]:
    """Keys to the left and right of a query's own that flash attention's kernels let it see; -1: all."""
    return -1 if window is None else window - 1, 0


def varlen_spans(layout: PackLayout | PackSlice, cp_rank: int, device: torch.device) -> VarlenSpans:
    """Spans of this context-parallel rank for a variable-length kernel on `device`."""
    spans = spans_of(layout, cp_rank)
    queries, keys = spans.queries, spans.keys

    def cumulative(counts: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device)

    key_rows = None
    if layout.cp_size > 1 or spans.key_rows is not None:
        key_rows = torch.from_numpy(layout.restore[spans.rows()]).to(device)
    cu_queries = cumulative(queries)
    return VarlenSpans(
        cu_queries=cu_queries,
        cu_keys=cu_queries if np.array_equal(keys, queries) else cumulative(keys),
        max_queries=int(queries.max()),
        max_keys=int(keys.max()),
        key_rows=key_rows,
    )


def _varlen_attention(
    query: torch.Tensor, keys: LocalKeys | GatheredKeys, spans: VarlenSpans, scale: float, window: int | None
) -> torch.Tensor:
    """Causal (bottom-right) attention by torch's varlen kernel, whose signature differs between versions."""
    from torch.nn.attention.varlen import varlen_attn

    accepted = _parameters(varlen_attn)
    options: dict[str, Any] = (
        {"window_size": kernel_window(window)} if "window_size" in accepted else {"is_causal": True}
    )
    if "scale" in accepted:
        options["scale"] = scale
    else:
        query = query * (scale * math.sqrt(query.shape[-1]))
    if query.shape[1] == keys.heads:
        key, value = keys.take(spans.key_rows)
    elif "enable_gqa" in accepted:
        options["enable_gqa"] = True
        key, value = keys.take(spans.key_rows)
    else:
        key, value = keys.take(spans.key_rows, query.shape[1] // keys.heads)
    out: Any = varlen_attn(
        query, key, value, spans.cu_queries, spans.cu_keys, spans.max_queries, spans.max_keys, **options
    )
    return out


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
