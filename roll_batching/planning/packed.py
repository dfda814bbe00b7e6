"""Mode "packed": samples end to end, below the cap."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrange import (
    Bin,
    bin_cost,
    cut_in_order,
    home_groups,
    lockstep_groups,
    raise_count,
    split_in_two,
)
from roll_batching.planning.assemble import assemble_units
from roll_batching.planning.bins import assign_bins, group_by_bin, next_fit
from roll_batching.planning.counts import group_size_of, legal_count
from roll_batching.planning.inputs import Ints, PlanInputs
from roll_batching.planning.load_balance import balance_units
from roll_batching.planning.order import order_for_pipeline
from roll_batching.planning.plan import Plan


def plan_packed(inputs: PlanInputs) -> Plan:
    """A plan of packs by the constraints' algorithm."""
    if inputs.constraints.algorithm == "load_balance":
        order, offsets, count = balance_units(inputs)
        return assemble_units(inputs, order, offsets, count)
    if inputs.constraints.algorithm == "none":
        return _plan_in_order(inputs)
    return _plan_by_packer(inputs)


def _ranks_of(inputs: PlanInputs) -> list[Ints] | None:
    """The units of every rank where they have a home, else None."""
    home = inputs.units.home
    if not np.any(home >= 0):
        return None
    return [np.flatnonzero(home == rank) for rank in range(inputs.constraints.dp_size)]


def _plan_in_order(inputs: PlanInputs) -> Plan:
    """Next-fit in the given order; rank r takes the r-th block, so the order survives from rank to rank."""
    constraints = inputs.constraints
    units = inputs.units
    dp_size = constraints.dp_size

    def fill(pool: Ints) -> list[Bin]:
        if not len(pool):
            return []
        bins = next_fit(units.slots[pool], constraints.usable_tokens)
        return [pool[members].tolist() for members in group_by_bin(bins, np.arange(len(pool)))]

    def grow(bins: list[Bin], target: int) -> list[Bin]:
        return raise_count(bins, target, lambda b: bin_cost(units, b), lambda b: cut_in_order(units, b))

    homes = _ranks_of(inputs)
    if homes is None:
        bins = fill(np.arange(len(units)))
        count = legal_count(-(-len(bins) // dp_size), constraints)
        chosen = _spread_fillers(grow(bins, count * dp_size), dp_size)
    else:
        per_rank = [fill(pool) for pool in homes]
        count = legal_count(max(map(len, per_rank)), constraints)
        chosen = [members for rank in per_rank for members in grow(rank, count)]
    return _assemble(inputs, chosen, count)


def _spread_fillers(bins: list[Bin], dp_size: int) -> list[Bin]:
    """Rank-major blocks with the fillers at the ends of ranks, not all on the last ones."""
    filled = [members for members in bins if members]
    if len(filled) == len(bins):
        return bins
    count = len(bins) // dp_size
    blocks = np.array_split(np.arange(len(filled)), dp_size)
    result: list[Bin] = []
    for block in blocks:
        result.extend(filled[i] for i in block)
        result.extend([] for _ in range(count - len(block)))
    return result


def _plan_by_packer(inputs: PlanInputs) -> Plan:
    """Bins by one of NeMo-RL's packers, then placed so that equal costs meet at equal k."""
    constraints = inputs.constraints
    units = inputs.units
    dp_size = constraints.dp_size
    cap = constraints.usable_tokens

    def fill(pool: Ints) -> list[Bin]:
        inside = pool[~units.alone[pool]]
        single = [[int(unit)] for unit in pool[units.alone[pool]]]
        if not len(inside):
            return single
        bins, order = assign_bins(units.slots[inside], cap, str(constraints.algorithm), seed=constraints.seed)
        return [inside[members].tolist() for members in group_by_bin(bins, order)] + single

    def grow(bins: list[Bin], target: int) -> list[Bin]:
        return raise_count(bins, target, lambda b: bin_cost(units, b), lambda b: split_in_two(units, b))

    homes = _ranks_of(inputs)
    if homes is None:
        bins = fill(np.arange(len(units)))
        count = legal_count(-(-len(bins) // dp_size), constraints)
        bins = grow(bins, count * dp_size)
        table = lockstep_groups(np.array([bin_cost(units, b) for b in bins]), dp_size)
    else:
        per_rank = [fill(pool) for pool in homes]
        count = legal_count(max(map(len, per_rank)), constraints)
        bins = [members for rank in per_rank for members in grow(rank, count)]
        table = home_groups(np.array([bin_cost(units, b) for b in bins]), dp_size)
    if constraints.pp_size > 1:
        largest = np.array([max(bin_cost(units, bins[i]) for i in column) for column in table.T])
        table = table[
            :,
            order_for_pipeline(
                largest + inputs.fixed_cost,
                stages=constraints.pp_size,
                chunks=constraints.vpp_size,
                group_size=group_size_of(count, constraints),
                seed=constraints.seed,
            ),
        ]
    return _assemble(inputs, [bins[i] for i in table.reshape(-1)], count)


def _assemble(inputs: PlanInputs, chosen: list[Bin], count: int) -> Plan:
    offsets = np.concatenate([[0], np.cumsum([len(members) for members in chosen])]).astype(np.int64)
    order = np.array([unit for members in chosen for unit in members], dtype=np.int64)
    return assemble_units(inputs, order, offsets, count)
