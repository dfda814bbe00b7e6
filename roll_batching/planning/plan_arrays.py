"""Flat arrays of a plan, with one entry per sample, placed sample or micro-batch; and the blocks of its packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Flags, Ints, as_ints
from roll_batching.planning.constraints import PlanConstraints


@dataclass(frozen=True)
class DroppedSample:
    """Sample that a plan leaves out, with the reason."""

    index: int
    id: int
    length: int
    reason: str


@dataclass(frozen=True, eq=False)
class PlanArrays:
    """Data of a plan, in read-only arrays.

    Micro-batch arrays are rank-major: micro-batch k of rank r has the index `r * num_micro_batches + k`. With `blocks`
    they have one entry per pack, in the order of the blocks.
    """

    constraints: PlanConstraints
    num_micro_batches: int
    """K, the same on every rank; with `blocks`, the largest number of a rank."""
    group_size: int | None
    """Megatron's `microbatch_group_size_per_vp_stage`; None without interleaving."""
    lengths: Ints
    """int64[n]: lengths before truncation."""
    ids: Ints
    """int64[n]: global id of each sample."""
    location: Ints | None
    """int64[n] or None: DP rank that holds the data of each sample; not used for planning."""
    used: Ints
    """int64[n]: tokens used of each sample."""
    samples: Ints
    """int64[placed]: sample indices, micro-batch by micro-batch."""
    shared: Ints
    """int64[placed]: leading positions that each entry of `samples` takes from the entry before it, in the same
    micro-batch; 0 where it computes all its tokens (see `prefixes`)."""
    slots: Ints
    """int64[placed]: tokens of the slot of each entry of `samples`."""
    offsets: Ints
    """int64[dp*K + 1]: micro-batch m holds entries `offsets[m]` to `offsets[m + 1]`."""
    tokens: Ints
    """int64[dp*K]: computed tokens of each micro-batch."""
    rows: Ints
    """int64[dp*K]: rows of each micro-batch (1 for packs and fillers)."""
    costs: Ints
    """int64[dp*K]: scaled cost of the samples of each micro-batch, without the fixed cost."""
    sample_costs: Ints
    """int64[n]: cost of what each sample computes itself, scaled as `costs`."""
    dropped: tuple[DroppedSample, ...] = ()
    blocks: PackBlocks | None = None
    """Ranks of each pack, where each has its own context-parallel size; None: all have the layout's."""
    slices: PackSlices | None = None
    """Where packs are cut, for a pipeline whose unit is a slice; None: whole packs."""
    chunk_shares: tuple[float, ...] | None = None
    """Cost of each model chunk of the pipeline over the mean of all, in the order of the layers; None: all cost the
    same."""

    def __post_init__(self) -> None:
        for name in (*ARRAYS, "location"):
            array = getattr(self, name)
            if array is not None:
                array.setflags(write=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [getattr(self, name) for name in (*ARRAYS, "location")]
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def fillers(self) -> Flags:
        """bool[dp*K]: micro-batches without a sample."""
        empty: Flags = np.diff(self.offsets) == 0
        return empty

    @property
    def cp_sizes(self) -> Ints:
        """int64[micro-batches]: context-parallel size of each."""
        if self.blocks is not None:
            return self.blocks.cp_sizes
        return np.full(len(self.tokens), self.constraints.cp_size, dtype=np.int64)

    def by_rank(self, values: Ints) -> Ints:
        """Values of micro-batches as a table, int64[dp, K]; 0 where a rank has fewer than K.

        With `blocks` each rank of a pack gets its share, the value divided by the context-parallel size.
        """
        ranks = self.constraints.dp_size
        if self.blocks is None:
            return values.reshape(ranks, self.num_micro_batches)
        table = np.zeros((ranks, self.num_micro_batches), dtype=np.int64)
        shares = values // self.blocks.cp_sizes
        for rank, packs in enumerate(self.blocks.lists):
            table[rank, : len(packs)] = shares[packs]
        return table


ARRAYS = ("lengths", "ids", "used", "samples", "shared", "slots", "offsets", "tokens", "rows", "costs", "sample_costs")
"""Names of the arrays, without `location`, which may be None."""


# ---- slices of packs


@dataclass(frozen=True, eq=False)
class PackSlices:
    """Where packs are cut along the sequence; micro-batch m has the cuts `offsets[m]` to `offsets[m + 1]`."""

    offsets: Ints
    """int64[micro-batches + 1]"""
    cuts: Ints
    """int64[cuts]: first token of each slice but the first, counted in its pack."""
    costs: Ints
    """int64[micro-batches + cuts]: scaled cost of each slice, those of a micro-batch together."""

    def __post_init__(self) -> None:
        for name in SLICE_ARRAYS:
            getattr(self, name).setflags(write=False)

    def of(self, micro_batch: int) -> Ints:
        """Cuts of a micro-batch, int64[slices - 1]."""
        return self.cuts[self.offsets[micro_batch] : self.offsets[micro_batch + 1]]

    @property
    def counts(self) -> Ints:
        """int64[micro-batches]: slices of each."""
        counts: Ints = np.diff(self.offsets) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        return {name: getattr(self, name).tolist() for name in SLICE_ARRAYS}

    @classmethod
    def from_dict(cls, values: Any) -> PackSlices:
        """Slices from `to_dict`; raises `PlanError` for other values."""
        if not isinstance(values, dict) or sorted(values) != sorted(SLICE_ARRAYS):
            raise PlanError(f"the slices of this plan must have {', '.join(SLICE_ARRAYS)}: pass PackSlices.to_dict()")
        return cls(**{name: as_ints(values[name], f"slices.{name}", np.size(values[name])) for name in values})


SLICE_ARRAYS = ("offsets", "cuts", "costs")
"""Names of the arrays."""


def check_slices(slices: PackSlices, tokens: Ints, unit: int) -> None:
    """Raise `PlanError` unless cuts lie inside of their packs of `tokens`, rise, and are multiples of `unit`."""
    offsets, cuts = slices.offsets, slices.cuts
    count = len(tokens)
    fits = len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == len(cuts) == len(slices.costs) - count
    if not fits or (np.diff(offsets) < 0).any():
        raise PlanError(
            f"slices has {len(offsets)} offsets, {len(cuts)} cuts and {len(slices.costs)} costs for {count} "
            "micro-batches: load what Plan.to_dict returned"
        )
    pack = np.repeat(np.arange(len(tokens)), np.diff(offsets))
    after = np.append(cuts, 0)[1:]
    after[offsets[1:][np.diff(offsets) > 0] - 1] = tokens[np.diff(offsets) > 0]
    wrong = np.flatnonzero((cuts < 1) | (cuts % unit != 0) | (cuts >= after))
    if len(wrong):
        m = int(pack[wrong[0]])
        raise PlanError(
            f"micro-batch {m} of {tokens[m]} tokens is cut at {slices.of(m).tolist()[:8]}: cuts must rise, lie inside "
            f"of the pack, and be multiples of {unit}"
        )


# ---- blocks of ranks
#
# A block is `cp_size` consecutive DP ranks, from a multiple of `cp_size` on. Blocks are nested: two of them are
# disjoint, or one contains the other. All ranks of a block compute a pack at the same index of their lists. So every
# list follows one global order (by index, then by first rank): ranks never wait for each other in a circle, also in
# pipelines.


NANOSECONDS = 1e9


@dataclass(frozen=True, eq=False)
class PackBlocks:
    """Ranks of each pack, int64[packs], in the order of (index, first rank), and predicted times of the step."""

    first_ranks: Ints
    cp_sizes: Ints
    times: Ints
    """Predicted nanoseconds of each pack on one pipeline stage, forward and backward; 0: not predicted."""
    step_time: int = 0
    """Predicted nanoseconds of the step, without the optimizer; 0: not predicted."""
    fixed_cp_size: int = 1
    """The single context-parallel size with the shortest predicted step."""
    fixed_step_time: int = 0
    """Predicted nanoseconds of the step with `fixed_cp_size`; 0: not predicted."""

    def __post_init__(self) -> None:
        for name in BLOCK_ARRAYS:
            getattr(self, name).setflags(write=False)

    def __len__(self) -> int:
        return len(self.first_ranks)

    @cached_property
    def lists(self) -> list[list[int]]:
        """Packs of each rank, in the order of execution; ranks after the last pack's are not listed."""
        lists: list[list[int]] = [[] for _ in range(int((self.first_ranks + self.cp_sizes).max(initial=0)))]
        for pack, (first, size) in enumerate(zip(self.first_ranks.tolist(), self.cp_sizes.tolist(), strict=True)):
            for rank in range(first, first + size):
                lists[rank].append(pack)
        return lists

    @cached_property
    def sizes(self) -> list[int]:
        """Context-parallel sizes above 1 that occur, ascending."""
        return [int(size) for size in np.unique(self.cp_sizes) if size > 1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values by field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {name: values[name].tolist() for name in BLOCK_ARRAYS}

    @classmethod
    def from_dict(cls, values: Any) -> PackBlocks:
        """Blocks from `to_dict`; raises `PlanError` for other values."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise PlanError(f"the blocks of this plan must have {', '.join(names)}: pass PackBlocks.to_dict()")
        restored: dict[str, Any] = {
            name: as_ints(values[name], f"blocks.{name}", np.size(values[name]))
            if name in BLOCK_ARRAYS
            else int(as_ints([values[name]], f"blocks.{name}", 1)[0])
            for name in names
        }
        return cls(**restored)


BLOCK_ARRAYS = ("first_ranks", "cp_sizes", "times")
"""Names of the arrays."""


def sort_blocks(first_ranks: Ints, cp_sizes: Ints) -> Ints:
    """Order of packs by (index, first rank), int64[packs], from packs in any order that their ranks follow."""
    ends = np.zeros(int((first_ranks + cp_sizes).max(initial=0)), dtype=np.int64)
    index = np.zeros(len(first_ranks), dtype=np.int64)
    for pack, (first, size) in enumerate(zip(first_ranks.tolist(), cp_sizes.tolist(), strict=True)):
        index[pack] = ends[first : first + size].max()
        ends[first : first + size] = index[pack] + 1
    order: Ints = np.lexsort((first_ranks, index)).astype(np.int64)
    return order


def check_blocks(blocks: PackBlocks, ranks: int, largest: int) -> None:
    """Raise `PlanError` unless all ranks have a pack, and blocks are aligned and at one index of all their ranks."""
    sizes, firsts = blocks.cp_sizes, blocks.first_ranks
    if not (len(firsts) == len(sizes) == len(blocks.times)):
        raise PlanError(f"blocks has {len(firsts)} first_ranks, {len(sizes)} cp_sizes and {len(blocks.times)} times")
    legal = (sizes >= 1) & (sizes <= largest) & (sizes & (sizes - 1) == 0)
    wrong = np.flatnonzero(~legal | (firsts < 0) | (firsts % np.maximum(sizes, 1) != 0) | (firsts + sizes > ranks))
    if len(wrong):
        pack = int(wrong[0])
        raise PlanError(
            f"a pack is on {sizes[pack]} ranks from rank {firsts[pack]} on: context-parallel sizes are powers of two "
            f"up to max_cp_size={largest}, and a block begins at a multiple of its size below dp_size={ranks}"
        )
    lists = blocks.lists
    idle = [rank for rank in range(ranks) if rank >= len(lists) or not lists[rank]]
    if idle:
        raise PlanError(f"ranks {idle[:8]} have no micro-batch: give them fillers")
    position = [{pack: index for index, pack in enumerate(packs)} for packs in lists]
    for pack, (first, size) in enumerate(zip(firsts.tolist(), sizes.tolist(), strict=True)):
        places = {position[rank][pack] for rank in range(first, first + size)}
        if len(places) > 1:
            raise PlanError(
                f"the pack of ranks {first} to {first + size - 1} is micro-batch {min(places)} of one of them and "
                f"{max(places)} of another: all ranks of a pack compute it at the same index"
            )


def blocks_of_bins(bins: Sequence[Sequence[Ints]]) -> tuple[list[Ints], Ints, Ints]:
    """(members, first rank, size) of each pack of `bins[dp_rank][k]`, by index, then by first rank.

    Consecutive ranks with the same samples at an index compute one pack together.
    """
    members: list[Ints] = []
    firsts: list[int] = []
    sizes: list[int] = []
    for k in range(max(map(len, bins))):
        previous: Ints | None = None
        for rank, row in enumerate(bins):
            if k >= len(row):
                previous = None
            elif previous is not None and len(row[k]) and np.array_equal(row[k], previous):
                sizes[-1] += 1
            else:
                previous = row[k]
                members.append(previous)
                firsts.append(rank)
                sizes.append(1)
    return members, np.array(firsts, dtype=np.int64), np.array(sizes, dtype=np.int64)
