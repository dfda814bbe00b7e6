"""Layout of the tokens of one micro-batch, computed from the plan on the host.

A pack is a sequence of *segments*: one slot per sample, then tail filler in short segments. A rectangle (padded and
dynamic modes) is a pack with equal slots, so all modes have this layout. Where samples share prefixes, a slot holds the
tokens that no sample before it in the pack computes (`planning.prefixes`). All arrays are numpy; `PackedBatch` copies
the indices that it needs to the device once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from roll_batching.errors import PlanError
from roll_batching.planning import MicroBatch

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

TAIL_SEGMENT = 64
"""Longest segment of tail filler, in tokens, so that the cost of attention over filler is linear."""


class Pieces(NamedTuple):
    """Runs of tokens of a segment that lie in one slice, or whole segments; arrays are [pieces]."""

    lengths: IntArray
    segment: IntArray
    """Segment of each."""
    before: IntArray
    """Tokens of the segment before the piece."""


class Runs(NamedTuple):
    """Segments, cut behind every token at which a shared prefix ends; arrays are [runs].

    A sample that reads a token of a run also reads its last token, so each sample is a path of whole runs: a layer with
    a state starts a run from the state in which its parent ends.
    """

    lengths: IntArray
    """Tokens of each."""
    parents: IntArray
    """The run before each in its sample, earlier in the pack; -1: it begins a sample, or is filler."""

    @property
    def starts(self) -> IntArray:
        """Starts of the runs and the end of the pack, [runs + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """Segments, positions and context-parallel shares of one pack.

    Per-token arrays have `tokens` entries, in pack order. Segments 0 to samples - 1 are the slots of the samples; other
    segments are filler.
    """

    lengths: IntArray
    """Tokens of each sample in its slot, [samples]: all that are used, or those after its shared prefix."""
    segments: IntArray
    """Tokens of each segment, slots first and tail filler last, [segments]."""
    cp_size: int
    """Context-parallel size."""
    rectangle_rows: int = 1
    """Rows of a rectangle; 1 for a pack."""
    prefix_lengths: IntArray | None = None
    """Leading tokens of each sample that the samples before it compute, [samples]; None: samples share nothing."""

    cuts: IntArray | None = None
    """First token of each slice but the first; None: a whole pack. All pieces are multiples of 2 * `cp_size`."""

    @classmethod
    def of(cls, micro_batch: MicroBatch, cp_size: int = 1) -> PackLayout:
        """Layout of a planned micro-batch; a filler consists of tail filler only.

        Raises `PlanError` if a segment cannot be divided into `2 * cp_size` equal chunks.
        """
        slots = np.asarray(micro_batch.slots, dtype=np.int64)
        tail = micro_batch.tokens - int(slots.sum())
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
            lengths=np.asarray(micro_batch.lengths - micro_batch.shared, np.int64),
            segments=segments,
            cp_size=cp_size,
            rectangle_rows=int(micro_batch.rows),
            prefix_lengths=micro_batch.shared if micro_batch.shared.any() else None,
            cuts=micro_batch.cuts if len(micro_batch.cuts) else None,
        )

    @property
    def samples(self) -> int:
        """Number of samples in the pack (0 for a filler)."""
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """Tokens of the pack, before context parallelism divides them."""
        return int(self.segments.sum())

    @cached_property
    def cu_seqlens(self) -> IntArray:
        """Starts of the segments and the end of the pack, [segments + 1]."""
        return np.concatenate([[0], np.cumsum(self.segments)]).astype(np.int64)

    @cached_property
    def pieces(self) -> Pieces:
        """Its segments, or what slices make of them."""
        if self.cuts is None:
            return Pieces(self.segments, np.arange(len(self.segments)), np.zeros_like(self.segments))
        edges = np.unique(np.concatenate([self.cu_seqlens, self.cuts]))
        segment = np.searchsorted(self.cu_seqlens, edges[:-1], side="right") - 1
        return Pieces(np.diff(edges), segment, edges[:-1] - self.cu_seqlens[segment])

    @cached_property
    def slices(self) -> tuple[PackSlice, ...]:
        """Its slices; one with all of it for a whole pack."""
        edges = [0, *([] if self.cuts is None else self.cuts.tolist()), self.tokens]
        return tuple(PackSlice(self, first, last) for first, last in itertools.pairwise(edges))

    @cached_property
    def segment_ids(self) -> IntArray:
        """Segment of each token, [tokens]."""
        return np.repeat(np.arange(len(self.segments), dtype=np.int64), self.segments)

    @cached_property
    def position_ids(self) -> IntArray:
        """Position of each token in its segment, [tokens]."""
        return np.arange(self.tokens, dtype=np.int64) - self.cu_seqlens[self.segment_ids]

    @cached_property
    def sequence_positions(self) -> IntArray:
        """Position of each token in its sample, [tokens]: that in its segment, after the shared prefix."""
        if self.prefix_lengths is None:
            return self.position_ids
        return self.position_ids + self._per_segment(self.prefix_lengths)[self.segment_ids]

    @cached_property
    def unshared(self) -> PackLayout:
        """Layout of the whole samples, without alignment, filler and context parallelism; itself without prefixes.

        Losses see this layout; `computed_tokens` leads from it to the tokens of the pack.
        """
        if self.prefix_lengths is None:
            return self
        whole = self.lengths + self.prefix_lengths
        return PackLayout(lengths=whole, segments=whole, cp_size=1)

    @cached_property
    def computed_tokens(self) -> IntArray:
        """Index in the pack of each token of `unshared`."""
        assert self.prefix_lengths is not None
        before, paths = np.zeros(0, np.int64), []
        for start, length, shared in zip(self.cu_seqlens, self.lengths, self.prefix_lengths, strict=False):
            before = np.concatenate([before[:shared], np.arange(start, start + length)])
            paths.append(before)
        return np.concatenate(paths)

    def prefix_of(self, sample: int) -> IntArray:
        """Indices in the pack of the shared prefix of a sample, [prefix_lengths[sample]]."""
        assert self.prefix_lengths is not None
        start = int(self.unshared.cu_seqlens[sample])
        return self.computed_tokens[start : start + int(self.prefix_lengths[sample])]

    @cached_property
    def runs(self) -> Runs:
        """Its segments, cut where shared prefixes end."""
        if self.prefix_lengths is None:
            return Runs(self.segments, np.full(len(self.segments), -1))
        sharing = np.flatnonzero(self.prefix_lengths)
        branches = np.array([self.prefix_of(sample)[-1] + 1 for sample in sharing.tolist()], np.int64)
        edges = np.unique(np.concatenate([self.cu_seqlens, branches]))
        parents = np.arange(-1, len(edges) - 2)
        first = np.searchsorted(edges, self.cu_seqlens[:-1])
        parents[first] = -1
        parents[first[sharing]] = np.searchsorted(edges, branches) - 1
        return Runs(np.diff(edges), parents)

    def _per_segment(self, per_sample: IntArray) -> IntArray:
        return np.concatenate([per_sample, np.zeros(len(self.segments) - self.samples, np.int64)])

    @cached_property
    def _used(self) -> IntArray:
        return self._per_segment(self.lengths)[self.segment_ids]

    @cached_property
    def real(self) -> BoolArray:
        """Whether a token belongs to a sample, and is not slot padding or filler, [tokens]."""
        return self.position_ids < self._used

    @cached_property
    def predicts(self) -> BoolArray:
        """Whether token i has a label, token i + 1 of the same sample, [tokens]."""
        return self.position_ids < self._used - 1

    @property
    def longest_sequence(self) -> int:
        """Positions of the longest segment, slot padding and shared prefix included."""
        prefixes = 0 if self.prefix_lengths is None else self._per_segment(self.prefix_lengths)
        return int((self.segments + prefixes).max())

    @property
    def longest_segment(self) -> int:
        """Longest segment, rounded up to a power of two.

        Megatron and TransformerEngine use it as a key of caches, so it is a Python int with few distinct values.
        """
        return 1 << (int(self.segments.max()) - 1).bit_length()

    def local_tokens(self, cp_rank: int) -> IntArray:
        """Indices in the pack of the tokens that `cp_rank` holds, in its order, [tokens / cp_size].

        Each piece is divided as in Megatron and TransformerEngine: of `2 * cp_size` equal chunks rank r holds chunks
        r and `2 * cp_size - 1 - r`, so that causal attention costs the same on all ranks.
        """
        if self.cp_size == 1:
            return np.arange(self.tokens, dtype=np.int64)
        lengths = self.pieces.lengths
        position = np.arange(self.tokens) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        chunk = position // np.repeat(lengths // (2 * self.cp_size), lengths)
        owner = np.minimum(chunk, 2 * self.cp_size - 1 - chunk)
        return np.flatnonzero(owner == cp_rank)

    def real_token_counts(self, cp_rank: int) -> IntArray:
        """Real tokens of each sample that `cp_rank` holds, [samples].

        They are the first of its tokens of the sample, before slot padding.
        """
        if self.cp_size == 1:
            return self.lengths
        if self.cuts is not None:
            local = self.local_tokens(cp_rank)
            counts: IntArray = np.bincount(self.segment_ids[local[self.real[local]]], minlength=self.samples)
            return counts
        chunk = self.segments[: self.samples] // (2 * self.cp_size)
        chunks = (cp_rank, 2 * self.cp_size - 1 - cp_rank)
        first, second = (np.clip(self.lengths - number * chunk, 0, chunk) for number in chunks)
        real: IntArray = first + second
        return real

    @cached_property
    def restore(self) -> IntArray:
        """Permutation from tokens concatenated over CP ranks to pack order, [tokens]."""
        if self.cp_size == 1:
            return np.arange(self.tokens, dtype=np.int64)
        return np.argsort(np.concatenate([self.local_tokens(rank) for rank in range(self.cp_size)]), kind="stable")

    def source(self, starts: IntArray) -> IntArray:
        """Index of each token in a flat ragged field, [tokens]; 0 for tokens that are not real.

        `starts` [samples] are the offsets of the samples in the flat field.
        """
        start = self._per_segment(np.asarray(starts, np.int64))[self.segment_ids]
        return np.where(self.real, start + self.sequence_positions, 0)


@dataclass(frozen=True)
class PackSlice:
    """Tokens `first` to `last` of a pack: what attention backends read of a slice, as of a `PackLayout`.

    Its queries attend to *visible* tokens of the pack: its own, and those before them from `visible_from` on.
    """

    pack: PackLayout
    first: int
    last: int

    @property
    def cp_size(self) -> int:
        """Context-parallel size."""
        return self.pack.cp_size

    @property
    def samples(self) -> int:
        """Number of samples of the pack; segments after them are filler."""
        return self.pack.samples

    @property
    def prefix_lengths(self) -> IntArray | None:
        """Those of the pack."""
        return self.pack.prefix_lengths

    def prefix_of(self, sample: int) -> IntArray:
        """`PackLayout.prefix_of`, counted among the visible tokens."""
        return self.pack.prefix_of(sample) - self.visible_from

    @cached_property
    def pieces(self) -> Pieces:
        """The pieces of the pack that lie in the slice."""
        every = self.pack.pieces
        start = np.cumsum(every.lengths) - every.lengths
        inside = (start >= self.first) & (start < self.last)
        return Pieces(*(values[inside] for values in every))

    @cached_property
    def visible_from(self) -> int:
        """First token of the pack that a query of the slice attends to, at the start of a segment."""
        first = int(self.pieces.segment[0])
        if self.prefix_lengths is not None:
            for sample in range(first, min(int(self.pieces.segment[-1]) + 1, self.samples)):
                if self.prefix_lengths[sample]:
                    first = min(first, int(self.pack.segment_ids[self.pack.prefix_of(sample)[0]]))
        return int(self.pack.cu_seqlens[first])

    @cached_property
    def cu_seqlens(self) -> IntArray:
        """Starts of all segments of the pack among the visible tokens, [segments + 1]; negative for earlier ones."""
        return self.pack.cu_seqlens - self.visible_from

    @cached_property
    def restore(self) -> IntArray:
        """Permutation from visible tokens concatenated over CP ranks to their order in the pack."""
        shards = [self.pack.local_tokens(rank) for rank in range(self.cp_size)]
        first, last = self.visible_from // self.cp_size, self.last // self.cp_size
        return np.argsort(np.concatenate([shard[first:last] for shard in shards]), kind="stable")

    @property
    def longest_segment(self) -> int:
        """As `PackLayout.longest_segment`, of its pieces."""
        return 1 << (int(self.pieces.lengths.max()) - 1).bit_length()

    @property
    def place(self) -> SlicePlace:
        """Where its tokens lie among those of a context-parallel rank: the same on all."""
        size = self.cp_size
        return SlicePlace(self.visible_from // size, self.first // size, self.last // size, self.pack.tokens // size)


class SlicePlace(NamedTuple):
    """A slice among the tokens that one context-parallel rank has of a pack."""

    visible_from: int
    """First token to which its queries attend."""
    first: int
    last: int
    """One past its last token."""
    tokens: int
    """Tokens of the pack on this rank."""
