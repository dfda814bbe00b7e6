"""Times of a plan's micro-batches on every rank, as the planner's costs predict them: work and bubbles."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from roll_batching.planning import Plan
from roll_batching.planning.pipeline.execution import execute_plan, packs_of_ranks


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
    """Timeline of the first `ranks` DP ranks, as the planner predicts it: transfers between stages are free."""
    constraints, stages, packs = plan.constraints, plan.constraints.pp_size, packs_of_ranks(plan)
    costs = plan.costs / plan.cp_sizes * constraints.cp_size
    is_predicted = plan.blocks is not None and bool(plan.blocks.step_time)
    if plan.blocks is not None and is_predicted:
        costs = plan.blocks.times.astype(np.float64)
    events = execute_plan(plan, costs / 3, costs * 2 / 3)
    end = max((passes[-1].end for of_rank in events for passes in of_rank), default=0.0)
    shares = plan.chunk_shares or (1.0,) * (stages * constraints.vpp_size)
    boxes = []
    for row, (rank, stage) in enumerate(itertools.product(range(ranks), range(stages))):
        for event in events[rank][stage]:
            pack = packs[rank][event.index]
            if stages == 1 and event.is_backward:
                continue  # the box of the forward pass holds both
            kind, part = ("step", 3) if stages == 1 else ("B", 2) if event.is_backward else ("F", 1)
            share = shares[event.chunk * stages + stage] / constraints.vpp_size
            boxes.append(Box(row, event.start, float(costs[pack]) * share * part / 3, pack, event.index, kind))
    rows = ranks * stages
    scale = 1e-6 if is_predicted else rows / (sum(box.duration for box in boxes) or rows)
    boxes = [replace(box, start=box.start * scale, duration=box.duration * scale) for box in boxes]
    return Timeline(boxes, _gaps(boxes, rows, end * scale), rows, end * scale, is_predicted)


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
