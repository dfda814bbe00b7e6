"""Plans of a host's batch: one call of the planner with the host's own cost formula and rules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_batching.planning import LinearQuadraticCost

Lengths = NDArray[np.int64]

WORKLOAD = LinearQuadraticCost(linear=24576, quadratic=1)
"""`calculate_workload` of verl (seqlen_balancing.py) and ROLL (functionals.py): FLOPs of a 7B model's block."""


def gather_lengths(own: Lengths, group: Any) -> tuple[list[Lengths], int]:
    """The lengths of every rank of `group`, and this rank's number in it. Collective, unless `group` is None."""
    import torch.distributed as dist

    if group is None or not dist.is_initialized():
        return [own], 0
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group=group)
    return parts, dist.get_rank(group)


def ranks_of(parts: Sequence[Lengths]) -> NDArray[np.int64]:
    """The rank that holds each sample of the concatenated `parts`."""
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def pipeline_size() -> int:
    """Pipeline-parallel size of this process; 1 where Megatron's parallel state is not initialised."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")  # not imported for hosts that train by FSDP
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return 1
    size: int = parallel_state.get_pipeline_model_parallel_world_size()
    return size
