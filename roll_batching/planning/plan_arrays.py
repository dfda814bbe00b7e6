"""Flat arrays of a plan, with one entry per sample, placed sample or micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.planning.arrays import Flags, Ints
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.pack_blocks import PackBlocks


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
