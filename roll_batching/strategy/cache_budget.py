"""Groups of sequences that generate together, within a limit of key-value cache positions."""

from __future__ import annotations

import torch
import torch.distributed as dist

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.planning import ParallelDims
from roll_batching.strategy.sampling import GenerationSettings


def cache_positions(prompt_length: int, settings: GenerationSettings, layout: ParallelDims) -> int:
    """Cache positions of a sequence with a prompt of `prompt_length` tokens."""
    return prompt_length + settings.max_new_tokens + positions_per_step(layout) - 1


def positions_per_step(layout: ParallelDims) -> int:
    """Positions per sequence in a decoding step: 1, or TP under sequence parallelism, which splits positions.

    Only the first of them counts; the others repeat its token.
    """
    return layout.tp_size if layout.sequence_parallel else 1


def split_by_cache_limit(positions: list[int], limit: int | None, layout: ParallelLayout) -> list[list[int]]:
    """Groups of sequence indices, longest sequences first, each within `limit` cache positions.

    Ranks that share experts get the same number of groups, some of them empty: they must run the same steps.

    Raises:
        DataError: where a single sequence exceeds `limit`.
    """
    # A group takes its size x its longest sequence: similar lengths together waste least.
    order = sorted(range(len(positions)), key=lambda index: -positions[index])
    if limit is not None and order and positions[order[0]] > limit:
        raise DataError(
            f"max_tokens_in_cache={limit} has no room for a row of {positions[order[0]]} positions: raise it"
        )
    groups = []
    while order:
        count = len(order) if limit is None else limit // positions[order[0]]
        groups.append(sorted(order[:count]))
        order = order[count:]
    if layout.ep_size > 1:
        groups += [[] for _ in range(max_over_ranks(len(groups), layout) - len(groups))]
    return groups


def max_over_ranks(number: int, layout: ParallelLayout) -> int:
    """The largest `number` of all ranks. Collective."""
    largest = torch.tensor([number])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=layout.host_group)
    return int(largest)
