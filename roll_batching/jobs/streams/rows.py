"""Divides a micro-batch into rows, one per data-parallel rank, of about equal attention cost.

The cost of a row is the sum of its squared lengths. The planner makes the division. For few samples its rows differ by
a thousandth of their cost; those of dealing longest-first differ by several thousandths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from roll_batching.planning import PlanConstraints, plan_step, quadratic_cost
from roll_batching.planning.pipeline.ordering import small_at_ends

S = TypeVar("S")


class LengthOf(Protocol):
    """Returns the tokens of a sample."""

    def __call__(self, sample: Any, /) -> int:
        """At least 1."""
        ...


def tokens_of(sample: Any) -> int:
    """Number of tokens of a sample: the length of its `input_ids` (key or attribute), else of the sample itself."""
    if isinstance(sample, Mapping):
        return len(sample["input_ids"])
    return len(getattr(sample, "input_ids", sample))


def imbalance(rows: Sequence[Sequence[int]]) -> float:
    """(largest - smallest) / mean of the rows' sums of squared lengths; 0 without any sample."""
    loads = [sum(length * length for length in row) for row in rows]
    return (max(loads) - min(loads)) * len(loads) / sum(loads) if any(loads) else 0.0


def balance_by_squared_length(samples: Sequence[S], rows: int, length_of: LengthOf = tokens_of) -> list[list[S]]:
    """Deals samples to `rows` rows, longest first, each to the row with the smallest sum of squared lengths.

    Equal lengths keep their order, equal rows are taken in order. TRL's rule, the baseline of the benchmarks.
    """
    order = sorted(samples, key=length_of, reverse=True)
    result: list[list[S]] = [[] for _ in range(rows)]
    loads = [0] * rows
    for sample in order:
        row = min(range(rows), key=loads.__getitem__)
        result[row].append(sample)
        loads[row] += length_of(sample) ** 2
    return result


def even_rows(samples: Sequence[S], rows: int, length_of: LengthOf = tokens_of) -> list[list[S]]:
    """Divides samples into `rows` rows without a cap: by the planner or longest first, whichever is more even."""
    dealt = balance_by_squared_length(samples, rows, length_of)
    planned = divide_into_rows(samples, rows, token_budget=sum(map(length_of, samples)), length_of=length_of)
    assert planned is not None, "a single row may hold all samples"
    return min((dealt, planned[0]), key=lambda division: imbalance(row_lengths(division, length_of)))


def divide_into_rows(
    samples: Sequence[S],
    rows: int,
    *,
    token_budget: int,
    micro_batches: int = 1,
    length_of: LengthOf = tokens_of,
) -> list[list[list[S]]] | None:
    """Divides samples into micro-batches of `rows` even rows, none above `token_budget`.

    Returns None if `micro_batches` are too few. A sample above the budget has its own row. With at least
    `rows * micro_batches` samples no row is empty.
    """
    constraints = PlanConstraints(
        dp_size=rows,
        max_tokens=token_budget,
        min_num_micro_batches=micro_batches,
        oversize="alone",
        objective="lockstep",
    )
    lengths = np.fromiter(map(length_of, samples), dtype=np.int64, count=len(samples))
    plan = plan_step(lengths, constraints, cost=quadratic_cost())
    if plan.num_micro_batches > micro_batches:
        return None
    ranks = plan.micro_batches
    return [
        [[samples[i] for i in sorted(ranks[rank][k].samples.tolist())] for rank in range(rows)]
        for k in range(plan.num_micro_batches)
    ]


def row_lengths(rows: Sequence[Sequence[S]], length_of: LengthOf = tokens_of) -> list[list[int]]:
    """The lengths of the samples of every row."""
    return [[length_of(sample) for sample in row] for row in rows]


def serpentine(micro_batches: Sequence[list[list[S]]], length_of: LengthOf = tokens_of) -> list[list[list[S]]]:
    """Orders a step's micro-batches for a pipeline: small ones first and last, while it fills and drains.

    The size of a micro-batch is the largest sum of squared lengths of its rows. By size, every second micro-batch goes
    to the ascending beginning, the others to the descending end.
    """
    loads = [max(sum(n * n for n in row) for row in row_lengths(rows, length_of)) for rows in micro_batches]
    return [micro_batches[k] for k in small_at_ends(np.array(loads, dtype=np.int64))]
