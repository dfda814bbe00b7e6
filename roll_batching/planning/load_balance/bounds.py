"""What no plan can beat: lower bounds of the largest rank total and of the lockstep cost."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import offsets_of
from roll_batching.planning.problem import PlanProblem


def rank_total_bound(problem: PlanProblem, count: int) -> int:
    """Cost that the costliest rank has at least when every rank runs `count` micro-batches.

    The largest of: the mean; j + 1 of the j * dp + 1 costliest units, which some rank has, for every j; the
    costliest unit with the cheapest of those tokens for which the other ranks have no room; a home's total.
    """
    units, ranks = problem.units, problem.constraints.dp_size
    mean = -(-int(units.costs.sum()) // ranks)
    if problem.at_home:
        return max(mean, int(np.bincount(units.home, weights=units.costs, minlength=ranks).max()))
    running = offsets_of(np.sort(units.costs)[::-1])
    full = np.arange((len(units) - 1) // ranks + 1)
    together = running[full * ranks + 1] - running[full * (ranks - 1)]
    return max(mean, int(together.max()), _giant_bound(problem, count))


def lockstep_bound(problem: PlanProblem, count: int, rank_bound: int) -> int:
    """Sum over `count` indices of the largest cost among the ranks, at least.

    The largest of: `rank_bound`, since no rank's total is above the sum; the units 0, dp, 2 * dp ... by falling cost,
    since the costliest pack of the k-th costliest index costs no less than unit k * dp.
    """
    units, ranks = problem.units, problem.constraints.dp_size
    tops = np.sort(units.costs)[::-1][::ranks][:count]
    return max(rank_bound, 0 if problem.at_home else int(tops.sum()))


def _giant_bound(problem: PlanProblem, count: int) -> int:
    units, constraints = problem.units, problem.constraints
    giant = int(np.argmax(units.costs))
    if constraints.mode != "packed" or units.alone.any():
        return int(units.costs[giant])
    elsewhere = (constraints.dp_size - 1) * count * constraints.usable_tokens
    more = int(units.slots.sum()) - elsewhere - int(units.slots[giant])
    if more <= 0:
        return int(units.costs[giant])
    cheapest = np.argsort(units.costs / units.slots, kind="stable")
    cheapest = cheapest[cheapest != giant]
    whole = int(np.searchsorted(np.cumsum(units.slots[cheapest]), more, side="right"))
    cost = int(units.costs[cheapest[:whole]].sum())
    if whole < len(cheapest):
        part = more - int(units.slots[cheapest[:whole]].sum())
        cost += int(units.costs[cheapest[whole]]) * part // int(units.slots[cheapest[whole]])
    return int(units.costs[giant]) + cost
