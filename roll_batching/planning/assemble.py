"""Assemble the checked arrays of a plan from placed units: samples in order, shapes, fillers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, as_ints, kind_of, largest_of, offsets_of, round_up, sums_of
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.invariants import check_plan
from roll_batching.planning.pipeline.schedule import check_count, group_size_of
from roll_batching.planning.placement import Placement
from roll_batching.planning.plan_arrays import PackBlocks, PlanArrays, blocks_of_bins
from roll_batching.planning.problem import PlanProblem


def assemble(problem: PlanProblem, placement: Placement) -> PlanArrays:
    """Checked arrays of the plan that `placement` describes."""
    samples, offsets = _samples_of(problem, placement.units, placement.offsets)
    return _assemble_samples(problem, samples, offsets, placement.count, row_length=placement.row_length)


def assemble_blocks(problem: PlanProblem, units: Ints, offsets: Ints, blocks: PackBlocks) -> PlanArrays:
    """Checked arrays of a plan with a context-parallel size per pack; `units[offsets[m]:offsets[m + 1]]` are pack m."""
    samples, sample_offsets = _samples_of(problem, units, offsets)
    return _assemble_samples(problem, samples, sample_offsets, max(map(len, blocks.lists)), blocks=blocks)


def _samples_of(problem: PlanProblem, placed: Ints, offsets: Ints) -> tuple[Ints, Ints]:
    """Samples of units in order, and offsets of micro-batches among them."""
    units = problem.units
    sizes = units.rows[placed]
    starts = offsets_of(sizes)
    # Index of each sample: its unit's first plus a running count in the unit.
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
    samples = units.samples[np.repeat(units.offsets[placed], sizes) + inside]
    return samples, starts[offsets]


def _assemble_samples(
    problem: PlanProblem,
    samples: Ints,
    offsets: Ints,
    count: int,
    *,
    row_length: Ints | None = None,
    blocks: PackBlocks | None = None,
) -> PlanArrays:
    """Plan of samples in order and offsets of micro-batches (int64[dp*K + 1], or of the packs of `blocks`)."""
    constraints, shared, costs = problem.constraints, np.zeros(len(samples), dtype=np.int64), problem.costs
    if problem.prefixes is not None:
        samples = problem.prefixes.sort(samples, offsets)
        shared = problem.prefixes.shared(samples, offsets)
        costs = np.zeros(len(problem.lengths), dtype=np.int64)
        costs[samples] = problem.prefixes.own_cost(problem.used[samples], shared)
    if constraints.mode == "packed":
        sizes = np.full(len(offsets) - 1, constraints.cp_size) if blocks is None else blocks.cp_sizes
        slots, tokens = _pack_shapes(constraints, problem.used[samples] - shared, offsets, sizes)
        rows = np.ones(len(tokens), dtype=np.int64)
    else:
        tokens, rows = _rectangle_shapes(problem, samples, offsets, row_length)
        slots = np.repeat(tokens // rows, np.diff(offsets))
    plan = PlanArrays(
        constraints=constraints,
        num_micro_batches=count,
        group_size=group_size_of(count, constraints),
        lengths=problem.lengths,
        ids=problem.ids,
        location=problem.location,
        used=problem.used,
        samples=samples,
        shared=shared,
        slots=slots,
        offsets=offsets,
        tokens=tokens,
        rows=rows,
        costs=sums_of(costs[samples], offsets),
        sample_costs=costs,
        dropped=problem.dropped,
        blocks=blocks,
        chunk_shares=problem.chunk_shares,
    )
    units, home = problem.units, None
    if problem.has_home_ranks:
        home = np.full(len(problem.lengths), -1, dtype=np.int64)
        home[units.samples] = np.repeat(units.home, units.rows)
    check_plan(plan, groups=(units.samples, units.offsets), home=home)
    return plan


def _pack_shapes(constraints: PlanConstraints, computed: Ints, offsets: Ints, cp_sizes: Ints) -> tuple[Ints, Ints]:
    """Slots of samples (int64[placed]) and tokens of packs (int64[packs]), aligned for each pack's size."""
    slots, tokens = np.empty_like(computed), np.empty(len(cp_sizes), dtype=np.int64)
    size_of = np.repeat(cp_sizes, np.diff(offsets))
    sizes = np.unique(cp_sizes).tolist()
    for size in sizes:
        slots[size_of == size] = round_up(computed[size_of == size], constraints.sequence_alignment_of(size))
    sums = sums_of(slots, offsets)
    for size in sizes:
        alignment = constraints.pack_alignment_of(size)
        tokens[cp_sizes == size] = round_up(sums[cp_sizes == size], alignment)
        fillers = (cp_sizes == size) & (np.diff(offsets) == 0)
        tokens[fillers] = math.lcm(alignment, constraints.sequence_alignment_of(size))
    if constraints.shared_shapes:
        tokens = _largest_of_ranks(tokens, constraints.dp_size)
    return slots, tokens


def _rectangle_shapes(problem: PlanProblem, samples: Ints, offsets: Ints, row_length: Ints | None) -> tuple[Ints, Ints]:
    """Tokens and rows of each rectangle, int64[dp*K]; `row_length` as in `Placement`."""
    constraints = problem.constraints
    counts = np.diff(offsets)
    length = largest_of(problem.used[samples], offsets)
    if constraints.row_limit is not None:
        length = np.maximum(length, constraints.row_limit)
    if row_length is not None:
        length = np.maximum(length, row_length)
    length = round_up(length, constraints.rectangle_alignment)
    length[counts == 0] = constraints.micro_batch_alignment
    rows = np.maximum(counts, 1)
    if constraints.shared_shapes:
        length, rows = (_largest_of_ranks(sizes, constraints.dp_size) for sizes in (length, rows))
    return length * rows, rows


def _largest_of_ranks(values: Ints, dp_size: int) -> Ints:
    """Largest value of each index among the ranks, repeated for all ranks (rank-major)."""
    return np.tile(values.reshape(dp_size, -1).max(axis=0), dp_size)


def assemble_bins(problem: PlanProblem, bins: Sequence[Sequence[Sequence[int]]]) -> PlanArrays:
    """Checked arrays of a plan from `bins[dp_rank][k]`; see `Plan.from_bins`."""
    constraints = problem.constraints
    _require_list("bins", bins)
    if len(bins) != constraints.dp_size:
        raise PlanError(f"bins has {len(bins)} ranks: give dp_size={constraints.dp_size} lists of micro-batches")
    indices: list[list[Ints]] = []
    for rank, rank_bins in enumerate(bins):
        _require_list(f"bins[{rank}]", rank_bins)
        indices.append([])
        for k, members in enumerate(rank_bins):
            _require_list(f"bins[{rank}][{k}]", members)
            indices[-1].append(as_ints(members, f"bins[{rank}][{k}]", len(members)))
    if constraints.has_cp_per_pack:
        packs, first_ranks, cp_sizes = blocks_of_bins(indices)
        samples, offsets = _checked_members(problem, packs)
        blocks = PackBlocks(first_ranks, cp_sizes, np.zeros(len(cp_sizes), dtype=np.int64))
        return _assemble_samples(problem, samples, offsets, max(map(len, indices)), blocks=blocks)
    per_rank = [len(rank_bins) for rank_bins in bins]
    if len(set(per_rank)) != 1:
        raise PlanError(
            f"ranks have different numbers of micro-batches ({min(per_rank)} to {max(per_rank)}); every rank "
            "needs the same number: add empty bins, which become fillers"
        )
    count = per_rank[0]
    check_count(count, constraints)
    samples, offsets = _checked_members(problem, list(itertools.chain.from_iterable(indices)))
    return _assemble_samples(problem, samples, offsets, count)


def _checked_members(problem: PlanProblem, members: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Samples and offsets of micro-batches, without dropped samples."""
    offsets = offsets_of(np.array([len(micro_batch) for micro_batch in members], dtype=np.int64))
    samples = np.concatenate(members) if members else np.zeros(0, dtype=np.int64)
    outside = (samples < 0) | (samples >= len(problem.lengths))
    if outside.any():
        raise PlanError(f"bins hold sample index {samples[outside][0]}: samples are 0 to {len(problem.lengths) - 1}")
    dropped = {record.index for record in problem.dropped}
    if dropped:
        is_placed = np.array([int(sample) not in dropped for sample in samples], dtype=bool)
        placed_before = np.concatenate([[0], np.cumsum(is_placed)])
        samples, offsets = samples[is_placed], placed_before[offsets].astype(np.int64)
    return samples, offsets


def _require_list(name: str, value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        raise PlanError(f"{name} is {kind_of(value)}: pass bins[dp_rank][k] as lists of sample indices")
