"""`plan_step`: from lengths to a plan."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.costs import DEFAULT_COST
from roll_batching.planning.inputs import prepare_inputs
from roll_batching.planning.packed import plan_packed
from roll_batching.planning.plan import Plan
from roll_batching.planning.rectangles import plan_rectangles


def plan_step(
    lengths: ArrayLike,
    constraints: PlanConstraints,
    *,
    cost: Any = None,
    ids: ArrayLike | None = None,
    group_ids: ArrayLike | None = None,
    home_rank: ArrayLike | None = None,
    location: ArrayLike | None = None,
) -> Plan:
    """Plan one optimizer step (or one forward pass) over `lengths`.

    Args:
        lengths: int[n], tokens of each sample, at least 1.
        constraints: layout, cap, algorithm.
        cost: a cost model (`CostModel`); None takes `DEFAULT_COST`.
        ids: int[n], unique global ids; None numbers the samples.
        group_ids: int[n]; samples with equal values share one micro-batch.
        home_rank: int[n], the DP rank where each sample stays; None lets the planner place it.
        location: int[n], the DP rank that holds each sample's data now; only carried.

    Pure: equal arguments give equal plans on every machine. Raises `PlanError` when no valid plan exists.
    """
    inputs = prepare_inputs(
        lengths,
        constraints,
        cost=DEFAULT_COST if cost is None else cost,
        ids=ids,
        group_ids=group_ids,
        home_rank=home_rank,
        location=location,
    )
    return plan_packed(inputs) if constraints.mode == "packed" else plan_rectangles(inputs)
