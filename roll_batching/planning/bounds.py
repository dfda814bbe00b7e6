"""Lower bounds of the largest rank total and of the lockstep cost."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of


def rank_total_bound(costs: Ints, slots: Ints, ranks: int, room: int | None) -> int:
    """Lower bound of the largest rank total, for indivisible units with `costs` and `slots` (int64[n]).

    The largest of: the mean; for each j, the cheapest j + 1 of the j * ranks + 1 costliest units, since some rank has
    j + 1 of them; the costliest unit together with the cheapest slots that the other ranks have no room for. `room` is
    the number of tokens that one rank can hold in all its micro-batches; None: not limited.
    """
    mean = -(-int(costs.sum()) // ranks)
    running = offsets_of(np.sort(costs)[::-1])
    full = np.arange((len(costs) - 1) // ranks + 1)
    together = running[full * ranks + 1] - running[full * (ranks - 1)]
    giant = 0 if room is None else _giant_bound(costs, slots, (ranks - 1) * room)
    return max(mean, int(together.max()), giant)


def lockstep_bound(costs: Ints, slots: Ints, ranks: int, cap: int | None) -> int:
    """Lower bound of the lockstep cost: the sum over indices of the largest cost among the ranks.

    No two units above half the cap share a pack. By falling cost, an index holds at most `ranks` of them, so the sum of
    their costs 0, ranks, 2 * ranks, ... is a lower bound. `rank_total_bound` is another. 0 without a cap.
    """
    if cap is None:
        return 0
    alone = np.sort(costs[2 * slots > cap])[::-1]
    return int(alone[::ranks].sum())


def _giant_bound(costs: Ints, slots: Ints, elsewhere: int) -> int:
    """Cost of the costliest unit and of the cheapest slots that do not fit `elsewhere` (tokens of other ranks)."""
    giant = int(np.argmax(costs))
    more = int(slots.sum()) - elsewhere - int(slots[giant])
    if more <= 0:
        return int(costs[giant])
    cheapest = np.argsort(costs / slots, kind="stable")
    cheapest = cheapest[cheapest != giant]
    full = int(np.searchsorted(np.cumsum(slots[cheapest]), more, side="right"))
    cost = int(costs[cheapest[:full]].sum())
    if full < len(cheapest):
        part = more - int(slots[cheapest[:full]].sum())
        cost += int(costs[cheapest[full]]) * part // int(slots[cheapest[full]])
    return int(costs[giant]) + cost
