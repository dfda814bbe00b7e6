"""Attention of a pack as a list of spans: runs of queries and the keys each run may see.

A span is a run of consecutive local query rows whose keys are a run of consecutive rows in pack
order, aligned at their ends: the last query sees all keys, the one before all but the last (what
flash attention calls causal, bottom-right). Without context parallelism a segment is one span with
as many keys as queries; with it, each of a rank's two chunks of a segment is a span whose keys
reach from the segment's start to the chunk's end. So one description serves every layout, on every
device, without a mask of the whole pack. Attention backends make of it what their kernel takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from roll_batching.packing.layout import IntArray, PackLayout


class Spans(NamedTuple):
    """The spans of one context-parallel rank, in the order of its rows; each array is [spans]."""

    queries: IntArray
    """Query rows of each span."""
    key_start: IntArray
    """The pack row of its first key."""
    keys: IntArray
    """Its keys."""


def spans_of(layout: PackLayout, cp_rank: int = 0) -> Spans:
    """The spans whose queries `cp_rank` holds."""
    starts = layout.cu_seqlens[:-1]
    if layout.cp_size == 1:
        return Spans(layout.segments, starts, layout.segments)
    chunk = layout.segments // (2 * layout.cp_size)
    ends = np.stack([(cp_rank + 1) * chunk, (2 * layout.cp_size - cp_rank) * chunk], axis=1).reshape(-1)
    return Spans(np.repeat(chunk, 2), np.repeat(starts, 2), ends)
