"""From placed units to a checked `Plan`: order inside packs, shapes, fillers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from roll_batching.errors import PlanError
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.counts import check_count, group_size_of
from roll_batching.planning.inputs import Ints, PlanInputs, round_up
from roll_batching.planning.invariants import check_plan
from roll_batching.planning.plan import Plan


def assemble_units(
    inputs: PlanInputs, unit_order: Ints, unit_offsets: Ints, count: int, *, row_length: Ints | None = None
) -> Plan:
    """A plan from units in order: micro-batch m (rank-major) holds `unit_order[unit_offsets[m]:...]`.

    `row_length` (int64[dp*K]) prescribes rectangle lengths, e.g. a parent's after a split.
    """
    units = inputs.units
    if len(units) == len(units.samples):
        return assemble_samples(inputs, units.samples[unit_order], unit_offsets, count, row_length=row_length)
    sizes = units.rows[unit_order]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    # Positions of all members: each unit's first plus a running count inside it.
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
    samples = units.samples[np.repeat(units.offsets[unit_order], sizes) + inside]
    return assemble_samples(inputs, samples, starts[unit_offsets], count, row_length=row_length)


def assemble_samples(
    inputs: PlanInputs,
    samples: Ints,
    offsets: Ints,
    count: int,
    *,
    row_length: Ints | None = None,
    home: Ints | None = None,
) -> Plan:
    """A plan from samples in order and the micro-batches' offsets (int64[dp*K + 1]), checked."""
    constraints = inputs.constraints
    offsets = np.asarray(offsets, dtype=np.int64)
    counts = np.diff(offsets)
    filled = counts > 0
    costs = np.zeros(len(counts), dtype=np.int64)
    if len(samples):
        costs[filled] = np.add.reduceat(inputs.costs[samples], offsets[:-1][filled])
    if constraints.mode == "packed":
        slots = inputs.slots[samples]
        tokens, rows = _pack_shapes(constraints, slots, offsets, filled)
    else:
        tokens, rows = _rectangle_shapes(inputs, samples, offsets, filled, row_length)
        slots = np.repeat(tokens // rows, counts)
    plan = Plan(
        constraints=constraints,
        num_micro_batches=count,
        group_size=group_size_of(count, constraints),
        lengths=inputs.lengths,
        ids=inputs.ids,
        location=inputs.location,
        used=inputs.used,
        samples=samples,
        slots=slots,
        offsets=offsets,
        tokens=tokens,
        rows=rows,
        costs=costs,
        dropped=inputs.dropped,
    )
    units = inputs.units
    if home is None and np.any(units.home >= 0):
        home = np.full(len(inputs.lengths), -1, dtype=np.int64)
        home[units.samples] = np.repeat(units.home, units.rows)
    check_plan(plan, groups=(units.samples, units.offsets), home=home)
    return plan


def _pack_shapes(
    constraints: PlanConstraints, slots: Ints, offsets: Ints, filled: NDArray[np.bool_]
) -> tuple[Ints, Ints]:
    total = np.zeros(len(filled), dtype=np.int64)
    if len(slots):
        total[filled] = np.add.reduceat(slots, offsets[:-1][filled])
    tokens = round_up(total, constraints.pack_alignment)
    tokens[~filled] = constraints.micro_batch_alignment
    if constraints.shared_shapes:
        tokens = np.tile(tokens.reshape(constraints.dp_size, -1).max(axis=0), constraints.dp_size)
    return tokens, np.ones(len(filled), dtype=np.int64)


def _rectangle_shapes(
    inputs: PlanInputs, samples: Ints, offsets: Ints, filled: NDArray[np.bool_], row_length: Ints | None
) -> tuple[Ints, Ints]:
    constraints = inputs.constraints
    alignment = constraints.rectangle_alignment
    rows = np.maximum(np.diff(offsets), 1)
    length = np.zeros(len(rows), dtype=np.int64)
    if len(samples):
        length[filled] = np.maximum.reduceat(inputs.used[samples], offsets[:-1][filled])
    if constraints.row_limit is not None:
        length[filled] = np.maximum(length[filled], constraints.row_limit)
    if row_length is not None:
        length[filled] = np.maximum(length[filled], row_length[filled])
    length = round_up(length, alignment)
    length[~filled] = constraints.micro_batch_alignment
    if constraints.shared_shapes:
        length = np.tile(length.reshape(constraints.dp_size, -1).max(axis=0), constraints.dp_size)
        rows = np.tile(rows.reshape(constraints.dp_size, -1).max(axis=0), constraints.dp_size)
    return length * rows, rows


def assemble_bins(inputs: PlanInputs, bins: Sequence[Sequence[Sequence[int]]]) -> Plan:
    """A plan from `bins[dp_rank][k]`, checked; see `Plan.from_bins`."""
    constraints = inputs.constraints
    if len(bins) != constraints.dp_size:
        raise PlanError(f"bins has {len(bins)} ranks, dp_size={constraints.dp_size}")
    per_rank = [len(rank) for rank in bins]
    if len(set(per_rank)) != 1:
        raise PlanError(
            f"ranks have different numbers of micro-batches ({min(per_rank)} to {max(per_rank)}); every rank "
            "needs the same, add empty bins (they become fillers)"
        )
    count = per_rank[0]
    check_count(count, constraints)
    flat = [np.asarray(one, dtype=np.int64).reshape(-1) for rank in bins for one in rank]
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in flat])]).astype(np.int64)
    samples = np.concatenate(flat) if flat else np.zeros(0, dtype=np.int64)
    outside = (samples < 0) | (samples >= len(inputs.lengths))
    if outside.any():
        raise PlanError(f"bins name sample {samples[outside][0]}, but there are {len(inputs.lengths)} samples")
    gone = {record.index for record in inputs.dropped}
    if gone:
        kept = np.array([int(sample) not in gone for sample in samples], dtype=bool)
        before = np.concatenate([[0], np.cumsum(kept)])
        samples, offsets = samples[kept], before[offsets].astype(np.int64)
    return assemble_samples(inputs, samples, offsets, count)
