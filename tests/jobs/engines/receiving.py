"""The receiving side of an SGLang server for weights over process groups: ranks that join and receive broadcasts.

Rank 0 of a server joins with the calls of torch's that SGLang's `init_custom_process_group` makes. Torch knows a name
once per process, so that further ranks, threads here where SGLang has processes, make the backend themselves.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

TIMEOUT = datetime.timedelta(seconds=60)


class Groups:
    """The groups that the `ranks` of a server are in, by name."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.by_name: dict[str, list[Any]] = {}

    def join(self, address: str, port: int, rank_offset: int, size: int, name: str) -> None:
        def joined(rank: int) -> Any:
            url = f"tcp://{address}:{port}"
            store, _, _ = next(c10d.rendezvous(url, rank_offset + rank, size, timeout=TIMEOUT))
            store = dist.PrefixStore(name, store)
            if rank:
                below = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", store))
                return dist.ProcessGroupGloo(below, rank_offset + rank, size, TIMEOUT)
            group, _ = c10d._new_process_group_helper(
                size, rank_offset, [], dist.Backend("gloo"), store, group_name=name, timeout=TIMEOUT
            )
            c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
            return group

        with ThreadPoolExecutor(self.ranks) as threads:
            self.by_name[name] = list(threads.map(joined, range(self.ranks)))

    def receive(self, name: str, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """What rank 0 of the server got; all of its ranks got the same."""

        def received(group: Any) -> list[torch.Tensor]:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            found = [
                torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(dtypes, shapes, strict=True)
            ]
            for work in [group.broadcast([tensor], options) for tensor in found]:
                work.wait()
            return found

        with ThreadPoolExecutor(self.ranks) as threads:
            first, *others = threads.map(received, self.by_name[name])
        for other in others:
            assert all(map(torch.equal, first, other))
        return first

    def leave(self, name: str) -> None:
        dist.destroy_process_group(self.by_name.pop(name)[0])
