"""Plans in which all packs have one context-parallel size, to compare with sizes per pack."""

from __future__ import annotations

from numpy.typing import ArrayLike

from roll_batching.planning.assemble import assemble_blocks
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.cost_model import DEFAULT_COST
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.planner import admits_all, blocks_of, plan_fixed
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.plan import Plan
from roll_batching.planning.prefixes import SharedPrefixes
from roll_batching.planning.problem import build_problem


def plans_of_one_size(
    lengths: ArrayLike, constraints: PlanConstraints, *, times: PackTimes, prefixes: SharedPrefixes | None = None
) -> dict[int, Plan]:
    """Plan of each size up to `max_cp_size` whose packs hold every sample, by size.

    They are the plans that `plan_step` compares sizes per pack with, in the same form: `report.predicted_seconds` are
    comparable. Raises `PlanError` as `plan_step` does.
    """
    problem = build_problem(lengths, constraints, cost=DEFAULT_COST, prefixes=prefixes)
    choices = SizeChoices.of(problem, times)
    plans = {}
    for level, size in enumerate(choices.sizes.tolist()):
        if admits_all(constraints, choices, level):
            packs = plan_fixed(problem, choices, level)
            placed = blocks_of(packs, choices, constraints.dp_size, size, packs.step_time)
            plans[size] = Plan.of(assemble_blocks(problem, *placed))
    return plans
