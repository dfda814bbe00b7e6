"""Packs on nested blocks of ranks in a pipeline without virtual stages.

A block computes a pack jointly on each stage. Its ranks may have different numbers of packs: the packs of a block stand
before those of smaller blocks, so all its ranks compute them at the same index.
"""

from __future__ import annotations

import itertools

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.nested import FORMS, levels_by_target, place_levels
from roll_batching.planning.dynamic_cp.placed import PlacedPacks
from roll_batching.planning.pipeline.ordering import Shares, times_of_chunks

CAPS = (100, 50, 25)
"""Caps of packs that are tried, in percent: smaller packs fill the pipeline better and pay more fixed costs."""
TARGETS = (None, 0.3, 0.12)
"""Longest times of a unit that are tried, in parts of the time of a rank."""
ORDERS = (1, -1)
"""Packs of a block by rising or falling time."""


def place_in_pipeline(choices: SizeChoices, ranks: int, stages: int, shares: Shares | None = None) -> PlacedPacks:
    """The placement with the shortest makespan among several caps, sizes and orders."""
    best: PlacedPacks | None = None
    for target in TARGETS:
        levels = choices.smallest if target is None else levels_by_target(choices, ranks, target)
        for percent, (full_from, fill) in itertools.product(CAPS, FORMS):
            packs = place_levels(choices, ranks, levels, full_from, fill, cap_percent=percent)
            for direction in ORDERS:
                ordered = _in_order(packs, choices, direction, ranks, stages, shares)
                if best is None or ordered.step_time < best.step_time:
                    best = ordered
    assert best is not None
    return best


def _in_order(
    packs: PlacedPacks, choices: SizeChoices, direction: int, ranks: int, stages: int, shares: Shares | None
) -> PlacedPacks:
    """Packs with those of each block by rising or falling time, and the makespan."""
    times = choices.pack_times(packs)
    firsts, levels = np.array(packs.first_ranks, dtype=np.int64), np.array(packs.levels, dtype=np.int64)
    order = np.lexsort((direction * times, firsts, -levels))
    span = joint_makespan(firsts[order], choices.sizes[levels[order]], times[order], ranks, stages, shares)
    return PlacedPacks(
        units=[packs.units[pack] for pack in order.tolist()],
        first_ranks=firsts[order].tolist(),
        levels=levels[order].tolist(),
        step_time=span,
    )


def joint_makespan(
    first_ranks: Ints, sizes: Ints, times: Ints, ranks: int, stages: int, shares: Shares | None = None
) -> int:
    """Nanoseconds of 1F1B over all ranks, int64[packs] each, in an order that every rank follows.

    `times` are those of a stage of mean cost, of which each stage takes its share. A third of a pack's time is its
    forward pass. Ranks of a block start a pass together; transfers between stages are free. Ranks without a pack are
    left out.
    """
    counts = np.zeros(ranks, dtype=np.int64)
    for first, size in zip(first_ranks.tolist(), sizes.tolist(), strict=True):
        counts[first : first + size] += 1
    lists = np.full((ranks, int(counts.max(initial=0))), -1, dtype=np.int64)
    filled = np.zeros(ranks, dtype=np.int64)
    for pack, (first, size) in enumerate(zip(first_ranks.tolist(), sizes.tolist(), strict=True)):
        for rank in range(first, first + size):
            lists[rank, filled[rank]] = pack
            filled[rank] += 1
    by_stage = times_of_chunks(times, shares if shares is not None else (1.0,) * stages)
    return int(_run_joint(lists, counts, first_ranks, sizes, by_stage))


@compiled
def _run_joint(lists: Ints, counts: Ints, first_ranks: Ints, sizes: Ints, times: Ints) -> int:
    """Makespan of the passes of all ranks and stages; -1 if ranks wait for each other in a circle."""
    ranks, stages = len(counts), len(times)
    position = np.zeros((ranks, stages), dtype=np.int64)
    free = np.zeros((ranks, stages), dtype=np.int64)
    ends = np.full((2, times.shape[1], stages), -1, dtype=np.int64)
    left = 2 * stages * counts.sum()
    while left > 0:
        before = left
        for rank in range(ranks):
            for stage in range(stages):
                while position[rank, stage] < 2 * counts[rank]:
                    is_backward, index = _pass_at(position[rank, stage], counts[rank], stages - stage - 1)
                    pack = lists[rank, index]
                    first, last = first_ranks[pack], first_ranks[pack] + sizes[pack]
                    start, ready = 0, True
                    for member in range(first, last):
                        if position[member, stage] >= 2 * counts[member]:
                            ready = False
                            break
                        other, place = _pass_at(position[member, stage], counts[member], stages - stage - 1)
                        if other != is_backward or lists[member, place] != pack:
                            ready = False
                            break
                        start = max(start, free[member, stage])
                    if not ready:
                        break
                    awaited = 0
                    if is_backward == 0 and stage > 0:
                        awaited = ends[0, pack, stage - 1]
                    elif is_backward == 1:
                        awaited = ends[1, pack, stage + 1] if stage < stages - 1 else ends[0, pack, stage]
                    if awaited < 0:
                        break
                    forward = times[stage, pack] // 3
                    end = max(start, awaited) + (times[stage, pack] - forward if is_backward else forward)
                    ends[is_backward, pack, stage] = end
                    for member in range(first, last):
                        free[member, stage] = end
                        position[member, stage] += 1
                        left -= 1
        if left == before:
            return -1
    latest: int = free.max()
    return latest


@compiled
def _pass_at(position: int, count: int, most_warm_up: int) -> tuple[int, int]:
    """(whether backward, index) of a pass of a 1F1B stage with `count` micro-batches."""
    warm_up = min(most_warm_up, count)
    if position < warm_up:
        return 0, position
    steady = position - warm_up
    if steady < 2 * (count - warm_up):
        return (0, warm_up + steady // 2) if steady % 2 == 0 else (1, steady // 2)
    return 1, position - count
