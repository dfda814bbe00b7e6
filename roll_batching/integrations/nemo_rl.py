"""NeMo-RL with our planner: a packer under the name `roll_batching`, and the cuts of dynamic batching.

Import this module in the run script, and name the packer in the YAML:

    policy: {sequence_packing: {enabled: true, algorithm: roll_batching}}

It replaces `get_packer`, which gives NeMo-RL's packers for all other names. NeMo-RL deals bins to ranks in turn
(`bins[shard::shards]`), so bins ordered by index and then by rank carry the whole plan: which samples share a
micro-batch, on which rank, in which order. Kept of NeMo-RL: the number of bins is a multiple of the shards, none is
empty, too few sequences are a ValueError.

`BatchedDataDict.shard_by_batch_size` with `dynamic_batching_args` keeps NeMo-RL's shards and order of samples. All
ranks cut them at the same positions, now into the fewest micro-batches, and of these into those with the fewest tokens.

Source: nemo_rl/data/packing/algorithms.py, nemo_rl/distributed/batched_data_dict.py at 7ea279a.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.integrations.host_plans import cut_rectangles, plan_level_totals
from roll_batching.integrations.replacement import Integration, Replacement
from roll_batching.planning import PlanConstraints, SharedPrefixes
from roll_batching.planning.batching_spec import Objective

WITH_PREFIXES = "roll_batching_prefixes"
OBJECTIVES: dict[str, Objective] = {
    "roll_batching": "lockstep",
    "roll_batching_rank_totals": "auto",
    WITH_PREFIXES: "lockstep",
}
"""Names in `policy.sequence_packing.algorithm`, and what their plans level.

`WITH_PREFIXES` plans for workers that compute common prefixes of a bin once (`integrations.nemo_rl_prefixes`).

DTensor workers gather parameters layer by layer, and experts are exchanged in every layer: ranks meet at every
micro-batch. Ranks of a dense model in Megatron meet once per step. `get_packer` does not see which of them trains.
"""

_chunks: ContextVar[Iterator[SharedPrefixes] | None] = ContextVar(
    "prefixes of the chunks that are packed", default=None
)
"""`get_packer`'s packers see lengths only; `shard_by_batch_size` has the samples."""


def get_packer(
    algorithm: Any,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> Any:
    """Returns our packer for a name in `OBJECTIVES`, otherwise NeMo-RL's packer."""
    limits = {"min_bin_count": min_bin_count, "bin_count_multiple": bin_count_multiple}
    name = str(algorithm).lower()
    if name not in OBJECTIVES:
        return _NEMO_RL.original(_GET_PACKER)(algorithm, bin_capacity, collect_metrics, **limits)
    return _packer_class(OBJECTIVES[name])(bin_capacity, collect_metrics=collect_metrics, **limits)


def plan_bins(
    lengths: Sequence[int],
    capacity: int,
    ranks: int,
    least: int = 1,
    objective: Objective = "lockstep",
    prefixes: SharedPrefixes | None = None,
) -> list[list[int]]:
    """Plans for `ranks` and returns the bins: bin k * ranks + r is the k-th micro-batch of rank r.

    `least`: smallest number of bins. `prefixes`: what samples of a bin compute once; `capacity` counts whole samples.
    Raises ValueError for sequences that are too long or too few, as NeMo-RL does.
    """
    try:
        constraints = PlanConstraints(
            dp_size=ranks,
            max_tokens=capacity,
            min_num_micro_batches=max(1, -(-least // ranks)),
            fillers=False,
            objective=objective,
            cap_counts_shared=True,
        )
        plan = plan_level_totals(lengths, constraints, prefixes=prefixes)
    except PlanError as error:
        raise ValueError(str(error)) from None
    return [
        plan.micro_batches[rank][k].samples.tolist() for k in range(plan.num_micro_batches) for rank in range(ranks)
    ]


def shard_by_batch_size(
    self: Any,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    dynamic_batching_args: Any = None,
    sequence_packing_args: Any = None,
) -> Any:
    """NeMo-RL's shards; with dynamic batching, micro-batches are cut by `cut_rectangles`, the same on all shards.

    Raises AssertionError where NeMo-RL does.
    """
    original = _NEMO_RL.original(_SHARD_BY_BATCH_SIZE)
    packing = sequence_packing_args or {}
    reads_prefixes = str(packing.get("algorithm", "")).lower() == WITH_PREFIXES
    token = _chunks.set(_prefixes_of_chunks(self, batch_size, packing) if reads_prefixes else None)
    try:
        sharded = original(self, shards, batch_size, allow_uneven_shards, dynamic_batching_args, sequence_packing_args)
    finally:
        _chunks.reset(token)
    if dynamic_batching_args is None:
        return sharded
    aggregated, order = sharded
    num_chunks = len(aggregated[0].micro_batch_indices)
    key, cap = dynamic_batching_args["input_lengths_key"], dynamic_batching_args["max_tokens_per_microbatch"]
    multiple = dynamic_batching_args["sequence_length_round"]
    longest_by_place = np.max([np.asarray(shard[key]) for shard in aggregated], axis=0)
    padded_width = self[dynamic_batching_args["input_key"]].shape[1]
    widths = np.minimum(-(-longest_by_place // multiple) * multiple, padded_width).reshape(num_chunks, -1)
    cuts = [cut_rectangles(chunk_widths, cap) for chunk_widths in widths]
    for shard in aggregated:
        shard.micro_batch_indices = [[list(cut) for cut in chunk_cuts] for chunk_cuts in cuts]
        shard.micro_batch_lengths = [
            [int(chunk_widths[first:end].max()) for first, end in chunk_cuts]
            for chunk_widths, chunk_cuts in zip(widths, cuts, strict=True)
        ]
    return aggregated, order


def _prefixes_of_chunks(batch: Any, size: int | None, packing: Mapping[str, Any]) -> Iterator[SharedPrefixes]:
    """What the samples share in each chunk of `size` samples of a BatchedDataDict, in order."""
    ids, lengths = batch[packing["input_key"]], [int(length) for length in batch[packing["input_lengths_key"]]]
    for first in range(0, len(lengths), size or max(len(lengths), 1)):
        chunk = slice(first, first + (size or len(lengths)))
        rows = [row[:length].cpu().numpy() for row, length in zip(ids[chunk], lengths[chunk], strict=True)]
        yield SharedPrefixes.of(np.concatenate(rows), lengths[chunk])


def _packer_class(objective: Objective) -> type:
    """Makes the class of our packer, a subclass of NeMo-RL's `SequencePacker`: it needs NeMo-RL to be imported."""
    from nemo_rl.data.packing.algorithms import SequencePacker

    class PlannedPacker(SequencePacker):  # type: ignore[misc]
        """Bins of one plan over all shards."""

        def _pack_implementation(self, sequence_lengths: list[int]) -> list[list[int]]:
            if not sequence_lengths:
                return []
            ranks, least = self.bin_count_multiple or 1, self.min_bin_count or 1
            chunks = _chunks.get()
            prefixes = None if chunks is None else next(chunks)
            return plan_bins(sequence_lengths, self.bin_capacity, ranks, least, objective, prefixes)

    return PlannedPacker


_GET_PACKER = Replacement(
    module="nemo_rl.data.packing.algorithms",
    name="get_packer",
    by=get_packer,
)
_SHARD_BY_BATCH_SIZE = Replacement(
    module="nemo_rl.distributed.batched_data_dict",
    name="BatchedDataDict.shard_by_batch_size",
    by=shard_by_batch_size,
)

_NEMO_RL = Integration(
    "NeMo-RL", _GET_PACKER, _SHARD_BY_BATCH_SIZE, package="nemo_rl", distribution="nemo-rl", tried=("7ea279a",)
)
patch, unpatch = _NEMO_RL.patch, _NEMO_RL.unpatch
patch()
