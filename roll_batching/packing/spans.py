"""Attention of a pack as a list of spans: runs of queries and the keys each run may see.

A span is a run of consecutive local query rows whose keys are a run of consecutive rows in pack
order, aligned at their ends: the last query sees all keys, the one before all but the last (what
flash attention calls causal, bottom-right). Without context parallelism a segment is one span with
as many keys as queries; with it, each of a rank's two chunks of a segment is a span whose keys
reach from the segment's start to the chunk's end. So one description serves every layout, on every
device, without a mask of the whole pack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from roll_batching.packing.layout import IntArray, PackLayout


@dataclass(frozen=True, kw_only=True)
class VarlenSpans:
    """Spans for a variable-length kernel: cumulative lengths on the device."""

    cu_queries: torch.Tensor
    """[spans + 1] int32, offsets of the query runs in the local rows."""
    cu_keys: torch.Tensor
    """[spans + 1] int32, offsets of the key runs after `key_rows` was applied."""
    max_queries: int
    max_keys: int
    key_rows: torch.Tensor | None
    """Rows of the pack to gather keys from, [sum of key runs]; None when they are the local rows."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Spans of similar size, as one dense batch."""

    queries: torch.Tensor
    """[spans, q] local query rows; short spans repeat their last row."""
    keys: torch.Tensor
    """[spans, k] rows of the pack; short spans repeat their last row."""
    mask: torch.Tensor | None
    """[spans, 1, q, k] bool, True where a query sees a key; None when plain causal is right."""


@dataclass(frozen=True, kw_only=True)
class BucketSpans:
    """Spans for a dense kernel: cost grows with the sum of the squares of the segments."""

    buckets: tuple[Bucket, ...]
    inverse: torch.Tensor
    """[local rows] position of every query row in the buckets' concatenated outputs."""


Spans = VarlenSpans | BucketSpans


def _runs(layout: PackLayout, cp_rank: int) -> tuple[IntArray, IntArray, IntArray]:
    """(queries per span, first key row of the pack per span, keys per span), in local row order."""
    starts = layout.cu_seqlens[:-1]
    if layout.cp_size == 1:
        return layout.segments, starts, layout.segments
    chunk = layout.segments // (2 * layout.cp_size)
    ends = np.stack([(cp_rank + 1) * chunk, (2 * layout.cp_size - cp_rank) * chunk], axis=1).reshape(-1)
    return np.repeat(chunk, 2), np.repeat(starts, 2), ends


def _grid(start: IntArray, count: IntArray, width: int) -> IntArray:
    """[n, width] rows start..start+count-1, the last one repeated to the width."""
    return start[:, None] + np.minimum(np.arange(width), count[:, None] - 1)


def _size_class(sizes: IntArray) -> IntArray:
    """Sizes rounded up to four steps per octave: dense batches waste at most a quarter per side."""
    step = np.maximum(1, 2 ** np.maximum(0, np.floor(np.log2(np.maximum(sizes, 1))).astype(np.int64) - 2))
    return -(-sizes // step) * step


def bucket_spans(layout: PackLayout, cp_rank: int = 0) -> BucketSpans:
    """Spans of this context-parallel rank grouped by size, for scaled_dot_product_attention."""
    queries, key_start, keys = _runs(layout, cp_rank)
    query_start = np.cumsum(queries) - queries
    classes = np.stack([_size_class(queries), _size_class(keys)], axis=1)
    _, member = np.unique(classes, axis=0, return_inverse=True)
    member = member.reshape(-1)
    inverse = np.empty(int(queries.sum()), np.int64)
    buckets, base = [], 0
    for bucket in range(int(member.max()) + 1):
        chosen = np.flatnonzero(member == bucket)
        width, depth = int(queries[chosen].max()), int(keys[chosen].max())
        q_rows = _grid(query_start[chosen], queries[chosen], width)
        real = np.arange(width) < queries[chosen][:, None]
        inverse[q_rows[real]] = (base + np.arange(q_rows.size).reshape(q_rows.shape))[real]
        base += q_rows.size
        mask = None
        if layout.cp_size > 1:
            last_seen = (keys - queries)[chosen][:, None] + np.arange(width)
            mask = torch.from_numpy(np.arange(depth) <= last_seen[:, :, None])[:, None]
        k_rows = _grid(key_start[chosen], keys[chosen], depth)
        buckets.append(Bucket(queries=torch.from_numpy(q_rows), keys=torch.from_numpy(k_rows), mask=mask))
    return BucketSpans(buckets=tuple(buckets), inverse=torch.from_numpy(inverse))


def varlen_spans(layout: PackLayout, cp_rank: int, device: torch.device) -> VarlenSpans:
    """Spans of this context-parallel rank for a variable-length kernel on `device`."""
    queries, key_start, keys = _runs(layout, cp_rank)

    def cumulative(counts: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)).to(device)

    key_rows = None
    if layout.cp_size > 1:
        first = np.cumsum(keys) - keys
        rows = np.repeat(key_start - first, keys) + np.arange(int(keys.sum()))
        key_rows = torch.from_numpy(rows).to(device)
    cu_queries = cumulative(queries)
    return VarlenSpans(
        cu_queries=cu_queries,
        cu_keys=cu_queries if key_rows is None else cumulative(keys),
        max_queries=int(queries.max()),
        max_keys=int(keys.max()),
        key_rows=key_rows,
    )
