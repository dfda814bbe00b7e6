"""Times of a plan's micro-batches on every rank, as the planner's costs predict them: work and bubbles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.planning import Plan
from roll_batching.planning.pipeline.schedule import dependency_of, stage_operations

_PASSES = {"F": 1.0, "B": 2.0}
"""Time of a forward and of a backward pass, in forward passes."""


@dataclass(frozen=True)
class Box:
    """One pass of a micro-batch on a row of the timeline."""

    row: int
    """DP rank; in a pipeline DP rank x stages + stage."""
    start: float
    """In means of the rows' work; of plans with predicted times, in milliseconds."""
    duration: float
    pack: int
    """Index into the plan's micro-batch arrays."""
    index: int
    """Position among the micro-batches of the rank."""
    kind: str
    """"step" for forward and backward together; "F" or "B" in a pipeline."""


@dataclass(frozen=True)
class Timeline:
    """Boxes of all rows, and the gaps between them."""

    boxes: list[Box]
    bubbles: list[tuple[int, float, float]]
    """Row, start and duration."""
    rows: int
    end: float
    is_milliseconds: bool

    @property
    def bubble_share(self) -> float:
        """Share of all rows' time until the end that is bubbles."""
        return sum(duration for _, _, duration in self.bubbles) / (self.rows * self.end) if self.end else 0.0


def make_timeline(plan: Plan, ranks: int) -> Timeline:
    """Timeline of the first `ranks` DP ranks. Not for plans with a context-parallel size per pack in a pipeline."""
    boxes = _pipelines(plan, ranks) if plan.constraints.pp_size > 1 else _ranks(plan)
    end = max((box.start + box.duration for box in boxes), default=0.0)
    shown = ranks * plan.constraints.pp_size
    is_predicted = plan.blocks is not None and bool(plan.blocks.step_time)
    boxes = [box for box in boxes if box.row < shown]
    work = np.zeros(shown)
    for box in boxes:
        work[box.row] += box.duration
    scale = 1e-6 if is_predicted else 1 / (work.mean() or 1.0)
    boxes = [Box(b.row, b.start * scale, b.duration * scale, b.pack, b.index, b.kind) for b in boxes]
    return Timeline(boxes, _gaps(boxes, shown, end * scale), shown, end * scale, is_predicted)


def _ranks(plan: Plan) -> list[Box]:
    """Boxes without a pipeline: ranks wait for each other at the end, inside blocks, or at every index."""
    constraints = plan.constraints
    width = constraints.lockstep_ranks
    ends = np.zeros(constraints.dp_size)
    at = [0] * constraints.dp_size
    boxes: list[Box] = []
    for index, packs in enumerate(_packs_by_index(plan)):
        if width > 1:  # all ranks of a group begin an index together
            groups = ends.reshape(-1, width)
            groups[:] = groups.max(axis=1, keepdims=True)
        for pack, ranks in packs:
            start, duration = float(ends[list(ranks)].max()), _duration(plan, pack)
            boxes += [Box(rank, start, duration, pack, at[rank], "step") for rank in ranks]
            for rank in ranks:
                ends[rank], at[rank] = start + duration, index + 1
    return boxes


def _packs_by_index(plan: Plan) -> list[list[tuple[int, range]]]:
    """Packs and their ranks, by position in the lists of the ranks."""
    count = plan.num_micro_batches
    if plan.blocks is None:
        ranks = range(plan.constraints.dp_size)
        return [[(rank * count + k, range(rank, rank + 1)) for rank in ranks] for k in range(count)]
    by_index: list[list[tuple[int, range]]] = [[] for _ in range(count)]
    position = [0] * plan.constraints.dp_size
    for pack, (first, size) in enumerate(
        zip(plan.blocks.first_ranks.tolist(), plan.blocks.cp_sizes.tolist(), strict=True)
    ):
        block = range(first, first + size)
        index = max(position[rank] for rank in block)
        by_index[index].append((pack, block))
        for rank in block:
            position[rank] = index + 1
    return by_index


def _duration(plan: Plan, pack: int) -> float:
    if plan.blocks is None:
        return float(plan.costs[pack])
    if plan.blocks.step_time:
        return float(plan.blocks.times[pack])
    return float(plan.costs[pack]) / float(plan.blocks.cp_sizes[pack])


def _pipelines(plan: Plan, ranks: int) -> list[Box]:
    """Boxes of Megatron's schedule on each stage; a backward pass takes two forward passes, communication none."""
    stages, chunks, count = plan.constraints.pp_size, plan.constraints.vpp_size, plan.num_micro_batches
    orders = [stage_operations(stage, stages, count, chunks, plan.group_size) for stage in range(stages)]
    boxes: list[Box] = []
    for rank in range(ranks):
        costs = plan.costs[rank * count : (rank + 1) * count] / chunks
        ends: dict[tuple[tuple[str, int, int], int], float] = {}
        position, clock = [0] * stages, [0.0] * stages
        while len(ends) < sum(map(len, orders)):
            for stage, operations in enumerate(orders):
                while position[stage] < len(operations):
                    operation = operations[position[stage]]
                    source = dependency_of(operation, stage, stages, chunks)
                    if source is not None and source not in ends:
                        break
                    start = max(clock[stage], 0.0 if source is None else ends[source])
                    kind, k, _ = operation
                    duration = float(costs[k]) * _PASSES[kind]
                    boxes.append(Box(rank * stages + stage, start, duration, rank * count + k, k, kind))
                    ends[operation, stage] = clock[stage] = start + duration
                    position[stage] += 1
    return boxes


def _gaps(boxes: list[Box], rows: int, end: float) -> list[tuple[int, float, float]]:
    """The time of each row until `end` that no box fills."""
    gaps: list[tuple[int, float, float]] = []
    clock = [0.0] * rows
    smallest = end * 1e-9
    for box in sorted(boxes, key=lambda box: box.start):
        if box.start - clock[box.row] > smallest:
            gaps.append((box.row, clock[box.row], box.start - clock[box.row]))
        clock[box.row] = box.start + box.duration
    return [*gaps, *((row, at, end - at) for row, at in enumerate(clock) if end - at > smallest)]
