"""Which rows are sampled together: as many as a cache has room for."""

from __future__ import annotations

import torch
import torch.distributed as dist

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.planning import ParallelDims
from roll_batching.strategy.sampling import GenerationSettings


def room_of_row(prompt: int, settings: GenerationSettings, layout: ParallelDims) -> int:
    """Positions in the cache of a row whose prompt has so many tokens."""
    return prompt + settings.max_new_tokens + positions_of_a_step(layout) - 1


def positions_of_a_step(layout: ParallelDims) -> int:
    """Positions of a row that a decoding step carries, of which the first counts: sequence parallelism cuts them."""
    return layout.tp_size if layout.sequence_parallel else 1


def waves_of(rooms: list[int], bound: int | None, layout: ParallelLayout) -> list[list[int]]:
    """Rows that are sampled together, those that need most room first; as many waves on ranks that share experts.

    Raises DataError where `bound`, positions of a cache, has no room for one of them.
    """
    order = sorted(range(len(rooms)), key=lambda row: -rooms[row])
    if bound is not None and order and rooms[order[0]] > bound:
        raise DataError(f"max_tokens_in_cache={bound} has no room for a row of {rooms[order[0]]} positions: raise it")
    waves = []
    while order:
        count = len(order) if bound is None else bound // rooms[order[0]]
        waves.append(sorted(order[:count]))
        order = order[count:]
    if layout.ep_size > 1:
        waves += [[] for _ in range(most_of_all(len(waves), layout) - len(waves))]
    return waves


def most_of_all(number: int, layout: ParallelLayout) -> int:
    """The largest of all ranks' numbers. Collective."""
    most = torch.tensor([number])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=layout.host_group)
    return int(most)
