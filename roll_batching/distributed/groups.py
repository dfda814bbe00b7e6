"""Gloo groups in addition to Megatron's groups, and properties of any process group."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_groups: dict[tuple[Any, ...], Any] = {}
"""This rank's groups, by `dist.group.WORLD` and what they were made for."""


def cached_group(purpose: Any, make: Callable[[], Any]) -> Any:
    """The group for `purpose`; the first call under the current process group of all ranks makes it."""
    world = dist.group.WORLD
    if (world, purpose) not in _groups:
        for stale in [key for key in _groups if key[0] is not world]:
            del _groups[stale]  # groups of a destroyed world
        _groups[world, purpose] = make()
    return _groups[world, purpose]


def host_group() -> Any:
    """The gloo group of all ranks, for error handling and small host data under any backend of the model.

    The first call creates it and is collective. Its timeout is that of the world group.
    """
    return cached_group("host", lambda: dist.new_group(backend="gloo", timeout=group_timeout(dist.group.WORLD)))


def divided_host_group(parts: Iterable[Sequence[int]]) -> Any:
    """The gloo group of the part that has this rank; `parts` have each rank once. None for a part of a single rank.

    Collective among all ranks, with the same `parts`.
    """
    division = tuple(sorted({tuple(part) for part in parts}))
    if len(division) == 1:
        return host_group()
    return divided_group([part for part in division if len(part) > 1], "gloo")


def divided_group(parts: Iterable[Sequence[int]], backend: str | None = None) -> Any:
    """This rank's group, one per part; None if no part has this rank. Cached by division. Collective among all ranks.

    `backend` is by default that of the group of all ranks.
    """
    division = tuple(tuple(part) for part in parts)

    def make() -> Any:
        timeout = group_timeout(dist.group.WORLD)
        # Every rank creates every group: with use_local_synchronization names depend on how many groups a rank is in.
        groups = [dist.new_group(list(part), timeout, backend) for part in division]
        return next((group for group in groups if dist.get_rank(group) >= 0), None)

    return cached_group((backend, division), make)


def gather_objects(value: Any, group: Any) -> list[Any]:
    """The picklable `value` of each rank of `group`, in rank order. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_shards(local: torch.Tensor, group: Any) -> list[torch.Tensor] | None:
    """The tensors of all ranks, alike in shape and dtype, on the first rank of `group`; None on others. Collective."""
    raw = local.contiguous().view(torch.uint8)  # bytes: a backend need not support the dtype
    shards = [torch.empty_like(raw) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(raw, shards, dst=dist.get_global_rank(group, 0), group=group)
    return None if shards is None else [shard.view(local.dtype) for shard in shards]


def group_timeout(group: Any) -> datetime.timedelta:
    """Timeout of the collectives of `group`."""
    timeout: datetime.timedelta = group._get_backend(group_device(group, torch.device("cpu"))).options._timeout
    return timeout


def megatron_data_parallel_group() -> Any:
    """Megatron's data-parallel group without context parallelism; None before Megatron is initialised.

    Does not import Megatron: a process without its modules has not initialised it.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_data_parallel_group()


def group_device(group: Any, preferred: torch.device) -> torch.device:
    """The device for tensors in collectives of `group`: `preferred` if its backend supports that, else another."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    # Gloo lists CUDA among its devices, but has no all-to-all there.
    usable = {device for device, backend in backends.items() if device == "cpu" or backend != "gloo"}
    if preferred.type in usable:
        return preferred
    if "cpu" in usable:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
