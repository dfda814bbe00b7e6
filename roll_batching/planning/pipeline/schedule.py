"""Megatron's pipeline schedules as lists of passes with dependencies, and the numbers of micro-batches that they take.

The passes of a stage and their order depend on numbers of stages, chunks and micro-batches, not on costs. So one static
list serves all orders of micro-batches that a search tries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.constraints import PlanConstraints


class Pass(NamedTuple):
    """Forward or backward pass of one micro-batch through one model chunk of a stage."""

    kind: Literal["F", "B"]
    micro_batch: int
    """Counted on its rank."""
    chunk: int

    @property
    def is_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.kind == "B"


def schedule_table(count: int, chunks: int, group_size: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of the forward passes of an interleaved stage, in order.

    Groups of `group_size` micro-batches pass through one chunk after the other; the last group may be smaller. Backward
    passes use the same table with chunks in reverse.
    """
    table: list[tuple[int, int]] = []
    for first in range(0, count, group_size):
        group = range(first, min(first + group_size, count))
        table.extend((micro_batch, chunk) for chunk in range(chunks) for micro_batch in group)
    return table


def stage_operations(stage: int, stages: int, count: int, chunks: int = 1, group_size: int | None = None) -> list[Pass]:
    """Passes of one stage in order: warm-up, alternating forward and backward passes, cool-down."""
    if chunks == 1:
        table = [(micro_batch, 0) for micro_batch in range(count)]
        warm_up = stages - stage - 1
    else:
        size = stages if group_size is None else group_size
        if not is_admissible(count, stages, size):
            raise PlanError(f"{count} micro-batches in groups of {size} cannot interleave over {stages} stages")
        table = schedule_table(count, chunks, size)
        warm_up = 2 * (stages - stage - 1) + (chunks - 1) * size
    warm_up = min(warm_up, len(table))
    forward = [Pass("F", micro_batch, chunk) for micro_batch, chunk in table]
    backward = [Pass("B", micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
    steady = len(table) - warm_up
    operations = forward[:warm_up]
    for i in range(steady):
        operations += [forward[warm_up + i], backward[i]]
    return operations + backward[steady:]


def dependency_of(operation: Pass, stage: int, stages: int, chunks: int) -> tuple[Pass, int] | None:
    """Pass, and its stage, whose output `operation` on `stage` takes; None for the first forward pass of the model."""
    kind, micro_batch, chunk = operation
    if kind == "F":
        if stage > 0:
            return Pass("F", micro_batch, chunk), stage - 1
        return (Pass("F", micro_batch, chunk - 1), stages - 1) if chunk > 0 else None
    if stage < stages - 1:
        return Pass("B", micro_batch, chunk), stage + 1
    if chunk < chunks - 1:
        return Pass("B", micro_batch, chunk + 1), 0
    return Pass("F", micro_batch, chunk), stage


@dataclass(frozen=True)
class StaticSchedule:
    """All operations, each after those that it waits for; int64 arrays of equal length."""

    micro_batch: Ints
    chunk: Ints
    """Index of the model chunk, in the order of the layers."""
    backward: Ints
    """1 for a backward pass, 0 for a forward."""
    previous: Ints
    """Index of the previous operation of the stage, or -1."""
    awaited: Ints
    """Index of the operation whose output is received, or -1."""


@lru_cache(maxsize=256)
def static_schedule(stages: int, count: int, chunks: int = 1, group_size: int | None = None) -> StaticSchedule:
    """Schedule of `count` micro-batches over `stages` x `chunks`, as arrays."""
    lists = [stage_operations(stage, stages, count, chunks, group_size) for stage in range(stages)]
    return schedule_of(lists, chunks)


def schedule_of(lists: Sequence[Sequence[Pass]], chunks: int = 1) -> StaticSchedule:
    """Schedule of the passes `lists[stage]`. Raises `PlanError` where stages would wait for each other forever."""
    stages = len(lists)
    index: dict[tuple[Pass, int], int] = {}
    entries: list[tuple[int, int, int, int, int]] = []
    position = [0] * stages
    last = [-1] * stages
    while len(entries) < sum(map(len, lists)):
        before = len(entries)
        for stage, operations in enumerate(lists):
            while position[stage] < len(operations):
                operation = operations[position[stage]]
                source = dependency_of(operation, stage, stages, chunks)
                if source is not None and source not in index:
                    break
                awaited = -1 if source is None else index[source]
                index[operation, stage] = len(entries)
                kind, micro_batch, chunk = operation
                entries.append((micro_batch, chunk * stages + stage, int(kind == "B"), last[stage], awaited))
                last[stage] = len(entries) - 1
                position[stage] += 1
        if len(entries) == before:
            raise PlanError(f"the schedule of these passes over {stages} stages is a deadlock: all wait")
    columns = np.array(entries, dtype=np.int64).T
    return StaticSchedule(*(np.ascontiguousarray(column) for column in columns))


# ---- legal numbers of micro-batches


def is_admissible(count: int, pp_size: int, group_size: int) -> bool:
    """Whether Megatron's interleaved schedule accepts `count` micro-batches in groups of `group_size`.

    It requires pp_size <= group_size <= count, and a last group that is full or holds at least pp_size
    (`megatron/core/pipeline_parallel/schedules.py`, the checks before the interleaved schedule).
    """
    if not pp_size <= group_size <= count:
        return False
    remainder = count % group_size
    return remainder == 0 or remainder >= pp_size


def smallest_group(count: int, pp_size: int) -> int:
    """Smallest group size that admits `count` micro-batches; raises `PlanError` if count < pp_size."""
    for group_size in range(pp_size, count + 1):
        if is_admissible(count, pp_size, group_size):
            return group_size
    raise PlanError(f"{count} micro-batches are below pp_size={pp_size}: Megatron cannot interleave them")


def legal_count(count: int, constraints: PlanConstraints) -> int:
    """Smallest legal number of micro-batches that is at least `count` and `min_num_micro_batches`."""
    multiple, pp_size, group_size = constraints.num_micro_batches_multiple, constraints.pp_size, constraints.group_size
    count = max(count, constraints.min_num_micro_batches, 1)
    if constraints.interleaved and group_size is None:
        multiple = math.lcm(multiple, pp_size)
    elif constraints.interleaved:
        count = max(count, group_size if isinstance(group_size, int) else pp_size)
    count = -(-count // multiple) * multiple
    if constraints.interleaved and isinstance(group_size, int):
        while not is_admissible(count, pp_size, group_size):
            count += multiple
    return count


def group_size_of(count: int, constraints: PlanConstraints) -> int | None:
    """Megatron's group size for `count` micro-batches; None without interleaving."""
    if not constraints.interleaved:
        return None
    if constraints.group_size is None:
        return constraints.pp_size
    if constraints.group_size == "auto":
        return smallest_group(count, constraints.pp_size)
    return int(constraints.group_size)


def check_count(count: int, constraints: PlanConstraints) -> None:
    """Raise `PlanError` if `count` is not a legal number of micro-batches per rank."""
    if legal_count(count, constraints) != count:
        rule = f"min_num_micro_batches={constraints.min_num_micro_batches}"
        if constraints.num_micro_batches_multiple > 1:
            rule += f", num_micro_batches_multiple={constraints.num_micro_batches_multiple}"
        if constraints.interleaved:
            rule += f", pp_size={constraints.pp_size}, group_size={constraints.group_size!r}"
        raise PlanError(
            f"{count} micro-batches per rank are not legal for {rule}; the next legal number is "
            f"{legal_count(count, constraints)}"
        )


def legal_counts(least: int, most: int, constraints: PlanConstraints, limit: int) -> list[int]:
    """About `limit` legal numbers from `least` to `most`, in equal ratios; at least one."""
    first = legal_count(least, constraints)
    last = max(most, first)
    counts = []
    for step in range(limit):
        wanted = round(first * (last / first) ** (step / (limit - 1)))
        counts.append(legal_count(wanted, constraints))
    return sorted({count for count in counts if count <= last} | {first})
