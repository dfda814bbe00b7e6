"""`plan_step`: from lengths to a plan, whatever the algorithm.

One way for all: the problem is posed, units that may share micro-batches form pools, the algorithm forms each pool's
bins, their number is raised to a legal one, they are given to ranks and indices, and the plan is assembled and checked.
"load_balance" alone answers all of this itself, because count and placement are what it balances.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, Protocol, TypeVar

from numpy.typing import ArrayLike

from roll_batching.planning.assemble import assemble
from roll_batching.planning.batching_spec import load_algorithm
from roll_batching.planning.compiled import compiled_once
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.cost_model import DEFAULT_COST
from roll_batching.planning.forming import PositionPool, pools_of_units
from roll_batching.planning.pipeline.num_micro_batches import legal_count
from roll_batching.planning.placement import (
    Placement,
    blocks_of_ranks,
    columns_of_like_cost,
    in_pipeline_order,
    raise_count,
)
from roll_batching.planning.plan import Plan
from roll_batching.planning.problem import PlanProblem, pose_problem
from roll_batching.planning.registry import Algorithm, algorithm_of

B = TypeVar("B", bound=Sized)


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
    problem = pose_problem(
        lengths,
        constraints,
        cost=DEFAULT_COST if cost is None else cost,
        ids=ids,
        group_ids=group_ids,
        home_rank=home_rank,
        location=location,
    )
    algorithm = algorithm_of(constraints.mode, constraints.algorithm)
    form = load_algorithm(constraints)
    with compiled_once(_kind(problem)):
        placement = form(problem) if algorithm.forms == "placement" else _place(problem, algorithm, form)
    return Plan.of(assemble(problem, placement))


def _kind(problem: PlanProblem) -> str:
    """Plans of one kind run the same compiled code."""
    constraints = problem.constraints
    width = constraints.lockstep_ranks
    blocks = "all" if width == constraints.dp_size else "one" if width == 1 else "some"
    home = "home" if problem.at_home else "anywhere"
    return f"{constraints.mode} {constraints.algorithm} {constraints.pp_size > 1} {blocks} {home}"


def _place(problem: PlanProblem, algorithm: Algorithm, form: Any) -> Placement:
    constraints = problem.constraints
    if algorithm.forms == "order":
        positions = PositionPool(problem, form, in_blocks=algorithm.keeps_order)
        (cuts,), _ = _legal([positions], constraints)
        return positions.place(cuts)
    parts, count = _legal(pools_of_units(problem, form, keeps_order=algorithm.keeps_order), constraints)
    bins = [members for part in parts for members in part]
    if not algorithm.keeps_order:
        bins = columns_of_like_cost(bins, problem.units, constraints, at_home=problem.at_home)
        if constraints.pp_size > 1:
            bins = in_pipeline_order(bins, problem.units, constraints, problem.fixed_cost)
    elif not problem.at_home:
        bins = blocks_of_ranks(bins, constraints.dp_size)
    return Placement.of_bins(bins, count)


class _Pool(Protocol[B]):
    """What may share micro-batches: `UnitPool` or `PositionPool`."""

    @property
    def ranks(self) -> int: ...
    def form(self) -> list[B]: ...
    def weight(self, one: B, /) -> int: ...
    def split(self, one: B, /) -> tuple[B, B]: ...
    def filler(self) -> B: ...


def _legal(pools: Sequence[_Pool[B]], constraints: PlanConstraints) -> tuple[list[list[B]], int]:
    """The micro-batches of every pool, raised to the smallest legal number per rank, and this number."""
    formed = [pool.form() for pool in pools]
    needed = max(-(-len(bins) // pool.ranks) for pool, bins in zip(pools, formed, strict=True))
    count = legal_count(needed, constraints)
    raised = [
        raise_count(bins, count * pool.ranks, pool.weight, pool.split, pool.filler)
        for pool, bins in zip(pools, formed, strict=True)
    ]
    return raised, count
