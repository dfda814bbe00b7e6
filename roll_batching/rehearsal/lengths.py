"""The longest micro-batches that a role's caps allow, and the plans that consist of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll_batching.jobs.config import JobConfig
from roll_batching.planning import Plan, PlanConstraints
from roll_batching.planning.arrays import Ints


def longest_sample(job: JobConfig) -> int:
    """Tokens of the longest sequence that the job admits."""
    return job.sequence_length or (job.prompt_length + (job.response_length or 0))


def longest_bin(constraints: PlanConstraints, longest: int, unit: int = 1) -> list[int]:
    """Lengths of the samples of a micro-batch with as many tokens as can be, none longer than `longest`.

    `unit`: samples that stay together, such as the two of a pair.
    """
    if constraints.mode == "padded":
        return [longest] * _rows_of_padded(constraints, longest)
    if constraints.mode == "packed":
        align = constraints.sequence_alignment
        whole, rest = divmod(constraints.usable_tokens, unit * _rounded(longest, align))
        short = min(rest // unit // align * align, longest)
        return [longest] * (unit * whole) + [short] * (unit if short else 0)
    return _rectangle(constraints, longest, unit)


def _rectangle(constraints: PlanConstraints, longest: int, unit: int) -> list[int]:
    """Rows of the longest samples, or some more of shorter ones where that fills the cap better."""
    align = constraints.rectangle_alignment
    width = _rounded(longest, align)
    rows = max(1, constraints.usable_tokens // width // unit) * unit
    shorter = constraints.usable_tokens // (rows + unit) // align * align
    if shorter and (rows + unit) * shorter > rows * width:
        return [min(shorter, longest)] * (rows + unit)
    return [longest] * rows


def _rows_of_padded(constraints: PlanConstraints, longest: int) -> int:
    if constraints.rows is not None:
        return constraints.rows
    width = constraints.padded_length or _rounded(longest, constraints.rectangle_alignment)
    return max(1, constraints.usable_tokens // width)


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def fullest_bin(plan: Plan) -> list[int]:
    """Lengths of the samples of the plan's micro-batch with the most tokens."""
    every = [mb for rank in plan.micro_batches for mb in rank]
    return [int(length) for length in max(every, key=lambda mb: mb.tokens).lengths]


def same_bins(constraints: PlanConstraints, lengths: Sequence[int], micro_batches: int) -> Plan:
    """A plan whose micro-batches, on every rank, all hold samples of these `lengths`."""
    count = constraints.dp_size * micro_batches
    size = len(lengths)
    bins = [
        [
            list(range((rank * micro_batches + k) * size, (rank * micro_batches + k + 1) * size))
            for k in range(micro_batches)
        ]
        for rank in range(constraints.dp_size)
    ]
    every: Ints = np.tile(np.asarray(lengths, dtype=np.int64), count)
    return Plan.from_bins(bins, every, constraints)
