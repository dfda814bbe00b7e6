"""Plans a host's batch with the host's own cost formula and rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_batching.errors import PlanError
from roll_batching.planning import (
    LinearQuadraticCost,
    Plan,
    PlanConstraints,
    SharedPrefixes,
    karmarkar_karp,
    plan_step,
)
from roll_batching.planning.cost_model import FIXED_TOKENS

Lengths = NDArray[np.int64]

WORKLOAD = LinearQuadraticCost(linear=24576, quadratic=1, fixed=24576 * FIXED_TOKENS)
"""`calculate_workload` of verl (seqlen_balancing.py) and ROLL (functionals.py): FLOPs of a 7B model's block.

The fixed cost of a micro-batch is ours: hosts do not say one, and it decides the number of micro-batches in a pipeline.
"""


_shared_behind: set[str] = set()
"""Hosts whose model shares the prefixes of a pack in this process (`plan_with_prefixes`)."""


def plan_with_prefixes(host: str) -> None:
    """Let plans of `host` read common prefixes from now on: its model computes them once (`integrations.prefixes`)."""
    _shared_behind.add(host)


@dataclass(frozen=True)
class HostSamples:
    """What a plan reads of one rank's samples."""

    lengths: Lengths
    """int64[n]: tokens of each sample."""
    prefixes: SharedPrefixes | None = None
    """What they share; None: nothing, or nobody computes it once."""

    @classmethod
    def of(cls, lengths: Any, host: str, ids: Callable[[], Any]) -> HostSamples:
        """Samples of `lengths`, whose tokens one after the other are `ids()`. Raises ValueError for wrong lengths."""
        checked = _checked(lengths)
        shares = host in _shared_behind and bool(np.all(lengths))  # a sample without tokens has no ids
        return cls(checked, SharedPrefixes.of(ids(), checked) if shares else None)


def gather_samples(measure: Callable[[], HostSamples], group: Any) -> tuple[list[HostSamples], int]:
    """(Samples of every rank of `group`, number of this rank in it). Collective, unless `group` is None.

    `measure` returns this rank's. If it raises on one rank, all ranks raise an AssertionError that names the
    rank and its error, so that none waits for lengths that do not come.
    """
    import torch.distributed as dist

    samples_or_error: HostSamples | str
    try:
        samples_or_error = measure()
    except Exception as error:
        if group is None or not dist.is_initialized():
            raise
        samples_or_error = f"{type(error).__name__}: {error}"
    if group is None or not dist.is_initialized():
        assert not isinstance(samples_or_error, str)
        return [samples_or_error], 0
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, samples_or_error, group=group)
    failed = [f"rank {rank}: {part}" for rank, part in enumerate(parts) if isinstance(part, str)]
    if failed:
        raise AssertionError(f"no lengths to plan with from {'; '.join(failed)}")
    return parts, dist.get_rank(group)


def _checked(measured: Any) -> Lengths:
    """Lengths as int64[n]; a sample without tokens counts as one. Raises ValueError for NaN and negatives."""
    array = np.asarray(measured)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array == np.floor(array)) & (array >= 0)))
    if len(wrong):
        raise ValueError(f"sample {wrong[0]} has the length {array[wrong[0]]}; lengths are whole numbers of tokens")
    lengths: Lengths = np.maximum(array.astype(np.int64), 1)
    return lengths


def plan_level_totals(
    lengths: Sequence[int], constraints: PlanConstraints, cost: Any = None, prefixes: SharedPrefixes | None = None
) -> Plan:
    """Makes a plan with level rank totals and, as far as that permits, a low lockstep cost.

    A second search minimises the lockstep cost alone. Its plan is taken if its largest rank total is at most 1/2000
    higher. With a pipeline, or with `objective` "lockstep", there is no second search. Raises PlanError.
    """
    plan = plan_step(lengths, constraints, cost=cost, prefixes=prefixes)
    if constraints.pp_size > 1 or constraints.objective == "lockstep":
        return plan
    other = plan_step(lengths, replace(constraints, objective="lockstep"), cost=cost, prefixes=prefixes)
    as_level = other.report.imbalance <= plan.report.imbalance + 1 / 2000
    return other if as_level and other.report.lockstep_imbalance < plan.report.lockstep_imbalance else plan


def plan_on_home_ranks(
    parts: Sequence[Lengths],
    constraints: PlanConstraints,
    *,
    group_size: int = 1,
    prefixes: SharedPrefixes | None = None,
) -> list[list[list[int]]]:
    """Indices into each rank's `parts`, by rank and micro-batch, sorted in each; samples stay on their rank.

    `group_size`: so many consecutive samples share a micro-batch; it divides every rank's number. `prefixes`: what the
    samples of all parts share; such samples share a micro-batch where that is faster, and the cap counts them whole, as
    hosts pack them. Raises PlanError.
    """
    sizes = [len(part) for part in parts]
    empty = [rank for rank, size in enumerate(sizes) if not size]
    if empty:
        raise PlanError(f"ranks {empty} have no samples: give every rank at least one, as every rank has micro-batches")
    firsts = np.cumsum([0, *sizes])
    plan = plan_step(
        np.concatenate(parts),
        replace(constraints, cap_counts_shared=True),
        cost=WORKLOAD,
        group_ids=np.arange(firsts[-1]) // group_size if group_size > 1 else None,
        home_rank=np.repeat(np.arange(len(parts)), sizes),
        prefixes=prefixes,
    )
    return [
        [sorted((micro_batch.samples - first).tolist()) for micro_batch in micro_batches]
        for first, micro_batches in zip(firsts, plan.micro_batches, strict=False)
    ]


def joined_prefixes(parts: Sequence[HostSamples]) -> SharedPrefixes | None:
    """Prefixes within each of `parts`, numbered over all; None where one has none."""
    known = [part.prefixes for part in parts if part.prefixes is not None]
    if len(known) < len(parts):
        return None
    firsts = np.cumsum([0, *(len(part) for part in known)])
    orders = [part.order + first for part, first in zip(known, firsts, strict=False)]
    return SharedPrefixes(np.concatenate(orders), np.concatenate([part.shared for part in known]))


def balanced_partitions(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Divides items into parts of near-equal sums, sorted in each part; `equal_size`: also of equal numbers.

    Raises AssertionError for fewer items than parts, for numbers that do not divide, for weights that are not finite,
    and for empty parts.
    """
    try:
        weights = np.asarray([int(weight) for weight in seqlen_list], dtype=np.int64)
    except (ValueError, OverflowError) as error:  # of NaN and infinity
        raise AssertionError(f"weights must be finite numbers below 2^63: {error}") from None
    if len(weights) < k_partitions:
        raise AssertionError(f"number of items:[{len(weights)}] < k_partitions:[{k_partitions}]")
    try:
        parts = karmarkar_karp(weights, k_partitions, equal_size=equal_size)
    except PlanError as error:
        raise AssertionError(str(error)) from None
    for number, part in enumerate(parts):
        if not part:
            raise AssertionError(f"the {number}-th partition is empty")
    return [sorted(part) for part in parts]


def cut_rectangles(widths: Sequence[int], max_tokens: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Cuts positions into as few micro-batches as possible, and then with the fewest tokens: (first, end) of each.

    `widths` (int[P]) is the row length of each position, rounded, the largest among ranks; a micro-batch computes its
    number of positions times its largest width, at most `max_tokens`. The number is a multiple of `multiple`. Raises
    AssertionError where a row is above the cap, or positions are too few.
    """
    sizes, count = np.asarray(widths, dtype=np.int64), len(widths)
    if np.any(sizes > max_tokens):
        raise AssertionError(f"a row of {sizes.max()} tokens is longer than a micro-batch of {max_tokens}")
    fewest, tokens = np.zeros(count + 1, dtype=np.int64), np.zeros(count + 1, dtype=np.int64)
    first_of = np.zeros(count + 1, dtype=np.int64)
    for end in range(1, count + 1):  # best cuts of the first `end` positions, by the first position of the last cut
        widest = np.maximum.accumulate(sizes[max(0, end - max_tokens) : end][::-1])
        area = widest * np.arange(1, len(widest) + 1)
        area = area[area <= max_tokens]
        firsts = end - np.arange(1, len(area) + 1)
        number, total = fewest[firsts] + 1, tokens[firsts] + area
        best = int(np.lexsort((total, number))[0])
        first_of[end], fewest[end], tokens[end] = firsts[best], number[best], total[best]
    cuts: list[tuple[int, int]] = []
    while count > 0:
        cuts.append((int(first_of[count]), count))
        count = cuts[-1][0]
    while len(cuts) % multiple:
        splits = [(cut, middle) for cut in cuts for middle in range(cut[0] + 1, cut[1])]
        if not splits:
            raise AssertionError(f"{len(widths)} positions cannot form a multiple of {multiple} micro-batches")
        cut, middle = max(splits, key=lambda split: _saved_tokens(sizes, *split))
        cuts.remove(cut)
        cuts += [(cut[0], middle), (middle, cut[1])]
    return sorted(cuts)


def _saved_tokens(sizes: Lengths, cut: tuple[int, int], middle: int) -> int:
    """Tokens that are saved by cutting a micro-batch in two."""
    first, end = cut
    left, right = int(sizes[first:middle].max()), int(sizes[middle:end].max())
    return (end - first) * max(left, right) - (middle - first) * left - (end - middle) * right


def pipeline_size() -> int:
    """Pipeline-parallel size of this process; 1 where Megatron's parallel state is not initialised."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")  # not imported for hosts that train by FSDP
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return 1
    size: int = parallel_state.get_pipeline_model_parallel_world_size()
    return size
