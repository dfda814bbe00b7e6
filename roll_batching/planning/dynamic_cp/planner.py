"""Chooses blocks of ranks and context-parallel sizes for the packs of a step, by predicted times.

The single sizes that the longest sequence admits are planned first, by the planner of plans with one size. Packs of
several sizes compete with the best of them; the shortest predicted step wins.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.columns import place_columns
from roll_batching.planning.dynamic_cp.nested import place_nested
from roll_batching.planning.dynamic_cp.pipelines import place_in_pipeline
from roll_batching.planning.dynamic_cp.placed import PlacedPacks
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
    fixed_size, fixed = _best_fixed(problem, choices)
    found = [packs for packs in (fixed, _search(problem, choices)) if packs is not None]
    if not found:
        raise PlanError(
            f"no single context-parallel size up to max_cp_size={constraints.max_cp_size} holds every sample and group "
            "below the cap, and pipelines with virtual stages or experts have one size: raise max_tokens"
        )
    best = _with_fillers(min(found, key=lambda packs: packs.step_time), choices, constraints.dp_size)
    first_ranks = np.array(best.first_ranks, dtype=np.int64)
    levels = np.array(best.levels, dtype=np.int64)
    order = sort_blocks(first_ranks, choices.sizes[levels])
    members = [best.units[pack] for pack in order.tolist()]
    times_of_packs = choices.pack_times(best)
    units = np.array([unit for pack in members for unit in pack], dtype=np.int64)
    blocks = PackBlocks(
        first_ranks=first_ranks[order],
        cp_sizes=choices.sizes[levels[order]],
        times=times_of_packs[order],
        step_time=best.step_time,
        fixed_cp_size=fixed_size,
        fixed_step_time=0 if fixed is None else fixed.step_time,
    )
    return units, offsets_of(np.array([len(pack) for pack in members], dtype=np.int64)), blocks


def _search(problem: PlanProblem, choices: SizeChoices) -> PlacedPacks | None:
    """Packs of several sizes; None for layouts without a search: pipelines with virtual stages or lockstep ranks."""
    constraints = problem.constraints
    ranks = constraints.dp_size
    if constraints.pp_size > 1:
        if constraints.interleaved or constraints.meets_at_every_index:
            return None
        return place_in_pipeline(choices, ranks, constraints.pp_size, problem.chunk_shares)
    return place_columns(choices, ranks) if constraints.meets_at_every_index else place_nested(choices, ranks)


def _best_fixed(problem: PlanProblem, choices: SizeChoices) -> tuple[int, PlacedPacks | None]:
    """The single size whose step is predicted to be shortest, of equals the smallest, with the packs of its plan.

    (1, None) where no size holds every unit below the cap.
    """
    constraints = problem.constraints
    best_size, best = 1, None
    for level, size in enumerate(choices.sizes.tolist()):
        alignment = math.lcm(constraints.pack_alignment_of(size), constraints.sequence_alignment_of(size))
        if not choices.fits[level].all() or choices.caps[level] < alignment:
            continue
        if best is not None and int(choices.times[level].sum()) * size // constraints.dp_size > best.step_time:
            continue  # the mean time of a rank alone is longer
        packs = plan_fixed(problem, choices, level)
        if best is None or packs.step_time < best.step_time:
            best_size, best = size, packs
    return best_size, best


def plan_fixed(problem: PlanProblem, choices: SizeChoices, level: int) -> PlacedPacks:
    """Packs of a plan with one context-parallel size."""
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
    table = choices.times_of(members, np.full(len(members), level)).reshape(-1, count)
    return PlacedPacks(
        units=members,
        first_ranks=[m // count * size for m in range(len(members))],
        levels=[level] * len(members),
        step_time=_step_time(table, one_size, problem.chunk_shares),
    )


def _step_time(table: Ints, constraints: PlanConstraints, shares: tuple[float, ...] | None) -> int:
    """Nanoseconds of a step from those of micro-batches by DP rank and index."""
    maxima = table.reshape(-1, constraints.lockstep_ranks, table.shape[1]).max(axis=1)
    if constraints.pp_size == 1:
        return int(maxima.sum(axis=1).max())
    makespan = slowest_makespan(
        maxima,
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=group_size_of(table.shape[1], constraints),
        shares=shares,
    )
    return makespan // 3 // constraints.vpp_size  # of a pack's time a third is the forward pass


def _with_fillers(packs: PlacedPacks, choices: SizeChoices, ranks: int) -> PlacedPacks:
    """`packs` with a filler for every rank without a pack."""
    covered = np.zeros(ranks, dtype=bool)
    for first, level in zip(packs.first_ranks, packs.levels, strict=True):
        covered[first : first + int(choices.sizes[level])] = True
    idle = np.flatnonzero(~covered).tolist()
    return replace(
        packs,
        units=[*packs.units, *([] for _ in idle)],
        first_ranks=[*packs.first_ranks, *idle],
        levels=[*packs.levels, *(0 for _ in idle)],
    )
