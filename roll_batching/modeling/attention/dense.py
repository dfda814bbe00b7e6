"""The attention backend for every device and dtype: dense attention over buckets of similar spans.

Its cores also decode with a cache for models whose own backend has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.attention.core import PackedCore
from roll_batching.modeling.rotary import PackRotation, RotarySettings
from roll_batching.packing.attention_backend import AttentionBackend, Rotation
from roll_batching.packing.collectives import GatheredKeys, LocalKeys
from roll_batching.packing.pack_layout import IntArray, PackLayout, PackSlice
from roll_batching.packing.spans import spans_of, window_spans


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Spans of similar size as one dense batch."""

    queries: torch.Tensor
    """[spans, q] local query rows; shorter spans repeat their last row."""
    keys: torch.Tensor
    """[spans, k] key rows in the order of gathered context-parallel shards (`PackLayout.restore`); shorter spans repeat
    their last row."""
    mask: torch.Tensor | None
    """[spans, 1, q, k] bool, True where a query attends to a key; None for a causal mask."""

    def to(self, device: torch.device) -> Bucket:
        """The bucket on `device`."""
        mask = None if self.mask is None else self.mask.to(device, non_blocking=True)
        return Bucket(
            queries=self.queries.to(device, non_blocking=True), keys=self.keys.to(device, non_blocking=True), mask=mask
        )


@dataclass(frozen=True, kw_only=True)
class BucketSpans:
    """Spans for a dense kernel, whose cost grows with the sum of squared lengths."""

    buckets: tuple[Bucket, ...]
    inverse: torch.Tensor
    """[local rows] index of every query row in the concatenated outputs of the buckets."""
    windowed: BucketSpans | None = None
    """Spans of layers with a sliding window; None for models without one."""


class DenseCore(PackedCore):
    """Attention bucket by bucket."""

    metadata_type = BucketSpans
    applies_windows = True
    applies_sinks = True

    def attend(self, query: torch.Tensor, keys: LocalKeys | GatheredKeys, metadata: BucketSpans) -> torch.Tensor:
        """See `PackedCore.attend`."""
        if self.window is not None:
            if metadata.windowed is None:
                raise LayoutError(
                    "the layer has a sliding window, and the pack's metadata has none: give packed_params (or "
                    "pack_step) the backend of the model's cores, or backend.for_window(size)"
                )
            metadata = metadata.windowed
        outputs = []
        for bucket in metadata.buckets:
            key, value = (x.transpose(1, 2) for x in keys.take(bucket.keys))
            out = self.dense(query[bucket.queries].transpose(1, 2), key, value, bucket.mask)
            outputs.append(out[..., : self.value_dim].transpose(1, 2).reshape(bucket.queries.numel(), -1))
        return torch.cat(outputs)[metadata.inverse]


@dataclass(frozen=True)
class DenseBackend(AttentionBackend):
    """torch's scaled_dot_product_attention over buckets of similar sequences."""

    window: int | None = None
    """Tokens that a token attends to in layers with a sliding window; None without such layers."""

    name = "dense"
    rotates = True
    decodes = True
    shares_prefixes = True
    narrow_values = True
    windows = True
    sinks = True
    context_size_per_pack = True
    slices = True

    def build_core(self, rotation: Rotation | None, **arguments: Any) -> torch.nn.Module:
        """See `AttentionBackend.build_core`."""
        return DenseCore(rotation=rotation, **arguments)

    def metadata(self, layout: PackLayout | PackSlice, cp_rank: int, device: torch.device) -> BucketSpans:
        """The pack's spans as buckets."""
        spans = bucket_spans(layout, cp_rank, device)
        if self.window is None:
            return spans
        return dataclasses.replace(spans, windowed=bucket_spans(layout, cp_rank, device, self.window))

    def for_window(self, window: int) -> DenseBackend:
        """See `AttentionBackend.for_window`."""
        return DenseBackend(window)


def _grid(start: IntArray, count: IntArray, width: int) -> IntArray:
    """[n, width] rows start..start+count-1, padded with the last one."""
    return start[:, None] + np.minimum(np.arange(width), count[:, None] - 1)


def _size_class(sizes: IntArray) -> IntArray:
    """Sizes rounded up to four steps per octave, so that padding is at most a quarter per side."""
    step = np.maximum(1, 2 ** np.maximum(0, np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64) - 2))
    return -(-sizes // step) * step


def bucket_spans(
    layout: PackLayout | PackSlice, cp_rank: int, device: torch.device, window: int | None = None
) -> BucketSpans:
    """Spans of this context-parallel rank grouped by size, for scaled_dot_product_attention on `device`."""
    spans = spans_of(layout, cp_rank)
    if window is not None:
        spans = window_spans(spans, window)
    queries, keys, key_rows = spans.queries, spans.keys, spans.rows()
    first_key = np.cumsum(keys) - keys
    query_start = np.cumsum(queries) - queries
    classes = np.stack([_size_class(queries), _size_class(keys)], axis=1)
    _, bucket_of = np.unique(classes, axis=0, return_inverse=True)
    bucket_of = bucket_of.reshape(-1)
    inverse = np.empty(int(queries.sum()), np.int64)
    buckets, base = [], 0
    for bucket in range(int(bucket_of.max()) + 1):
        members = np.flatnonzero(bucket_of == bucket)
        width, depth = int(queries[members].max()), int(keys[members].max())
        q_rows = _grid(query_start[members], queries[members], width)
        real = np.arange(width) < queries[members][:, None]
        # Repeated rows are computed and not read. Their number is limited by `_size_class`.
        inverse[q_rows[real]] = (base + np.arange(q_rows.size).reshape(q_rows.shape))[real]
        base += q_rows.size
        mask = None  # where a span has as many keys as queries, the kernel's causal mask is right, and faster
        hidden = window is not None and depth > window
        if layout.cp_size > 1 or hidden or (keys[members] > queries[members]).any():
            # A span's queries are the last of its keys. A causal mask of torch would align the first ones.
            last_seen = (keys - queries)[members][:, None] + np.arange(width)
            visible = np.arange(depth) <= last_seen[:, :, None]
            if window is not None:
                visible &= np.arange(depth) > last_seen[:, :, None] - window
            mask = torch.from_numpy(visible)[:, None]
        k_rows = key_rows[_grid(first_key[members], keys[members], depth)]
        if layout.cp_size > 1:
            k_rows = layout.restore[k_rows]  # keys are gathered rank after rank, not in pack order
        buckets.append(Bucket(queries=torch.from_numpy(q_rows), keys=torch.from_numpy(k_rows), mask=mask).to(device))
    return BucketSpans(buckets=tuple(buckets), inverse=torch.from_numpy(inverse).to(device, non_blocking=True))


# ---- decoding


@contextlib.contextmanager
def dense_decoding(gpt: Any, rotary: RotarySettings) -> Iterator[None]:
    """Replaces the core attention of every layer of a GPTModel by a dense core that rotates by `rotary`.

    Layers without attention stay, and cores without RoPE (`no_rope_freq`) get none.
    Core attention has no parameters, so only modules are swapped; they are restored at the end.
    """
    every = [layer.self_attention for layer in gpt.decoder.layers]
    attentions = [attention for attention in every if hasattr(attention, "core_attention")]
    before = [attention.core_attention for attention in attentions], gpt.position_embedding_type
    rotation, without = PackRotation(rotary, gpt.config.kv_channels), gpt.config.no_rope_freq
    for attention in attentions:
        attention.core_attention = DenseCore(
            gpt.config,
            layer_number=attention.layer_number,
            pg_collection=attention.pg_collection,
            rotation=None if without and without[attention.layer_number - 1] else rotation,
            softmax_scale=gpt.config.softmax_scale,
        )
    gpt.position_embedding_type = "none"  # read at each forward
    try:
        yield
    finally:
        cores, gpt.position_embedding_type = before
        for attention, core in zip(attentions, cores, strict=True):
            attention.core_attention = core
