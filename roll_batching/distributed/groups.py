"""Gloo groups beside Megatron's, and properties of any process group."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_host_groups: dict[Any, Any] = {}
"""The gloo group over all ranks, by `dist.group.WORLD`."""
_divisions: dict[tuple[Any, tuple[tuple[int, ...], ...]], Any] = {}
"""This rank's gloo group, by `dist.group.WORLD` and the division of its ranks."""


def host_group() -> Any:
    """The gloo group of all ranks, for error handling and small host data under any backend of the model.

    The first call creates it and is collective. Its timeout is that of the world group.
    """
    world = dist.group.WORLD
    if world not in _host_groups:
        _host_groups.clear()  # groups of a destroyed world
        _host_groups[world] = dist.new_group(backend="gloo", timeout=group_timeout(world))
    return _host_groups[world]


def divided_host_group(parts: Iterable[Sequence[int]]) -> Any:
    """The gloo group of this rank's part, where `parts` divide all ranks; None for a part of one rank.

    Collective among all ranks, with the same `parts`.
    """
    world, division = dist.group.WORLD, tuple(sorted({tuple(part) for part in parts}))
    if len(division) == 1:
        return host_group()
    if (world, division) not in _divisions:
        for stale in [key for key in _divisions if key[0] is not world]:
            del _divisions[stale]  # groups of a destroyed world
        timeout = group_timeout(world)
        # Every rank creates every group: with use_local_synchronization names depend on how many groups a rank is in.
        made = [dist.new_group(list(part), timeout, "gloo") for part in division if len(part) > 1]
        _divisions[world, division] = next((group for group in made if dist.get_rank(group) >= 0), None)
    return _divisions[world, division]


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
