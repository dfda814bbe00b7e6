"""The ranks that data move between, and those that must agree before anything moves."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll_batching.distributed import Facts, consensus, group_device, host_group, megatron_data_parallel_group
from roll_batching.errors import DataError


@dataclass(frozen=True)
class Peers:
    """The data-parallel group, seen from this rank."""

    group: Any
    """A `torch.distributed` group, or None for a single process."""

    everyone: Any
    """The ranks that leave an operation together: where the job moves data in several groups at once (one per
    tensor-parallel rank, say), the ranks of all of them. None for a single process."""

    rank: int
    """This rank's place in the group."""

    size: int
    """Ranks in the group."""

    device: torch.device
    """Where the group's backend wants small tensors."""

    @classmethod
    def of(cls, group: Any = None, *, everyone: Any = None) -> Peers:
        """The peers in `group`.

        None stands for Megatron's data-parallel group (without context parallelism) where Megatron is
        initialised, else for all processes of `torch.distributed`, else for this process alone; all processes
        then call together. With `group`, its ranks do, or those of the larger group `everyone`.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise DataError("A process group was given, but torch.distributed is not initialised.")
            return cls(None, None, 0, 1, torch.device("cpu"))
        everyone = everyone or group
        if group is None:
            everyone = host_group()
            group = megatron_data_parallel_group() or dist.group.WORLD
        rank = dist.get_rank(group)
        if rank < 0:
            raise DataError(f"Process {dist.get_rank()} is not in the group that data are to move in.")
        return cls(group, everyone, rank, dist.get_world_size(group), group_device(group, torch.device("cpu")))

    def consensus(self, what: str) -> contextlib.AbstractContextManager[Facts]:
        """See `distributed.consensus`, among `everyone`."""
        return consensus(self.everyone, what)

    def device_for(self, values: Tensor) -> torch.device:
        """Where `values` must be to travel in this group: where they are if the backend can, else nearby."""
        return values.device if self.group is None else group_device(self.group, values.device)

    def all_gather(self, values: Tensor) -> Tensor:
        """`[size, *values.shape]` on the host, from `values` of the same shape and dtype on every rank."""
        if self.size == 1:
            return values[None].cpu()
        mine = values.to(self.device).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone).cpu()
