"""The process group of a sample exchange, and the ranks that must agree before it."""

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
class ExchangeGroup:
    """The data-parallel group in which samples are exchanged, with this rank's place in it."""

    group: Any
    """A `torch.distributed` group, or None for a single process."""

    consensus_group: Any
    """The ranks that raise the same errors: all ranks of groups that exchange data at the same time, such as one group
    per tensor-parallel rank. None for a single process."""

    rank: int
    """This rank's number in the group."""

    size: int
    """Number of ranks in the group."""

    device: torch.device
    """Device of small tensors for the group's backend."""

    @classmethod
    def of(cls, group: Any = None, *, consensus_group: Any = None) -> ExchangeGroup:
        """The exchange group of a process group.

        Args:
            group: None: Megatron's data-parallel group (without context parallelism) if Megatron is initialised, else
                all processes of `torch.distributed`, else this process alone.
            consensus_group: the processes that raise errors together; None: those of `group`. Without `group` all do.

        Raises:
            DataError: for a group without torch.distributed, or without this process.
        """
        if not (dist.is_available() and dist.is_initialized()):
            if group is not None:
                raise DataError("A process group was given: call init_process_group first, or leave the group out.")
            return cls(None, None, 0, 1, torch.device("cpu"))
        if group is None:
            group, consensus_group = megatron_data_parallel_group() or dist.group.WORLD, host_group()
        else:
            consensus_group = consensus_group or group
        rank = dist.get_rank(group)
        if rank < 0:
            raise DataError(f"Process {dist.get_rank()} is not in the group: pass one that holds it, or none.")
        return cls(group, consensus_group, rank, dist.get_world_size(group), group_device(group, torch.device("cpu")))

    def consensus(self, what: str) -> contextlib.AbstractContextManager[Facts]:
        """`distributed.consensus` among `consensus_group`."""
        return consensus(self.consensus_group, what)

    def device_for(self, values: Tensor) -> torch.device:
        """Device on which `values` can be sent in this group: their own if the backend supports it."""
        return values.device if self.group is None else group_device(self.group, values.device)

    def all_gather(self, values: Tensor) -> Tensor:
        """`[size, *values.shape]` on the host, from `values` of the same shape and dtype on every rank."""
        if self.size == 1:
            return values[None].cpu()
        local = values.to(self.device).contiguous()
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local, group=self.group)
        return torch.stack(gathered).cpu()

    def all_to_all(self, values: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """`[sum(receive), ...]` from rows of `values` `[sum(send), ...]`, on the same device. Collective."""
        if self.size == 1:
            return values
        shape = values.shape[1:]
        row_bytes = shape.numel() * values.element_size()
        if row_bytes == 0:
            return values.new_empty(sum(receive), *shape)
        device = self.device_for(values)
        sent = values.contiguous().to(device).view(-1).view(torch.uint8)
        received = torch.empty(sum(receive) * row_bytes, dtype=torch.uint8, device=device)
        dist.all_to_all_single(
            received, sent, [n * row_bytes for n in receive], [n * row_bytes for n in send], group=self.group
        )
        return received.view(values.dtype).view(sum(receive), *shape).to(values.device)

    def all_to_all_bytes(self, parts: list[bytes]) -> list[bytes]:
        """The part for this rank from every rank, where `parts` has one for each. Collective."""
        send = [len(part) for part in parts]
        receive = self.all_gather(torch.tensor(send))[:, self.rank].tolist()
        received = self.all_to_all(torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), send, receive)
        return [part.numpy().tobytes() for part in received.split(receive)]
