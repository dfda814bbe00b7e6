"""Rows of a micro-batch, one per data-parallel rank: samples divided so that all rows take as long as each other.

The measure is the sum of squared lengths of a row, what attention waits for. The division is the planner's, which for
few samples comes within a thousandth of equal rows, where dealing longest-first leaves several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from roll_batching.planning import PlanConstraints, plan_step, quadratic_cost
from roll_batching.planning.pipeline.ordering import small_at_ends

S = TypeVar("S")


class LengthOf(Protocol):
    """Tokens of a sample."""

    def __call__(self, sample: Any, /) -> int:
        """At least 1."""
        ...


def tokens_of(sample: Any) -> int:
    """Tokens of a sample: its `input_ids`, an attribute or a key of a mapping; the length of what has neither."""
    if isinstance(sample, Mapping):
        return len(sample["input_ids"])
    return len(getattr(sample, "input_ids", sample))


def imbalance(rows: Sequence[Sequence[int]]) -> float:
    """(largest - smallest) / mean of the sums of squares over rows of lengths; 0 without any."""
    loads = [sum(length * length for length in row) for row in rows]
    return (max(loads) - min(loads)) * len(loads) / sum(loads) if any(loads) else 0.0


def balance_by_squared_length(samples: Sequence[S], rows: int, length_of: LengthOf = tokens_of) -> list[list[S]]:
    """Deal samples to `rows` rows, longest first, each to the row with the smallest sum of L^2.

    Equal lengths keep their order, equal rows are taken in order. TRL's rule, and the one to compare with.
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
    """`rows` rows as even as the planner or dealing longest-first makes them, whichever is better. No cap."""
    dealt = balance_by_squared_length(samples, rows, length_of)
    found = divide(samples, rows, token_budget=sum(map(length_of, samples)), length_of=length_of)
    assert found is not None, "one row holds them all"
    return min((dealt, found[0]), key=lambda one: imbalance(lengths_in(one, length_of)))


def divide(
    samples: Sequence[S],
    rows: int,
    *,
    token_budget: int,
    micro_batches: int = 1,
    length_of: LengthOf = tokens_of,
) -> list[list[list[S]]] | None:
    """`micro_batches` micro-batches of `rows` even rows each, no row above `token_budget`; None if so many cannot be.

    A sample above the budget has a row of its own. With at least `rows * micro_batches` samples no row is empty.
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


def lengths_in(rows: Sequence[Sequence[S]], length_of: LengthOf = tokens_of) -> list[list[int]]:
    """The lengths of every row's samples."""
    return [[length_of(sample) for sample in row] for row in rows]


def serpentine(micro_batches: Sequence[list[list[S]]], length_of: LengthOf = tokens_of) -> list[list[list[S]]]:
    """The micro-batches of a step in an order for pipelines: the small ones first and last, as it fills and drains.

    By the largest sum of squares of a row, up along every second one and down along the others.
    """
    loads = [max(sum(n * n for n in row) for row in lengths_in(rows, length_of)) for rows in micro_batches]
    return [micro_batches[k] for k in small_at_ends(np.array(loads, dtype=np.int64))]
