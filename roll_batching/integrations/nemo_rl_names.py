"""NeMo-RL's API for packing and dynamic batching over our planner: packers, sharding, micro-batch iterators.

Bins become plans through `Plan.from_bins` or `plan_step`, which check the invariants of a plan. Imports no torch: a
batch is anything with the methods of `SampleBatch` that are used here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from roll_batching.errors import PlanError
from roll_batching.planning import Plan, PlanConstraints, pack_bins, packing_metrics, plan_step


class PackingAlgorithm(enum.Enum):
    """NeMo-RL's four packing algorithms."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"


class SequencePackingArgs(TypedDict):
    """Arguments of packing, as in the NeMo-RL document."""

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int


class DynamicBatchingArgs(TypedDict):
    """Arguments of dynamic batching, as in the NeMo-RL document."""

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str


class SequencePacker:
    """Packs lists of lengths into bins of `bin_capacity` tokens. Call `get_packer` to make one.

    `min_bin_count` and `bin_count_multiple` raise the number of bins: single sequences move from the bins with most
    sequences into new ones. `seed` is for first_fit_shuffle, and grows by one with every call. Raises `ValueError`
    (`PlanError` is one) for impossible arguments, a sequence above the capacity, too few sequences.
    """

    def __init__(
        self,
        algorithm: PackingAlgorithm,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        seed: int = 0,
    ) -> None:
        if isinstance(bin_capacity, bool) or not isinstance(bin_capacity, int | np.integer) or bin_capacity < 1:
            raise PlanError(f"bin_capacity={bin_capacity!r} must be a whole number of at least 1")
        if min_bin_count is not None and min_bin_count < 0:
            raise PlanError(f"min_bin_count={min_bin_count} must be at least 0")
        if bin_count_multiple is not None and bin_count_multiple < 1:
            raise PlanError(f"bin_count_multiple={bin_count_multiple} must be at least 1")
        self.algorithm = algorithm
        self.bin_capacity = bin_capacity
        self.collect_metrics = collect_metrics
        self.min_bin_count = min_bin_count
        self.bin_count_multiple = bin_count_multiple
        self.seed = seed
        self._collected: list[dict[str, float]] = []

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """Bins of indices into `sequence_lengths`; an empty list without sequences."""
        if not len(sequence_lengths):
            return []
        bins = pack_bins(sequence_lengths, self.bin_capacity, self.algorithm.value, seed=self.seed)
        if self.algorithm is PackingAlgorithm.FIRST_FIT_SHUFFLE:
            self.seed += 1
        bins = self._raise_count(bins, len(sequence_lengths))
        if self.collect_metrics:
            self._collected.append(self.compute_metrics(sequence_lengths, bins))
        return bins

    def compute_metrics(self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]]) -> dict[str, float]:
        """Fill, waste and number of these bins (`packing_metrics`)."""
        return packing_metrics(sequence_lengths, bins, self.bin_capacity)

    def get_aggregated_metrics(self) -> dict[str, float]:
        """Mean of every metric over the calls since the last reset; empty without `collect_metrics`."""
        if not self._collected:
            return {}
        return {name: float(np.mean([metrics[name] for metrics in self._collected])) for name in self._collected[0]}

    def reset_metrics(self) -> None:
        """Drops the collected metrics."""
        self._collected.clear()

    def _raise_count(self, bins: list[list[int]], sequences: int) -> list[list[int]]:
        target = max(len(bins), self.min_bin_count or 0)
        multiple = self.bin_count_multiple or 1
        target = -(-target // multiple) * multiple
        if sequences < target:
            raise PlanError(
                f"Cannot create {target} bins with only {sequences} sequences: every bin needs one. Lower "
                "min_bin_count or bin_count_multiple, or give more sequences"
            )
        bins = [list(members) for members in bins]
        while len(bins) < target:
            largest = max(range(len(bins)), key=lambda i: (len(bins[i]), -i))
            bins.append([bins[largest].pop()])
        return bins


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    seed: int = 0,
) -> SequencePacker:
    """The packer of an enum member or of its name, in any case. Raises `ValueError` for an unknown one."""
    if isinstance(algorithm, str):
        known = {member.name: member for member in PackingAlgorithm}
        if algorithm.upper() not in known:
            raise PlanError(
                f"algorithm={algorithm!r} is unknown; choose one of {', '.join(m.value for m in PackingAlgorithm)}"
            )
        algorithm = known[algorithm.upper()]
    if not isinstance(algorithm, PackingAlgorithm):
        raise PlanError(f"algorithm={algorithm!r} is unknown: pass a PackingAlgorithm or its name")
    return SequencePacker(algorithm, bin_capacity, collect_metrics, min_bin_count, bin_count_multiple, seed)


@dataclass(frozen=True)
class ShardedBatch:
    """The samples of one data-parallel rank in plan order, and the plans of all chunks."""

    batch: Any
    """A `SampleBatch` of this rank's samples, by chunk and micro-batch."""
    plans: tuple[Plan, ...]
    """One plan per chunk (optimizer step), the same on all shards; empty without packing and batching."""
    rank: int

    def chunk_rows(self, chunk: int) -> range:
        """The rows of one chunk in `batch`."""
        sizes = [len(plan.rank_samples(self.rank)) for plan in self.plans]
        return range(sum(sizes[:chunk]), sum(sizes[: chunk + 1]))


def shard_by_batch_size(
    batch: Any,
    shards: int,
    batch_size: int | None = None,
    allow_uneven_shards: bool = False,
    dynamic_batching_args: Mapping[str, Any] | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
) -> tuple[list[ShardedBatch], NDArray[np.int64]]:
    """(Shards of `batch`, row in `batch` of every row of the shards, one shard after the other).

    The batch is cut into chunks of `batch_size` samples (None: one chunk), one per optimizer step. Without packing and
    dynamic batching, a chunk is cut in the order of its samples. Sizes must divide; with `allow_uneven_shards` the last
    chunk and the shards may differ in size, and fillers keep the numbers of micro-batches equal. Sorting by the
    returned indices restores the order of `batch`. Raises `PlanError` for sizes that do not divide, and for
    both arguments.
    """
    if dynamic_batching_args is not None and sequence_packing_args is not None:
        raise PlanError("dynamic_batching_args and sequence_packing_args exclude each other; give one")
    for name, count in (("shards", shards), ("batch_size", batch_size)):
        if count is not None and count < 1:
            raise PlanError(f"{name}={count} must be at least 1")
    for key in ("max_tokens_per_microbatch", *(("algorithm",) if sequence_packing_args is not None else ())):
        arguments = sequence_packing_args or dynamic_batching_args
        if arguments is not None and key not in arguments:
            raise PlanError(f"{key} is missing in the arguments of packing or dynamic batching: add it")
    total = len(batch)
    size = total if batch_size is None else batch_size
    if not allow_uneven_shards and (size % shards or total % size):
        raise PlanError(
            f"{total} samples in chunks of {size} cannot be cut evenly over {shards} shards; choose sizes that "
            "divide, or allow_uneven_shards=True"
        )
    lengths = np.asarray(batch.lengths, dtype=np.int64)
    rows_of_ranks: list[list[NDArray[np.int64]]] = [[] for _ in range(shards)]
    plans: list[Plan] = []
    for first in range(0, total, size):
        chunk = np.arange(first, min(first + size, total))
        if dynamic_batching_args is None and sequence_packing_args is None:
            for rank, part in enumerate(np.array_split(chunk, shards)):
                rows_of_ranks[rank].append(part)
            continue
        if sequence_packing_args is not None:
            plan = _pack_chunk(lengths[chunk], shards, sequence_packing_args, allow_uneven_shards)
        else:
            assert dynamic_batching_args is not None
            plan = _batch_chunk(lengths[chunk], shards, dynamic_batching_args)
        plans.append(plan)
        for rank in range(shards):
            rows_of_ranks[rank].append(chunk[plan.rank_samples(rank)])
    rows = [np.concatenate(parts) for parts in rows_of_ranks]
    sharded = [ShardedBatch(batch.select(part), tuple(plans), rank) for rank, part in enumerate(rows)]
    return sharded, np.concatenate(rows)


def _pack_chunk(lengths: NDArray[np.int64], shards: int, args: Mapping[str, Any], allow_uneven: bool) -> Plan:
    """NeMo-RL's placement: the bins of its packer, dealt to ranks in turn."""
    multiple = int(args.get("sequence_length_pad_multiple", 1))
    cap = int(args["max_tokens_per_microbatch"])
    aligned = -(-lengths // multiple) * multiple
    few = allow_uneven and len(lengths) < shards
    packer = get_packer(
        args["algorithm"],
        cap,
        min_bin_count=None if few else shards,
        bin_count_multiple=None if few else shards,
    )
    bins = packer.pack(aligned.tolist())
    bins += [[] for _ in range(-len(bins) % shards)]
    constraints = PlanConstraints(
        dp_size=shards, max_tokens=cap, algorithm=packer.algorithm.value, sequence_multiple=multiple
    )
    ranks = [bins[rank::shards] for rank in range(shards)]
    if microbatch_order(args.get("microbatch_order")) == "largest_first":
        ranks = [sorted(dealt, key=lambda members: -int(aligned[members].sum()) if members else 0) for dealt in ranks]
    return Plan.from_bins(ranks, lengths, constraints)


def microbatch_order(order: Any) -> str:
    """A valid `microbatch_order`, "packer" for None. Raises `PlanError` for an unknown one."""
    if order not in (None, "packer", "largest_first"):
        raise PlanError(f"microbatch_order={order!r} is unknown; choose packer or largest_first")
    return order or "packer"


def _batch_chunk(lengths: NDArray[np.int64], shards: int, args: Mapping[str, Any]) -> Plan:
    constraints = PlanConstraints(
        dp_size=shards,
        mode="dynamic",
        algorithm="nemo_rl",
        max_tokens=int(args["max_tokens_per_microbatch"]),
        sequence_length_round=int(args.get("sequence_length_round", 1)),
        shared_shapes=True,
    )
    return plan_step(lengths, constraints)


def make_microbatch_iterator_for_packable_sequences(shard: ShardedBatch, chunk: int = 0) -> Iterator[Any]:
    """The samples of each micro-batch of one chunk, for one pack each; a filler is an empty batch."""
    return (samples for samples, _ in _micro_batches(shard, chunk))


def make_microbatch_iterator_with_dynamic_shapes(shard: ShardedBatch, chunk: int = 0) -> Iterator[dict[str, Any]]:
    """Each micro-batch of one chunk as tensors by field name, padded to the length in its plan.

    Token fields become `[rows, length, ...]`; other fields are unchanged.
    """
    for samples, length in _micro_batches(shard, chunk):
        yield {
            name: samples.to_padded(name, length) if spec.kind in ("token", "next_token") else samples[name]
            for name, spec in samples.schema.items()
        }


def _micro_batches(shard: ShardedBatch, chunk: int) -> Iterator[tuple[Any, int]]:
    """Samples and padded length of each micro-batch of one chunk."""
    if not shard.plans:
        raise PlanError("this batch was sharded without packing or dynamic batching: it has no micro-batches")
    first = shard.chunk_rows(chunk).start
    for mb in shard.plans[chunk].micro_batches[shard.rank]:
        yield shard.batch.select(np.arange(first, first + len(mb))), mb.padded_length
        first += len(mb)
