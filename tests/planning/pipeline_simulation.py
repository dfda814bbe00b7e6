"""Discrete-event simulation of Megatron's pipeline schedules.

Each stage runs its list of operations in order; an operation starts when the stage is free and its input has arrived.
The planner computes makespans by a recurrence instead. Both share only the lists of operations, so that each checks the
other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from roll_batching.errors import PlanError
from roll_batching.planning import Plan
from roll_batching.planning.pipeline.schedule import Pass, dependency_of, stage_operations


@dataclass(frozen=True)
class Interval:
    """One operation: `kind` "F" or "B" of a micro-batch through a chunk on a stage, from start to end."""

    stage: int
    kind: str
    micro_batch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class PipelineRun:
    """Operations of all stages with their times."""

    intervals: tuple[Interval, ...]
    """By start time, then stage."""
    makespan: float
    busy: tuple[float, ...]
    """Working time of every stage."""

    @property
    def bubble_share(self) -> float:
        """1 - working time / (stages x makespan)."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0


def simulate_pipeline(
    forward: Sequence[float],
    *,
    stages: int,
    chunks: int = 1,
    group_size: int | None = None,
    backward_factor: float = 2,
    transfer: float = 0,
    shares: Sequence[float] | None = None,
) -> PipelineRun:
    """Simulate 1F1B, or the interleaved schedule when chunks > 1, with `forward` times per micro-batch.

    A chunk takes 1/chunks of its stage's time, backward `backward_factor` times as long. `transfer` is the time from
    the end of an operation to its arrival on another stage. With `shares` a chunk takes its share of that instead, by
    its number in the order of the layers.
    """
    if stages < 1 or chunks < 1 or len(forward) == 0:
        raise PlanError("simulate_pipeline needs at least one stage, one chunk and one micro-batch")
    lists = [stage_operations(stage, stages, len(forward), chunks, group_size) for stage in range(stages)]
    position = [0] * stages
    free_at = [0.0] * stages
    arrived: dict[tuple[int, tuple[Pass, int]], float] = {}
    done: list[Interval] = []
    busy = [0.0] * stages
    events: list[tuple[float, int]] = [(0.0, stage) for stage in range(stages)]
    while events:
        now, stage = heapq.heappop(events)
        if position[stage] == len(lists[stage]) or free_at[stage] > now:
            continue
        operation = lists[stage][position[stage]]
        source = dependency_of(operation, stage, stages, chunks)
        if source is not None and arrived.get((stage, source), float("inf")) > now:
            continue
        kind, micro_batch, chunk = operation
        share = 1 if shares is None else shares[chunk * stages + stage]
        duration = forward[micro_batch] * share / chunks * (backward_factor if kind == "B" else 1)
        end = now + duration
        done.append(Interval(stage, kind, micro_batch, chunk, now, end))
        busy[stage] += duration
        free_at[stage] = end
        position[stage] += 1
        heapq.heappush(events, (end, stage))
        for receiver in range(stages):
            arrival = end if receiver == stage else end + transfer
            arrived[receiver, (operation, stage)] = arrival
            heapq.heappush(events, (arrival, receiver))
    if any(position[stage] < len(lists[stage]) for stage in range(stages)):
        raise PlanError("the pipeline is deadlocked: an operation waits for one that never runs")
    return PipelineRun(
        intervals=tuple(sorted(done, key=lambda one: (one.start, one.stage))),
        makespan=max(free_at),
        busy=tuple(busy),
    )


@dataclass(frozen=True)
class StepTime:
    """Predicted times of one plan, in cost units of one pipeline stage (forward 1, backward 2)."""

    per_rank: tuple[float, ...]
    """Each DP rank by itself: makespan of its pipeline, or sum of its micro-batches."""
    free: float
    """Ranks wait for each other at the end of the step only (plain data parallelism): the slowest rank."""
    lockstep: float
    """Ranks wait for each other at each micro-batch (FSDP, or experts across DP): the slowest rank at each index."""
    step: float
    """As the plan's constraints say: `lockstep_ranks` neighbours at each micro-batch, all ranks at the end."""


def simulate_plan(plan: Plan, *, fixed: float = 0) -> StepTime:
    """Step time of a plan from its micro-batches' costs, with `fixed` added to each (scaled as the plan's costs)."""
    constraints = plan.constraints
    table = plan.costs.reshape(constraints.dp_size, plan.num_micro_batches) / constraints.pp_size + fixed

    def time(costs: Sequence[float]) -> float:
        return simulate_pipeline(
            costs, stages=constraints.pp_size, chunks=constraints.vpp_size, group_size=plan.group_size
        ).makespan

    blocks = table.reshape(-1, constraints.lockstep_ranks, plan.num_micro_batches).max(axis=1)
    per_rank = tuple(time(costs) for costs in table.tolist())
    return StepTime(
        per_rank=per_rank,
        free=max(per_rank),
        lockstep=time(table.max(axis=0).tolist()),
        step=max(time(costs) for costs in blocks.tolist()),
    )
