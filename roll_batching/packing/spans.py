"""Causal attention of a pack as spans: consecutive queries, and the consecutive keys that they attend to.

The keys of a span are consecutive in pack order and aligned with its queries at the end: the last query attends to all
keys, the one before to all but the last (flash attention: causal, bottom-right). Without context parallelism a segment
is one span with as many keys as queries. With it, each of the two chunks of a segment on a rank is a span with the keys
from the start of the segment to the end of the chunk. Attention backends convert spans to the arguments of their
kernels, without a mask over the whole pack.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roll_batching.packing.pack_layout import IntArray, PackLayout


class Spans(NamedTuple):
    """Spans of one context-parallel rank, in the order of its tokens; arrays are [spans]."""

    queries: IntArray
    """Number of queries of each span."""
    key_start: IntArray
    """Index in the pack of the first key of each span."""
    keys: IntArray
    """Number of keys of each span."""


def spans_of(pack_layout: PackLayout, cp_rank: int = 0) -> Spans:
    """Spans whose queries `cp_rank` holds."""
    starts = pack_layout.cu_seqlens[:-1]
    if pack_layout.cp_size == 1:
        return Spans(pack_layout.segments, starts, pack_layout.segments)
    chunk = pack_layout.segments // (2 * pack_layout.cp_size)
    ends = np.stack([(cp_rank + 1) * chunk, (2 * pack_layout.cp_size - cp_rank) * chunk], axis=1).reshape(-1)
    return Spans(np.repeat(chunk, 2), np.repeat(starts, 2), ends)
