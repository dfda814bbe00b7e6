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
from roll_batching.planning.dynamic_cp.choices import PlacedPacks, SizeChoices
from roll_batching.planning.dynamic_cp.columns import place_columns
from roll_batching.planning.dynamic_cp.nested import place_in_pipeline, place_nested
from roll_batching.planning.load_balance.planner import balance
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.pipeline.ordering import step_cost
from roll_batching.planning.plan_arrays import PackBlocks, sort_blocks
from roll_batching.planning.problem import PlanProblem

CLOSE_TO_MEAN = 25
"""Nested blocks are kept without a search of columns if their step exceeds the mean time of ranks by at most 1/n."""


def place_blocks(problem: PlanProblem, times: PackTimes) -> tuple[Ints, Ints, PackBlocks]:
    """(units by pack, offsets of packs, blocks of packs) with a short predicted step."""
    constraints = problem.constraints
    choices = SizeChoices.of(problem, times)
    fixed_size, fixed = _best_fixed(problem, choices)
    candidates = [packs for packs in (fixed, _search(problem, choices)) if packs is not None]
    if not candidates:
        raise PlanError(
            f"no single context-parallel size up to max_cp_size={constraints.max_cp_size} holds every sample and group "
            "below the cap, and pipelines of unequal stages with virtual stages or experts have one size: raise "
            "max_tokens"
        )
    best = min(candidates, key=lambda packs: packs.step_time)
    return _blocks_of(best, choices, constraints.dp_size, fixed_size, 0 if fixed is None else fixed.step_time)


def place_single_sizes(problem: PlanProblem, times: PackTimes) -> dict[int, tuple[Ints, Ints, PackBlocks]]:
    """`place_blocks` with one size for all packs, by each size that holds every unit."""
    constraints = problem.constraints
    choices = SizeChoices.of(problem, times)
    placed = {}
    for level, size in enumerate(choices.sizes.tolist()):
        if _admits_all(constraints, choices, level):
            packs = plan_fixed(problem, choices, level)
            placed[size] = _blocks_of(packs, choices, constraints.dp_size, size, packs.step_time)
    return placed


def _blocks_of(
    packs: PlacedPacks, choices: SizeChoices, ranks: int, fixed_size: int, fixed_time: int
) -> tuple[Ints, Ints, PackBlocks]:
    """(units by pack, offsets of packs, blocks of packs) of `packs`, with fillers; `fixed_*`: the best single size."""
    packs = _with_fillers(packs, choices, ranks)
    first_ranks = np.array(packs.first_ranks, dtype=np.int64)
    levels = np.array(packs.levels, dtype=np.int64)
    order = sort_blocks(first_ranks, choices.sizes[levels])
    members = [packs.units[pack] for pack in order.tolist()]
    units = np.array([unit for pack in members for unit in pack], dtype=np.int64)
    blocks = PackBlocks(
        first_ranks=first_ranks[order],
        cp_sizes=choices.sizes[levels[order]],
        times=choices.pack_times(packs)[order],
        step_time=packs.step_time,
        fixed_cp_size=fixed_size,
        fixed_step_time=fixed_time,
    )
    return units, offsets_of(np.array([len(pack) for pack in members], dtype=np.int64)), blocks


def _search(problem: PlanProblem, choices: SizeChoices) -> PlacedPacks | None:
    """Packs of several sizes: in columns where all ranks need equal numbers of packs, otherwise also on nested blocks.

    Returns None if columns are needed and pipeline stages differ in cost: the search of columns assumes equal stages.
    """
    constraints, shares = problem.constraints, problem.chunk_shares
    ranks = constraints.dp_size
    needs_columns = constraints.interleaved or constraints.meets_at_every_index
    if constraints.pp_size > 1:
        if shares is not None:
            return None if needs_columns else place_in_pipeline(choices, ranks, constraints.pp_size, shares)
        columns = place_columns(choices, constraints)
        if needs_columns:
            return columns
        nested = place_in_pipeline(choices, ranks, constraints.pp_size)
    elif needs_columns:
        return place_columns(choices, constraints)
    else:
        nested = place_nested(choices, ranks)
        if nested.step_time * CLOSE_TO_MEAN <= choices.least_mean(ranks) * (CLOSE_TO_MEAN + 1):
            return nested  # no step is shorter than the mean of ranks, so columns could gain little
        columns = place_columns(choices, constraints)
    return min(nested, columns, key=lambda packs: packs.step_time)


def _best_fixed(problem: PlanProblem, choices: SizeChoices) -> tuple[int, PlacedPacks | None]:
    """The single size whose step is predicted to be shortest, of equals the smallest, with the packs of its plan.

    (1, None) where no size holds every unit below the cap.
    """
    constraints = problem.constraints
    best_size, best = 1, None
    for level, size in enumerate(choices.sizes.tolist()):
        if not _admits_all(constraints, choices, level):
            continue
        if best is not None and int(choices.times[level].sum()) * size // constraints.dp_size > best.step_time:
            continue  # the mean time of a rank alone is longer
        packs = plan_fixed(problem, choices, level)
        if best is None or packs.step_time < best.step_time:
            best_size, best = size, packs
    return best_size, best


def _admits_all(constraints: PlanConstraints, choices: SizeChoices, level: int) -> bool:
    """Whether every unit, and the smallest pack, fit packs of one size."""
    size = int(choices.sizes[level])
    alignment = math.lcm(constraints.pack_alignment_of(size), constraints.sequence_alignment_of(size))
    return bool(choices.fits[level].all() and choices.caps[level] >= alignment)


def plan_fixed(problem: PlanProblem, choices: SizeChoices, level: int) -> PlacedPacks:
    """Packs of a plan with one context-parallel size."""
    constraints, size = problem.constraints, int(choices.sizes[level])
    meets_once = constraints.pp_size == 1 and constraints.lockstep_ranks == 1
    one_size = replace(
        constraints,
        dp_size=constraints.dp_size // size,
        cp_size=size,
        max_tokens=(constraints.max_tokens or 0) * size,
        max_cp_size=1,
        # Where ranks meet once per step, the costliest rank is the time of the step.
        objective="rank_total" if meets_once else constraints.objective,
    )
    fixed_cost = int(choices.fixed[level])
    units = replace(problem.units, slots=choices.slots[level], costs=choices.times[level])
    placement = balance(replace(problem, constraints=one_size, units=units, fixed_cost=fixed_cost))
    count = placement.count
    members = [
        placement.units[placement.offsets[m] : placement.offsets[m + 1]].tolist()
        for m in range(len(placement.offsets) - 1)
    ]
    times = choices.times_of(members, np.full(len(members), level)).reshape(-1, count)
    step_time = step_cost(times, one_size, problem.chunk_shares)
    if constraints.pp_size > 1:
        step_time = step_time // 3 // constraints.vpp_size  # of a pack's time a third is the forward pass
    return PlacedPacks(
        units=members,
        first_ranks=[m // count * size for m in range(len(members))],
        levels=[level] * len(members),
        step_time=step_time,
    )


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
