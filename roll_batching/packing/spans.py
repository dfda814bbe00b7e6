"""Causal attention of a pack as spans: consecutive queries, and the consecutive keys that they attend to.

The keys of a span are consecutive in pack order and aligned with its queries at the end: the last query attends to all
keys, the one before to all but the last (flash attention: causal, bottom-right). Without context parallelism a segment
is one span with as many keys as queries. With it, each of the two chunks of a segment on a rank is a span with the keys
from the start of the segment to the end of the chunk. The keys of a sample with a shared prefix begin with the tokens
of that prefix, which stand earlier in the pack. Attention backends convert spans to the arguments of their
kernels, without a mask over the whole pack.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roll_batching.packing.pack_layout import IntArray, PackLayout, PackSlice


class Spans(NamedTuple):
    """Spans of one context-parallel rank, in the order of its tokens; arrays are [spans]."""

    queries: IntArray
    """Number of queries of each span."""
    key_start: IntArray
    """Index in the pack of the first key of each span."""
    keys: IntArray
    """Number of keys of each span, those of a shared prefix included."""
    key_rows: IntArray | None = None
    """Indices in the pack of all keys, span after span, [sum(keys)]; None: consecutive from `key_start`."""

    def rows(self) -> IntArray:
        """`key_rows`, also where they are consecutive."""
        if self.key_rows is not None:
            return self.key_rows
        first = np.cumsum(self.keys) - self.keys
        return np.repeat(self.key_start - first, self.keys) + np.arange(int(self.keys.sum()))


def spans_of(pack_layout: PackLayout | PackSlice, cp_rank: int = 0) -> Spans:
    """Spans whose queries `cp_rank` holds. Of a slice the queries are its own, and keys are its visible tokens."""
    starts, size = pack_layout.cu_seqlens[:-1], pack_layout.cp_size
    queries, segment, before = pack_layout.pieces
    ends = before + queries
    if size > 1:
        chunk = queries // (2 * size)
        queries, segment = np.repeat(chunk, 2), np.repeat(segment, 2)
        ends = np.stack([(cp_rank + 1) * chunk, (2 * size - cp_rank) * chunk], axis=1).reshape(-1)
        ends = ends + np.repeat(before, 2)
    segments = Spans(queries, starts[segment], ends)
    if pack_layout.prefix_lengths is None:
        return segments
    runs = []
    for number, start, end in zip(segment.tolist(), segments.key_start.tolist(), ends.tolist(), strict=True):
        if number < pack_layout.samples:
            runs.append(pack_layout.prefix_of(number))
        runs.append(np.arange(start, start + end))
    prefix = np.concatenate([pack_layout.prefix_lengths, np.zeros(len(starts) - pack_layout.samples, np.int64)])
    return Spans(queries, segments.key_start, ends + prefix[segment], np.concatenate(runs))


_SMALLEST_BLOCK = 64
"""Queries of a block at least: with fewer the blocks of a small window would be too many."""


def window_spans(spans: Spans, window: int) -> Spans:
    """Divides spans into shorter ones, with only the keys that a sliding window leaves to the queries.

    A query attends to `window` keys at most, the last of them its own. A span is cut into blocks of about `window`
    queries, whose keys begin with the first one that the block's first query sees. Computed keys then grow with
    length x window, not with length^2; inside a block a mask hides those beyond the window.
    """
    block = max(window, _SMALLEST_BLOCK)
    blocks = -(-spans.queries // block)
    span = np.repeat(np.arange(len(blocks)), blocks)
    first = (np.arange(len(span)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * block
    queries = np.minimum(block, spans.queries[span] - first)
    before = (spans.keys - spans.queries)[span] + first
    begin = np.maximum(before - window + 1, 0)
    keys = before + queries - begin
    if spans.key_rows is None:
        return Spans(queries, spans.key_start[span] + begin, keys)
    start = (np.cumsum(spans.keys) - spans.keys)[span] + begin
    rows = np.repeat(start - (np.cumsum(keys) - keys), keys) + np.arange(int(keys.sum()))
    return Spans(queries, spans.key_start[span], keys, spans.key_rows[rows])
