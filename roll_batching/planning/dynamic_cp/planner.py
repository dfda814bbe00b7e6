"""Chooses blocks of ranks and context-parallel sizes for the packs of a step, by predicted times.

The single sizes that the longest sequence admits are planned first, by the planner of plans with one size. Where ranks
wait for each other only inside a block and at the end of the step, packs on nested blocks compete with the best of
them; the shortest predicted step wins.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.nested import PlacedPacks, place_nested
from roll_batching.planning.load_balance.planner import balance
from roll_batching.planning.pack_blocks import PackBlocks, sort_blocks
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.pipeline.num_micro_batches import group_size_of
from roll_batching.planning.pipeline.ordering import slowest_makespan
from roll_batching.planning.problem import PlanProblem


def place_blocks(problem: PlanProblem, times: PackTimes) -> tuple[Ints, Ints, PackBlocks]:
    """(units by pack, offsets of packs, blocks of packs) with a short predicted step."""
    constraints = problem.constraints
    choices = SizeChoices.of(problem, times)
    fixed_size, best, time = _best_fixed(problem, choices)
    fixed_time = time
    if constraints.lockstep_ranks == 1 and constraints.pp_size == 1:
        nested = place_nested(choices, constraints.dp_size)
        if nested.step_time < time:
            best, time = nested, nested.step_time
    best = _with_fillers(best, constraints.dp_size)
    first_ranks = np.array(best.first_ranks, dtype=np.int64)
    levels = np.array(best.levels, dtype=np.int64)
    order = sort_blocks(first_ranks, choices.sizes[levels])
    members = [best.units[pack] for pack in order.tolist()]
    units = np.array([unit for pack in members for unit in pack], dtype=np.int64)
    pack_times = [_pack_time(choices, pack, int(level)) for pack, level in zip(members, levels[order], strict=True)]
    blocks = PackBlocks(
        first_ranks=first_ranks[order],
        cp_sizes=choices.sizes[levels[order]],
        times=np.array(pack_times, dtype=np.int64),
        step_time=time,
        fixed_cp_size=fixed_size,
        fixed_step_time=fixed_time,
    )
    return units, offsets_of(np.array([len(pack) for pack in members], dtype=np.int64)), blocks


def _pack_time(choices: SizeChoices, units: list[int], level: int) -> int:
    return max(int(choices.fixed[level] + choices.times[level][units].sum()), choices.floor)


def _best_fixed(problem: PlanProblem, choices: SizeChoices) -> tuple[int, PlacedPacks, int]:
    """(size, packs, time of the step) of the best single size that all units fit; of equals the smallest."""
    best: tuple[int, PlacedPacks, int] | None = None
    for level in range(int(choices.smallest.max()), len(choices.sizes)):
        packs, time = _plan_fixed(problem, choices, level)
        if best is None or time < best[2]:
            best = int(choices.sizes[level]), packs, time
    assert best is not None  # every unit fits the largest size
    return best


def _plan_fixed(problem: PlanProblem, choices: SizeChoices, level: int) -> tuple[PlacedPacks, int]:
    """Packs of a plan with one context-parallel size, and the time of its step."""
    constraints, size = problem.constraints, int(choices.sizes[level])
    one_size = replace(
        constraints,
        dp_size=constraints.dp_size // size,
        cp_size=size,
        max_tokens=(constraints.max_tokens or 0) * size,
        max_cp_size=1,
    )
    fixed_cost = int(choices.fixed[level])
    units = replace(problem.units, slots=choices.slots[level], costs=choices.times[level])
    placement = balance(replace(problem, constraints=one_size, units=units, fixed_cost=fixed_cost))
    count = placement.count
    members = [
        placement.units[placement.offsets[m] : placement.offsets[m + 1]].tolist()
        for m in range(len(placement.offsets) - 1)
    ]
    table = np.array([_pack_time(choices, pack, level) for pack in members], dtype=np.int64).reshape(-1, count)
    packs = PlacedPacks(
        units=members,
        first_ranks=[m // count * size for m in range(len(members))],
        levels=[level] * len(members),
        loads=np.repeat(table.sum(axis=1), size),
    )
    return packs, _step_time(table, one_size)


def _step_time(table: Ints, constraints: PlanConstraints) -> int:
    """Nanoseconds of a step from those of micro-batches by DP rank and index."""
    maxima = table.reshape(-1, constraints.lockstep_ranks, table.shape[1]).max(axis=1)
    if constraints.pp_size == 1:
        return int(maxima.sum(axis=1).max())
    makespan = slowest_makespan(
        maxima,
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=group_size_of(table.shape[1], constraints),
    )
    return makespan // 3 // constraints.vpp_size  # of a pack's time a third is the forward pass


def _with_fillers(packs: PlacedPacks, ranks: int) -> PlacedPacks:
    """`packs` with a filler for every rank without a pack."""
    covered = np.zeros(ranks, dtype=bool)
    covered[packs.loads > 0] = True
    idle = np.flatnonzero(~covered).tolist()
    return replace(
        packs,
        units=[*packs.units, *([] for _ in idle)],
        first_ranks=[*packs.first_ranks, *idle],
        levels=[*packs.levels, *(0 for _ in idle)],
    )
