"""Process groups of packs that have their own context-parallel size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from roll_batching.distributed.groups import group_timeout
from roll_batching.distributed.parallel_layout import ParallelLayout

_groups: dict[tuple[Any, tuple[int, ...], int], Any] = {}
"""This rank's group, by `dist.group.WORLD`, the ranks of its data-parallel group, and size."""


def context_groups(layout: ParallelLayout, sizes: Sequence[int]) -> dict[int, Any]:
    """This rank's group of each context-parallel size: the aligned block of data-parallel ranks that contains it.

    Collective among all ranks, with the same `sizes` (powers of two above 1 that divide the data-parallel size). Groups
    are made when a size first occurs, smaller sizes first, and last as long as the process group of all ranks. A rank
    is a member of one group per size: of at most log2 of the data-parallel size.

    A block never uses the data-parallel group, even where it has the same ranks: that group reduces gradients while
    other ranks still compute packs, so that ranks would issue its collectives in different orders.
    """
    world = dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(layout.dp_group))
    missing = sorted(size for size in set(sizes) if (world, members, size) not in _groups)
    if missing:
        for stale in [key for key in _groups if key[0] is not world]:
            del _groups[stale]  # groups of a destroyed world
        everyone: list[Any] = [None] * dist.get_world_size(layout.host_group)
        dist.all_gather_object(everyone, members, group=layout.host_group)
        timeout = group_timeout(layout.dp_group)
        for size in missing:
            for ranks in sorted(set(everyone)):
                for first in range(0, len(ranks), size):
                    block = list(ranks[first : first + size])
                    group = dist.new_group(block, timeout, group_desc=f"CONTEXT_PARALLEL_GROUP_{size}")
                    if dist.get_rank() in block:
                        _groups[world, members, size] = group
    return {size: _groups[world, members, size] for size in sizes}
