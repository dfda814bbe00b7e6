"""What no plan can beat: lower bounds of the largest rank total and of the lockstep cost."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of


def rank_total_bound(costs: Ints, slots: Ints, ranks: int, room: int | None) -> int:
    """Cost that the costliest rank has at least, of indivisible units with `costs` and `slots` (int64[n]).

    The largest of: the mean; j + 1 of the j * ranks + 1 costliest units, which some rank has, for every j; the
    costliest unit with the cheapest of those slots that the other ranks have no room for. `room` is what one rank can
    hold in all its micro-batches; None where that is not limited.
    """
    mean = -(-int(costs.sum()) // ranks)
    running = offsets_of(np.sort(costs)[::-1])
    full = np.arange((len(costs) - 1) // ranks + 1)
    together = running[full * ranks + 1] - running[full * (ranks - 1)]
    giant = 0 if room is None else _giant_bound(costs, slots, (ranks - 1) * room)
    return max(mean, int(together.max()), giant)


def lockstep_bound(costs: Ints, slots: Ints, ranks: int, cap: int | None) -> int:
    """Sum over indices of the largest cost among the ranks, at least.

    Of units above half the cap no two share a pack: their costs 0, ranks, 2 * ranks ... by falling cost are in sum
    the least that as many indices can begin with. No rank's total is above the sum either (`rank_total_bound`).
    """
    if cap is None:
        return 0
    alone = np.sort(costs[2 * slots > cap])[::-1]
    return int(alone[::ranks].sum())


def _giant_bound(costs: Ints, slots: Ints, elsewhere: int) -> int:
    giant = int(np.argmax(costs))
    more = int(slots.sum()) - elsewhere - int(slots[giant])
    if more <= 0:
        return int(costs[giant])
    cheapest = np.argsort(costs / slots, kind="stable")
    cheapest = cheapest[cheapest != giant]
    whole = int(np.searchsorted(np.cumsum(slots[cheapest]), more, side="right"))
    cost = int(costs[cheapest[:whole]].sum())
    if whole < len(cheapest):
        part = more - int(slots[cheapest[:whole]].sum())
        cost += int(costs[cheapest[whole]]) * part // int(slots[cheapest[whole]])
    return int(costs[giant]) + cost
