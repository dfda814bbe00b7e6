"""Megatron's schedulers of context-parallel sizes, run from their own code, and the time of their schedules.

A schedule is a list of (ranks, lengths, index) in the order of execution.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll_batching.planning import Plan
from roll_batching.planning.pack_times import PackTimes

Schedule = Sequence[tuple[tuple[int, ...], list[int], int]]


def aligned_packs(lengths: np.ndarray, ranks: int, cp_size: int, cap: int) -> Schedule:
    """One size: packs in the given order up to the cap, dealt to ranks in turn (Megatron's dp_balanced)."""
    packs: list[list[int]] = [[]]
    total, unit = 0, 2 * cp_size if cp_size > 1 else 1
    for length in lengths.tolist():
        tokens = -(-length // unit) * unit
        if packs[-1] and total + tokens > cap * cp_size:
            packs.append([])
            total = 0
        packs[-1].append(length)
        total += tokens
    replicas, place = ranks // cp_size, len(packs) - 1
    for _ in range(-len(packs) % replicas):
        while place >= 0 and len(packs[place]) < 2:
            place -= 1
        packs.append([packs[place].pop()] if place >= 0 else [])
    return [
        (tuple(range(i % replicas * cp_size, i % replicas * cp_size + cp_size)), pack, i // replicas)
        for i, pack in enumerate(packs)
    ]


def released(lengths: np.ndarray, ranks: int, cap: int) -> Schedule:
    """`BalancedCPScheduler` of the installed Megatron-Core: each sequence alone, a barrier after every group."""
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    scheduler = BalancedCPScheduler(cap, types.SimpleNamespace(size=lambda: ranks))
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    schedule = []
    for index, per_rank in enumerate(groups):
        members: dict[int, list[int]] = {}
        places: dict[int, int] = {}
        for rank, samples in enumerate(per_rank):
            for place, sample in enumerate(samples):
                members.setdefault(sample, []).append(rank)
                places[sample] = max(places.get(sample, 0), place)
        for sample in sorted(members, key=lambda sample: (places[sample], sample)):
            schedule.append((tuple(members[sample]), [int(lengths[sample])], index))
    return schedule


class Development:
    """The function of Megatron's branch `dev` that forms the groups of `default_dynamic_cp`, from its source file."""

    def __init__(self, source: Path) -> None:
        wanted = {"next_hdp_group_packing_aware", "dcp_gpus_needed", "_DYNAMIC_CP_WORKLOAD_CAP_DELTA"}
        body: list[ast.stmt] = []
        for node in ast.parse(source.read_text()).body:
            name = getattr(node, "name", None)
            if isinstance(node, ast.Assign):
                name = getattr(node.targets[0], "id", None)
            if isinstance(node, ast.Import | ast.ImportFrom) and "torch" not in ast.unparse(node):
                if "megatron" not in ast.unparse(node):
                    body.append(node)
            elif name in wanted:
                body.append(node)
        space: dict[str, Any] = {}
        future = ast.parse("from __future__ import annotations").body
        exec(compile(ast.Module(future + body, []), str(source), "exec"), space)
        self._next_group = space["next_hdp_group_packing_aware"]

    def schedule(self, lengths: np.ndarray, ranks: int, cap: int) -> Schedule:
        """Schedule of a step with groups of any size."""
        left = sorted(enumerate(lengths.tolist()), key=lambda pair: -pair[1])
        schedule, index = [], 0
        while left:
            _, left, _, per_rank = self._next_group(left, ranks, max_seq_len_per_rank=cap, min_cp_size=1)
            packs: dict[tuple[int, ...], list[int]] = {}
            for rank, samples in enumerate(per_rank):
                packs.setdefault(tuple(samples), []).append(rank)
            schedule += [(tuple(r), [int(lengths[i]) for i in samples], index) for samples, r in packs.items()]
            index += 1
        return schedule


def require_all(schedule: Schedule, lengths: np.ndarray) -> None:
    """Raise AssertionError unless the schedule computes every length."""
    assert sorted(n for _, pack, _ in schedule for n in pack) == sorted(lengths.tolist())


def pack_time(times: PackTimes, lengths: Sequence[int], size: int) -> int:
    """Nanoseconds of a pack; that of an idle rank is 0."""
    return times.pack(np.array(lengths, dtype=np.int64), size) if len(lengths) else 0


def passes(
    schedule: Schedule, ranks: int, times: PackTimes, *, barrier: bool = False
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(ranks, start, end) of each pack in nanoseconds. Ranks meet inside packs, with `barrier` after each index."""
    clock, last = np.zeros(ranks, dtype=np.int64), None
    for members, lengths, index in schedule:
        if barrier and last not in (None, index):
            clock[:] = clock.max()
        last, inside = index, list(members)
        start = int(clock[inside].max())
        clock[inside] = start + pack_time(times, lengths, len(inside))
        yield members, start, int(clock[inside[0]])


def free_time(schedule: Schedule, ranks: int, times: PackTimes, *, barrier: bool = False) -> int:
    """Nanoseconds of a step whose ranks meet inside packs and at its end; with `barrier` also after each index."""
    return max(end for _, _, end in passes(schedule, ranks, times, barrier=barrier))


def planned(plan: Plan) -> Schedule:
    """Packs of one of our plans with a size per pack; all ranks of a pack have it at the same place."""
    packs = {
        (k, tuple(pack.ranks)): pack.lengths.tolist() for rank in plan.micro_batches for k, pack in enumerate(rank)
    }
    return [(ranks, lengths, k) for (k, ranks), lengths in sorted(packs.items())]


def lockstep_time(schedule: Schedule, times: PackTimes) -> int:
    """Nanoseconds of a step whose ranks all meet at each index."""
    columns: dict[int, dict[int, int]] = {}
    for members, lengths, index in schedule:
        column = columns.setdefault(index, {})
        for rank in members:
            column[rank] = column.get(rank, 0) + pack_time(times, lengths, len(members))
    return sum(max(column.values()) for column in columns.values())
