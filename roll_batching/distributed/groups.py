"""Process groups that exist besides the model's own, and what a group can carry."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

_host_groups: dict[Any, Any] = {}
"""By the group of all processes: the gloo group over the same ranks."""
_divisions: dict[tuple[Any, tuple[tuple[int, ...], ...]], Any] = {}
"""By the group of all processes and how they are divided: the gloo group of this process."""


def host_group() -> Any:
    """All processes on gloo, for agreement and small facts, whatever the backend of the model.

    Made at the first call, which all processes make together; it waits as long as the group of all processes does.
    """
    world = dist.group.WORLD
    if world not in _host_groups:
        _host_groups.clear()  # of a world that was destroyed
        _host_groups[world] = dist.new_group(backend="gloo", timeout=group_timeout(world))
    return _host_groups[world]


def divided_host_group(parts: Iterable[Sequence[int]]) -> Any:
    """The gloo group of this process's part, where `parts` divide the ranks of all; None for a rank alone in its part.

    All processes call it together, with the same parts.
    """
    world, division = dist.group.WORLD, tuple(sorted({tuple(part) for part in parts}))
    if len(division) == 1:
        return host_group()
    if (world, division) not in _divisions:
        for stale in [key for key in _divisions if key[0] is not world]:
            del _divisions[stale]  # of a world that was destroyed
        timeout = group_timeout(world)
        # No group that its members make by themselves: their names count the groups that a rank is in.
        made = [dist.new_group(list(part), timeout, "gloo") for part in division if len(part) > 1]
        _divisions[world, division] = next((group for group in made if dist.get_rank(group) >= 0), None)
    return _divisions[world, division]


def group_timeout(group: Any) -> datetime.timedelta:
    """How long a collective of `group` may wait before it fails."""
    timeout: datetime.timedelta = group._get_backend(group_device(group, torch.device("cpu"))).options._timeout
    return timeout


def megatron_data_parallel_group() -> Any:
    """Megatron's data-parallel group without context parallelism; None where Megatron is not initialised.

    Whoever never imported Megatron has not initialised it, and is spared the import.
    """
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return None
    return state.get_data_parallel_group()


def group_device(group: Any, preferred: torch.device) -> torch.device:
    """Where tensors must be to travel in `group`: on `preferred` if the backend can, else nearby."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    # Gloo lists CUDA among its devices, but has no all-to-all there.
    usable = {device for device, backend in backends.items() if device == "cpu" or backend != "gloo"}
    if preferred.type in usable:
        return preferred
    if "cpu" in usable:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
