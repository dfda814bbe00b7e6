"""Checks auto caps against the memory that the first step has left, and lowers them where it was little."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from roll_batching.jobs.config import JobConfig

SMALLEST_SPARE = 0.03
"""Caps are lowered where less than this share of the memory was left at the peak of the first step."""
LOWERED_TO = 7 / 8
_STEP = 16


def spare_share(config: JobConfig, device: torch.device) -> float | None:
    """Share of the device's memory that was left at torch's peak so far; None on a CPU, whose peak is not measured."""
    if device.type != "cuda":
        return None
    peak = torch.cuda.max_memory_reserved(device)
    if (limit := config.device_memory_limit) is not None:
        return 1 - peak / limit
    free, total = torch.cuda.mem_get_info(device)
    return (free + torch.cuda.memory_reserved(device) - peak) / total


def lower_caps(caps: Mapping[str, int], spare: float, least: int, group: dist.ProcessGroup) -> dict[str, int]:
    """`caps`, all lowered to 7/8 where the smallest `spare` of the ranks of `group` is too small. Collective.

    `least`: tokens of a micro-batch of one longest sample, rounded up as plans may do, which every cap still holds.
    """
    smallest = torch.tensor([spare], dtype=torch.float64)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    if smallest.item() >= SMALLEST_SPARE:
        return dict(caps)
    return {key: min(cap, max(least, int(cap * LOWERED_TO) // _STEP * _STEP)) for key, cap in caps.items()}
