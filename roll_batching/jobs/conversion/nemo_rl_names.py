"""NeMo-RL's names over our planner: packers, sharding of a batch, micro-batch iterators, YAML sections.

Thin: bins become plans through `Plan.from_bins` or `plan_step`, and so obey the plan's invariants. Needs no
torch; the batch that is sharded is duck-typed (`SampleBatch`).
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
    """The four packers."""

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
    """Packs lists of lengths into bins of `bin_capacity`; made by `get_packer`.

    `min_bin_count` and `bin_count_multiple` ask for more bins: the fullest ones then hand out single
    sequences. `seed` serves first_fit_shuffle and grows by one with every call. Raises `ValueError`
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
        """Bins of indices into `sequence_lengths`; none for no sequences."""
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
        """`packing_metrics` of these bins."""
        return packing_metrics(sequence_lengths, bins, self.bin_capacity)

    def get_aggregated_metrics(self) -> dict[str, float]:
        """The mean of every metric over the calls since the last reset; empty when none was collected."""
        if not self._collected:
            return {}
        return {name: float(np.mean([one[name] for one in self._collected])) for name in self._collected[0]}

    def reset_metrics(self) -> None:
        """Forget the collected metrics."""
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
            fullest = max(range(len(bins)), key=lambda i: (len(bins[i]), -i))
            bins.append([bins[fullest].pop()])
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
    """A packer by enum member or by its name in any case; `ValueError` for an unknown one."""
    if isinstance(algorithm, str):
        known = {member.name: member for member in PackingAlgorithm}
        if algorithm.upper() not in known:
            raise PlanError(
                f"algorithm={algorithm!r} is unknown; choose one of {', '.join(m.value for m in PackingAlgorithm)}"
            )
        algorithm = known[algorithm.upper()]
    if not isinstance(algorithm, PackingAlgorithm):
        raise PlanError(f"algorithm={algorithm!r} is no PackingAlgorithm and no name of one")
    return SequencePacker(algorithm, bin_capacity, collect_metrics, min_bin_count, bin_count_multiple, seed)


@dataclass(frozen=True)
class ShardedBatch:
    """One shard (data-parallel rank) of a batch: its rows in plan order, and the plans of all chunks."""

    batch: Any
    """A `SampleBatch` with this shard's samples, chunk by chunk, micro-batch by micro-batch."""
    plans: tuple[Plan, ...]
    """One plan per chunk (optimizer step), the same on all shards; empty without packing and batching."""
    rank: int

    def chunk_rows(self, chunk: int) -> range:
        """Rows of `batch` that belong to one chunk."""
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
    """Shards of `batch`, and the row of `batch` behind every row of the shards, shard after shard.

    The batch is cut into chunks of `batch_size` samples (None: one chunk), each an optimizer step. Without
    either argument a chunk is cut in order. `allow_uneven_shards` admits a last chunk, and shards, of
    other sizes (fillers keep the counts equal); otherwise sizes must divide. To undo the order, sort the
    rows by the returned indices. Raises `PlanError` for sizes that do not divide, or both arguments at once.
    """
    if dynamic_batching_args is not None and sequence_packing_args is not None:
        raise PlanError("dynamic_batching_args and sequence_packing_args exclude each other; give one")
    for name, count in (("shards", shards), ("batch_size", batch_size)):
        if count is not None and count < 1:
            raise PlanError(f"{name}={count} must be at least 1")
    for key in ("max_tokens_per_microbatch", *(("algorithm",) if sequence_packing_args is not None else ())):
        given = sequence_packing_args or dynamic_batching_args
        if given is not None and key not in given:
            raise PlanError(f"{key} is missing in the arguments of packing or dynamic batching")
    total = len(batch)
    size = total if batch_size is None else batch_size
    if not allow_uneven_shards and (size % shards or total % size):
        raise PlanError(
            f"{total} samples in chunks of {size} cannot be cut evenly over {shards} shards; choose sizes that "
            "divide, or allow_uneven_shards=True"
        )
    lengths = np.asarray(batch.lengths, dtype=np.int64)
    rows: list[list[NDArray[np.int64]]] = [[] for _ in range(shards)]
    plans: list[Plan] = []
    for first in range(0, total, size):
        chunk = np.arange(first, min(first + size, total))
        if dynamic_batching_args is None and sequence_packing_args is None:
            for rank, part in enumerate(np.array_split(chunk, shards)):
                rows[rank].append(part)
            continue
        if sequence_packing_args is not None:
            plan = _pack_chunk(lengths[chunk], shards, sequence_packing_args, allow_uneven_shards)
        else:
            assert dynamic_batching_args is not None
            plan = _batch_chunk(lengths[chunk], shards, dynamic_batching_args)
        plans.append(plan)
        for rank in range(shards):
            rows[rank].append(chunk[plan.rank_samples(rank)])
    order = [np.concatenate(parts) for parts in rows]
    made = [ShardedBatch(batch.select(part), tuple(plans), rank) for rank, part in enumerate(order)]
    return made, np.concatenate(order)


def _pack_chunk(lengths: NDArray[np.int64], shards: int, args: Mapping[str, Any], allow_uneven: bool) -> Plan:
    """NeMo-RL's own placement: its packer's bins, dealt round-robin."""
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
    if _order(args.get("microbatch_order")) == "largest_first":
        ranks = [sorted(dealt, key=lambda members: -int(aligned[members].sum()) if members else 0) for dealt in ranks]
    return Plan.from_bins(ranks, lengths, constraints)


def _order(order: Any) -> str:
    """`microbatch_order`, by default the packer's."""
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
    """The samples of each micro-batch of one chunk, to be packed together; a filler is an empty batch."""
    return (piece for piece, _ in _pieces(shard, chunk))


def make_microbatch_iterator_with_dynamic_shapes(shard: ShardedBatch, chunk: int = 0) -> Iterator[dict[str, Any]]:
    """Each micro-batch of one chunk as padded tensors by field name, as wide as its own plan says.

    Token fields become `[rows, length, ...]`; other fields stay as they are.
    """
    for piece, length in _pieces(shard, chunk):
        yield {
            name: piece.to_padded(name, length) if spec.kind in ("token", "next_token") else piece[name]
            for name, spec in piece.schema.items()
        }


def _pieces(shard: ShardedBatch, chunk: int) -> Iterator[tuple[Any, int]]:
    """Micro-batches of one chunk as sub-batches, with their padded lengths."""
    if not shard.plans:
        raise PlanError("this batch was sharded without packing or dynamic batching: it has no micro-batches")
    first = shard.chunk_rows(chunk).start
    for mb in shard.plans[chunk].micro_batches[shard.rank]:
        yield shard.batch.select(np.arange(first, first + len(mb))), mb.padded_length
        first += len(mb)


def convert_policy(policy: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our worker keys for NeMo-RL's `policy` section, and a notice for every key that means something else.

    Reads `sequence_packing`, `dynamic_batching` and `make_sequence_length_divisible_by`. Raises `PlanError`
    when both are enabled, or a budget is missing or no number (such as an unresolved `${mul:...}`).
    """
    packing, batching = _section(policy, "sequence_packing"), _section(policy, "dynamic_batching")
    use_packing = bool(packing.pop("enabled", False))
    use_batching = bool(batching.pop("enabled", False))
    if use_packing and use_batching:
        raise PlanError("sequence_packing and dynamic_batching are both enabled; NeMo-RL and we allow one")
    notices = []
    result: dict[str, Any] = {"use_sequence_packing": use_packing}
    if use_packing:
        train, forward = _budgets("sequence_packing", packing)
        result["sequence_packing_args"] = {
            "algorithm": packing.pop("algorithm", "modified_first_fit_decreasing"),
            "max_packed_sequence_length_train": train,
            "max_packed_sequence_length_forward": forward,
        }
        if packing.pop("sequence_length_round", None) is not None:
            notices.append(
                "sequence_packing.sequence_length_round: not carried over; NeMo-RL never reads it, and here packs "
                "are aligned as the layout needs"
            )
        if _order(packing.pop("microbatch_order", None)) == "largest_first":
            notices.append(
                "sequence_packing.microbatch_order: a rank's micro-batches run by falling cost, which is largest first"
            )
        notices += [f"sequence_packing.{key}: has no counterpart" for key in sorted(packing)]
    if use_batching:
        train, forward = _budgets("dynamic_batching", batching)
        result |= {
            "use_dynamic_batching_in_train": True,
            "max_tokens_per_microbatch_in_train": train,
            "use_dynamic_batching_in_infer": True,
            "max_tokens_per_microbatch_in_infer": forward,
            "planning_args": {"dynamic_algorithm": "nemo_rl", "shared_shapes": True},
        }
        rounding = batching.pop("sequence_length_round", None)
        if rounding is not None:
            result["sequence_length_round_in_train"] = result["sequence_length_round_in_infer"] = _whole(
                "dynamic_batching.sequence_length_round", rounding
            )
        notices += [f"dynamic_batching.{key}: has no counterpart" for key in sorted(batching)]
    if policy.get("make_sequence_length_divisible_by") is not None:
        notices.append(
            "make_sequence_length_divisible_by: not carried over; alignment follows from tp, cp, sequence "
            "parallelism and precision"
        )
    return result, notices


def _budgets(section: str, values: dict[str, Any]) -> tuple[int, int]:
    if values.get("train_mb_tokens") is None:
        raise PlanError(f"{section}.train_mb_tokens is missing; it is the cap of a micro-batch in tokens")
    train = _whole(f"{section}.train_mb_tokens", values.pop("train_mb_tokens"))
    forward = values.pop("logprob_mb_tokens", None)
    return train, train if forward is None else _whole(f"{section}.logprob_mb_tokens", forward)


def _section(policy: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = policy.get(name) or {}
    if not isinstance(section, Mapping):
        raise PlanError(f"{name} is {section!r}; it is a section of keys and values")
    return dict(section)


def _whole(key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{key} is {value!r}; write the whole number of tokens that it stands for")
    return value
