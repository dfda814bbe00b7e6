"""Time of a step whose ranks compute packs together and wait for each other inside blocks and groups of ranks."""

from __future__ import annotations

import numpy as np

from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled
from roll_batching.planning.pipeline.ordering import Shares, times_of_chunks
from roll_batching.planning.pipeline.schedule import StaticSchedule


def columns_makespan(
    columns: Ints, first_ranks: Ints, sizes: Ints, times: Ints, ranks: int, width: int, schedule: StaticSchedule
) -> int:
    """Makespan of packs in `columns` (int64[packs], ascending), with `times` as the times of forward passes.

    Every rank has a pack in each column. Ranks start and end each pass of a column together with the ranks of their
    block, and with those of their group of `width` consecutive ranks. A backward pass takes twice as long as a forward
    pass; transfers between stages are free.
    """
    order = np.lexsort((first_ranks, columns))
    return int(
        _run_columns(
            columns[order],
            first_ranks[order],
            sizes[order],
            times[order],
            ranks,
            width,
            schedule.micro_batch,
            schedule.backward,
            schedule.previous,
            schedule.awaited,
        )
    )


@compiled
def assign_ranks(columns: Ints, levels: Ints, times: Ints, ranks: int) -> Ints:
    """First rank of each pack (int64[packs]), packs by column, then by falling level and falling time.

    Blocks are aligned. A block goes to the ranks with the least time so far.
    """
    firsts = np.zeros(len(columns), dtype=np.int64)
    loads = np.zeros(ranks, dtype=np.int64)
    last_column = np.full(ranks, -1, dtype=np.int64)
    for pack in range(len(columns)):
        size = 1 << levels[pack]
        best, best_load = -1, 0
        for first in range(0, ranks - size + 1, size):
            load, is_free = 0, True
            for rank in range(first, first + size):
                if last_column[rank] == columns[pack]:
                    is_free = False
                    break
                load = max(load, loads[rank])
            if is_free and (best < 0 or load < best_load):
                best, best_load = first, load
        firsts[pack] = best
        for rank in range(best, best + size):
            last_column[rank] = columns[pack]
            loads[rank] = best_load + times[pack]
    return firsts


@compiled
def _run_columns(
    columns: Ints,
    first_ranks: Ints,
    sizes: Ints,
    times: Ints,
    ranks: int,
    width: int,
    micro_batch: Ints,
    backward: Ints,
    previous: Ints,
    awaited: Ints,
) -> int:
    """`columns_makespan` with the columns of a `StaticSchedule`, which has one entry per operation."""
    count = columns[len(columns) - 1] + 1
    part_end, part_time = np.zeros(len(columns), dtype=np.int64), np.zeros(len(columns), dtype=np.int64)
    parts = _part_columns(columns, first_ranks, sizes, times, width, part_end, part_time)
    stage_of = np.zeros(len(previous), dtype=np.int64)
    stages = 0
    for operation in range(len(previous)):
        if previous[operation] < 0:
            stage_of[operation] = stages
            stages += 1
        else:
            stage_of[operation] = stage_of[previous[operation]]
    most_parts = 0
    for column in range(count):
        most_parts = max(most_parts, parts[column + 1] - parts[column])
    free = np.zeros((stages, ranks), dtype=np.int64)
    ends = np.zeros((len(previous), most_parts), dtype=np.int64)
    latest = 0
    for operation in range(len(previous)):
        column, stage = micro_batch[operation], stage_of[operation]
        rank = 0
        for part in range(parts[column], parts[column + 1]):
            place = part - parts[column]
            start = 0
            if awaited[operation] >= 0:
                start = ends[awaited[operation], place]
            for member in range(rank, part_end[part]):
                start = max(start, free[stage, member])
            end = start + (part_time[part] << backward[operation])  # a backward pass takes twice as long
            for member in range(rank, part_end[part]):
                free[stage, member] = end
            rank = part_end[part]
            ends[operation, place] = end
            latest = max(latest, end)
    return latest


@compiled
def _part_columns(
    columns: Ints, first_ranks: Ints, sizes: Ints, times: Ints, width: int, part_end: Ints, part_time: Ints
) -> Ints:
    """Divides each column into parts of ranks that wait for each other; returns where the parts of a column start.

    Column c has the parts result[c] to result[c + 1] - 1. Writes the last rank + 1 (`part_end`) and the time
    (`part_time`) of each part.
    """
    parts = np.zeros(columns[len(columns) - 1] + 2, dtype=np.int64)
    count = 0
    for pack in range(len(columns)):
        starts_column = pack == 0 or columns[pack] != columns[pack - 1]
        # Neighbouring blocks that share a group of ranks wait for each other.
        if starts_column or first_ranks[pack] % width == 0:
            count += 1
        part_end[count - 1] = first_ranks[pack] + sizes[pack]
        part_time[count - 1] = max(times[pack], part_time[count - 1])
        parts[columns[pack] + 1] = count
    return parts


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
    passes_left = 2 * stages * counts.sum()
    while passes_left > 0:
        before = passes_left
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
                        passes_left -= 1
        if passes_left == before:
            return -1
    latest: int = free.max()
    return latest


@compiled
def _pass_at(position: int, count: int, most_warm_up: int) -> tuple[int, int]:
    """(whether backward, index) of a pass of a 1F1B stage with `count` micro-batches."""
    warm_up = min(most_warm_up, count)
    if position < warm_up:
        return 0, position
    # After the warm-up forward and backward passes alternate: the forward passes left, with as many backward passes.
    steady = position - warm_up
    if steady < 2 * (count - warm_up):
        return (0, warm_up + steady // 2) if steady % 2 == 0 else (1, steady // 2)
    return 1, position - count
