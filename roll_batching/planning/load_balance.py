"""Algorithm "load_balance": few packs under the hard cap, balanced for the topology's objective."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrange import home_groups, lockstep_groups, small_at_ends
from roll_batching.planning.counts import count_by_makespan, legal_count
from roll_batching.planning.first_fit import descending, first_fit
from roll_batching.planning.inputs import Ints, PlanInputs


def balance_units(inputs: PlanInputs) -> tuple[Ints, Ints, int]:
    """Units in micro-batch order, offsets (int64[dp*K + 1], rank-major) and K."""
    constraints = inputs.constraints
    units = inputs.units
    dp_size = constraints.dp_size
    cap = constraints.usable_tokens
    pooled = not np.any(units.home >= 0)
    pools = (
        [np.arange(len(units))] if pooled else [np.flatnonzero(units.home == rank) for rank in range(dp_size)]
    )
    first = [_first_fit_decreasing(inputs, pool, cap) for pool in pools]
    needed = max(int(bins.max(initial=-1)) + 1 for bins in first)
    parts = dp_size if pooled else 1
    least = -(-needed // parts)
    count = legal_count(least, constraints)
    if constraints.pp_size > 1:
        most = max(-(-len(pool) // parts) for pool in pools)
        work = max(-(-int(units.costs[pool].sum()) // parts) for pool in pools)
        count = count_by_makespan(count, most, work, int(units.costs.max()), inputs.fixed_cost, constraints)
    assigned = np.empty(len(units), dtype=np.int64)
    for index, (pool, bins) in enumerate(zip(pools, first, strict=True)):
        spread = _spread(inputs, pool, bins, count * parts, cap)
        assigned[pool] = spread + index * count * parts
    costs = np.bincount(assigned, weights=units.costs, minlength=count * dp_size).astype(np.int64)
    table = lockstep_groups(costs, dp_size) if pooled else home_groups(costs, dp_size)
    if constraints.pp_size > 1:
        table = table[:, small_at_ends(costs[table].max(axis=0))]
    place = np.empty(count * dp_size, dtype=np.int64)
    place[table.reshape(-1)] = np.arange(count * dp_size)
    final = place[assigned]
    order = np.argsort(final, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(final, minlength=count * dp_size))])
    return order, offsets.astype(np.int64), count


def _first_fit_decreasing(inputs: PlanInputs, pool: Ints, cap: int) -> Ints:
    sizes = inputs.units.slots[pool]
    return first_fit(sizes, descending(sizes), cap)


def _spread(inputs: PlanInputs, pool: Ints, bins: Ints, target: int, cap: int) -> Ints:
    """Bins 0 to target - 1 for `pool`, near-equal in cost, none above the cap.

    The costliest unit goes to the cheapest micro-batch with room; where a unit finds none, first-fit's own
    bins are kept and the costliest of them split.
    """
    costs, slots = inputs.units.costs[pool], inputs.units.slots[pool]
    load = np.zeros(target, dtype=np.int64)
    room = np.full(target, cap, dtype=np.int64)
    assigned = np.empty(len(pool), dtype=np.int64)
    for unit in descending(costs):
        if slots[unit] > cap:
            free = np.flatnonzero(room == cap)
        else:
            free = np.flatnonzero(room >= slots[unit])
        if not len(free):
            break
        chosen = free[np.argmin(load[free])]
        assigned[unit] = chosen
        load[chosen] += costs[unit]
        room[chosen] -= slots[unit]
    else:
        return assigned
    assigned = bins.copy()
    load = np.bincount(assigned, weights=costs, minlength=target).astype(np.int64)
    sizes = np.bincount(assigned, minlength=target)
    for new in range(int(assigned.max()) + 1, target):
        splittable = np.flatnonzero(sizes > 1)
        if not len(splittable):
            break
        heaviest = splittable[np.argmax(load[splittable])]
        members = np.flatnonzero(assigned == heaviest)
        moved = members[descending(costs[members])][1::2]
        assigned[moved] = new
        load[new] = costs[moved].sum()
        load[heaviest] -= load[new]
        sizes[new], sizes[heaviest] = len(moved), sizes[heaviest] - len(moved)
    return assigned
