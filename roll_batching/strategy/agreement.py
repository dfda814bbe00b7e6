"""Agreeing before and after the schedule, so that an error is raised on every rank and nobody hangs."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import RankError

_MASK = (1 << 62) - 1


def digest(*parts: bytes | str) -> int:
    """A non-negative 62-bit number of the given parts, equal on ranks that hold the same."""
    value = 0
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        value = (value * 1000003 + zlib.crc32(data) * 2654435761 + len(data)) & _MASK
    return value


def agree(
    group: Any,
    error: BaseException | None,
    *,
    same: int = 0,
    what: str = "the ranks",
    within: Any = None,
    same_within: int = 0,
    what_within: str = "the ranks of a replica",
) -> None:
    """Every rank enters; every rank leaves, or every rank raises the same `RankError`.

    One small all-reduce per group in the good case. `same` must be equal on all ranks of `group`, and
    `same_within` on all ranks of `within`; `what` says what differs when they are not.
    """
    flags = torch.tensor([0 if error is None else 1, same, -same], dtype=torch.int64)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    failed = bool(flags[0])
    inner = None
    if not failed and int(flags[1]) == -int(flags[2]):
        if within is None:
            return
        flags = torch.tensor([same_within, -same_within], dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=within)
        inner = int(flags[0]) != -int(flags[1])
        worst = torch.tensor([int(inner)], dtype=torch.int64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
        if not int(worst):
            return
    message = None if error is None else f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (message, same, inner), group=group)
    said = {rank: text for rank, (text, _, _) in enumerate(everyone) if text}
    if said:
        by_text: dict[str, list[int]] = {}
        for rank, text in said.items():
            by_text.setdefault(text, []).append(rank)
        raise RankError(
            "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items())
        ) from error
    if len({value for _, value, _ in everyone}) > 1:
        groups: dict[int, list[int]] = {}
        for rank, (_, value, _) in enumerate(everyone):
            groups.setdefault(value, []).append(rank)
        raise RankError(f"{what} differ between ranks: {' | '.join(str(ranks) for ranks in groups.values())}")
    wrong = [rank for rank, (_, _, differs) in enumerate(everyone) if differs]
    raise RankError(f"{what_within}, seen on ranks {wrong}")
