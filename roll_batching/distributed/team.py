"""Host-side exchanges among the ranks of a layout: one before a step, one after it.

An exchange is two small gloo collectives: inside each replica, then between replicas among ranks at the same position.
Every rank then has the data of all ranks, and neither collective spans the whole world.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from roll_batching.distributed.consensus import Facts, Failure, failure_message, raise_on_all, rank_error
from roll_batching.distributed.groups import divided_host_group, gather_objects
from roll_batching.errors import RankError

T = TypeVar("T")

_INLINE_COUNTS = 56
"""Counts that travel with the agreement; further ones take another collective."""
_FIRST_CAPACITY = 1024
"""Bytes of a record in one collective; doubled for the rest of the process when a record is longer."""
_HEADER = 8
_capacities: dict[Any, int] = {}
"""Bytes of a record, by group; equal on all ranks of a group, as all of them see all lengths."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """Gloo groups over the ranks of a layout: its replicas, and equal positions across replicas."""

    everyone: Any
    """The group of all ranks; None for a single process."""
    replica_group: Any
    """The group of this rank's replica; None for a replica of one rank."""
    peer_group: Any
    """The group of the ranks at this rank's position in each replica, in replica order; None for one replica."""
    replica_index: int
    """Index of this rank's replica."""
    num_replicas: int
    """Number of replicas."""

    @classmethod
    def of(cls, everyone: Any, data_parallel: Any, replica_index: int) -> Team:
        """The team for the group of all ranks and Megatron's data-parallel group. Collective."""
        if everyone is None or dist.get_world_size(everyone) == 1:
            return cls(everyone=everyone, replica_group=None, peer_group=None, replica_index=0, num_replicas=1)
        ranks = dist.get_process_group_ranks(everyone)
        same_position = sorted(dist.get_process_group_ranks(data_parallel))
        places = gather_objects((replica_index, same_position), everyone)
        replicas: dict[int, list[int]] = {}
        for rank, (other, _) in zip(ranks, places, strict=True):
            replicas.setdefault(other, []).append(rank)
        return cls(
            everyone=everyone,
            replica_group=divided_host_group(replicas.values()),
            peer_group=divided_host_group(peers for _, peers in places),
            replica_index=replica_index,
            num_replicas=len(replicas),
        )

    @contextlib.contextmanager
    def agree(self, what: str) -> Iterator[Facts]:
        """`consensus` among all ranks, with facts per replica, balance and counts. Collective: one exchange.

        Numbers passed to `Facts.count` are summed over replicas into `Facts.total`, available after the block.
        """
        facts = Facts()
        error: BaseException | None = None
        try:
            yield facts
        except Failure as caught:
            if self.replica_group is None and self.peer_group is None:
                raise
            error = caught
        head = [int(error is not None), *facts.digest_pairs(), len(facts.counted), facts.balance]
        inline = facts.counted[:_INLINE_COUNTS]
        slots = torch.zeros(_INLINE_COUNTS, dtype=torch.float64)
        slots[: len(inline)] = inline  # their bits travel with the votes, which are int64
        votes = torch.cat([torch.tensor(head, dtype=torch.int64), slots.view(torch.int64)])
        if self.replica_group is not None:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.replica_group)
        by_replica = votes[None]
        if self.peer_group is not None:
            by_replica = votes.new_empty(self.num_replicas, len(votes))
            dist.all_gather(list(by_replica), votes, group=self.peer_group)
        failed, high, low, high_here, low_here, lengths, balance = by_replica[:, : len(head)].t()
        equal = bool((high == -low).all() and (high == high[0]).all() and (high_here == -low_here).all())
        if bool(failed.any()) or not equal:
            raise_on_all(self.everyone, what, error, facts, self.replica_index)
        if int(balance.sum()):
            raise RankError(f"{what}: {facts.imbalance_message}")
        # MAX over a replica leaves its counts as they are: its ranks hold the same samples, hence equal numbers.
        facts.total = by_replica[:, len(head) :].contiguous().view(torch.float64).sum(0)[: len(facts.counted)]
        if int(lengths[0]) > _INLINE_COUNTS:
            rest = facts.counted[_INLINE_COUNTS:].clone()
            if self.peer_group is not None:
                dist.all_reduce(rest, group=self.peer_group)
            facts.total = torch.cat([facts.total, rest])

    def join(self, what: str, make: Callable[[], T], merge: Callable[[Sequence[T]], T]) -> list[T]:
        """The merged values of `make` of each replica's ranks, in replica order. Collective: one exchange.

        `merge` must not fail. Raises `RankError` on all ranks if `make` fails on any; in a single process, `make`'s
        own error.
        """
        error: BaseException | None = None
        failures: dict[int, str] = {}
        value: Any = None
        try:
            value = make()
        except Failure as caught:
            if self.replica_group is None and self.peer_group is None:
                raise
            error, failures = caught, {dist.get_rank(): failure_message(caught)}
        in_replica = _all_gather(self.replica_group, (failures, value))
        failures = {rank: message for other, _ in in_replica for rank, message in other.items()}
        merged = None if failures else merge([value_of_rank for _, value_of_rank in in_replica])
        by_replica = _all_gather(self.peer_group, (failures, merged))
        failures = {rank: message for other, _ in by_replica for rank, message in other.items()}
        if failures:
            raise rank_error(what, failures) from error
        return [value_of_replica for _, value_of_replica in by_replica]


def _all_gather(group: Any, value: Any) -> list[Any]:
    """The picklable values of all ranks of `group`, in rank order: one collective, two when records grow."""
    if group is None:
        return [value]
    data = pickle.dumps(value)
    capacity = _capacities.get(group, _FIRST_CAPACITY)
    records = _all_gather_bytes(group, data, capacity)
    longest = max(int.from_bytes(record[:_HEADER], "little") for record in records)
    if longest > capacity:
        while capacity < longest:
            capacity *= 2
        _capacities[group] = capacity
        records = _all_gather_bytes(group, data, capacity)
    return [pickle.loads(record[_HEADER:]) for record in records]


def _all_gather_bytes(group: Any, data: bytes, capacity: int) -> list[bytes]:
    """Each rank's record: the length of its data, then the data, cut off or padded to `capacity` bytes."""
    record = len(data).to_bytes(_HEADER, "little") + data[:capacity].ljust(capacity, b"\0")
    size = dist.get_world_size(group)
    records = torch.empty(size, len(record), dtype=torch.uint8)
    dist.all_gather(list(records), torch.frombuffer(bytearray(record), dtype=torch.uint8), group=group)
    return [row.numpy().tobytes() for row in records]
