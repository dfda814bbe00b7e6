"""Where every token of one micro-batch lies: a pure function of the plan, made on the host.

A pack is a row of *segments*: one slot per sample, then the tail filler as short segments of their
own. A rectangle (padded and dynamic modes) is a pack whose slots are equal, so it needs no second
layout. Everything here is numpy on the host; `PackedBatch` moves the index tensors it needs once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from roll_batching.errors import PlanError
from roll_batching.planning import MicroBatch

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

TAIL_SEGMENT = 64
"""Longest segment of tail filler, in tokens: attention over filler stays linear in its length."""


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """Segments, positions and context-parallel rows of one pack.

    All per-token arrays have `tokens` entries, in pack order. Segments `0..samples-1` are the slots
    of the plan's samples; the rest, if any, is filler.
    """

    lengths: IntArray
    """Used tokens of each sample, [samples]."""
    segments: IntArray
    """Tokens of each segment, slots first and tail filler last, [segments]."""
    cp_size: int
    """Context-parallel size that the rows are dealt to."""
    rectangle_rows: int = 1
    """Rows of equal length that a rectangle consists of; 1 for a pack."""

    @classmethod
    def of(cls, micro_batch: MicroBatch, cp_size: int = 1, tokens: int | None = None) -> PackLayout:
        """Layout of a planned micro-batch (a filler is tail filler only).

        `tokens` fills the pack up to more tokens than planned. Raises `PlanError` when a segment
        cannot be cut into `2 * cp_size` equal chunks.
        """
        slots = np.asarray(micro_batch.slots, dtype=np.int64)
        tail = int(tokens or micro_batch.tokens) - int(slots.sum())
        unit = 2 * cp_size if cp_size > 1 else 1
        longest = max(unit, TAIL_SEGMENT // unit * unit)
        full, rest = divmod(tail, longest)
        segments = np.concatenate([slots, np.full(full, longest, np.int64), np.full(int(rest > 0), rest, np.int64)])
        if tail < 0 or (segments % unit).any():
            raise PlanError(
                f"a micro-batch of {micro_batch.tokens} tokens with slots {slots.tolist()} cannot be packed for "
                f"context parallel size {cp_size}: every slot and the tail must be non-negative multiples of {unit}. "
                f"Plan with PlanConstraints(cp_size={cp_size}, ...)"
            )
        return cls(
            lengths=np.asarray(micro_batch.lengths, np.int64),
            segments=segments,
            cp_size=cp_size,
            rectangle_rows=1 if tokens else int(micro_batch.rows),
        )

    @property
    def samples(self) -> int:
        """Number of samples in the pack (0 for a filler)."""
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """Tokens that the whole pack computes, before context parallelism divides them."""
        return int(self.segments.sum())

    @cached_property
    def cu_seqlens(self) -> IntArray:
        """Start of every segment and, last, the end of the pack, [segments + 1]."""
        return np.concatenate([[0], np.cumsum(self.segments)]).astype(np.int64)

    @cached_property
    def segment_ids(self) -> IntArray:
        """Segment of every token, [tokens]."""
        return np.repeat(np.arange(len(self.segments), dtype=np.int64), self.segments)

    @cached_property
    def position_ids(self) -> IntArray:
        """Position of every token inside its segment, [tokens]."""
        return np.arange(self.tokens, dtype=np.int64) - self.cu_seqlens[self.segment_ids]

    @cached_property
    def _used(self) -> IntArray:
        filler = np.zeros(len(self.segments) - self.samples, np.int64)
        return np.concatenate([self.lengths, filler])[self.segment_ids]

    @cached_property
    def real(self) -> BoolArray:
        """Whether a token belongs to a sample (neither slot padding nor filler), [tokens]."""
        return self.position_ids < self._used

    @cached_property
    def predicts(self) -> BoolArray:
        """Whether row i has a label, token i + 1 of the same sample, [tokens]."""
        return self.position_ids < self._used - 1

    @property
    def longest_segment(self) -> int:
        """Longest segment rounded up to a power of two: an upper bound that rarely changes.

        Megatron and TransformerEngine key caches on it, so it is a Python int of few distinct values.
        """
        return 1 << (int(self.segments.max()) - 1).bit_length()

    def rows(self, cp_rank: int) -> IntArray:
        """Pack rows that `cp_rank` holds, in its own order, [tokens / cp_size].

        Per segment the zigzag of Megatron and TransformerEngine: of `2 * cp_size` equal chunks rank
        r holds chunks r and `2 * cp_size - 1 - r`, which equalises causal attention.
        """
        if self.cp_size == 1:
            return np.arange(self.tokens, dtype=np.int64)
        chunk = self.position_ids // (self.segments // (2 * self.cp_size))[self.segment_ids]
        owner = np.minimum(chunk, 2 * self.cp_size - 1 - chunk)
        return np.flatnonzero(owner == cp_rank)

    def real_rows(self, cp_rank: int) -> IntArray:
        """Of each sample, how many of the rows that `cp_rank` holds are real, [samples].

        Under the zigzag these are the first of its rows there.
        """
        if self.cp_size == 1:
            return self.lengths
        chunk = self.segments[: self.samples] // (2 * self.cp_size)
        held = (cp_rank, 2 * self.cp_size - 1 - cp_rank)
        first, second = (np.clip(self.lengths - at * chunk, 0, chunk) for at in held)
        real: IntArray = first + second
        return real

    @cached_property
    def restore(self) -> IntArray:
        """Permutation from rows concatenated over CP ranks back to pack order, [tokens]."""
        if self.cp_size == 1:
            return np.arange(self.tokens, dtype=np.int64)
        return np.argsort(np.concatenate([self.rows(rank) for rank in range(self.cp_size)]), kind="stable")

    def source(self, starts: IntArray) -> IntArray:
        """Index of every token in a flat ragged field, [tokens]; rows that are not real read row 0.

        `starts` [samples] is where each sample of the pack begins in the flat field.
        """
        filler = np.zeros(len(self.segments) - self.samples, np.int64)
        start = np.concatenate([np.asarray(starts, np.int64), filler])[self.segment_ids]
        return np.where(self.real, start + self.position_ids, 0)
