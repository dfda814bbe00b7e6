"""What the ranks of a layout tell each other around a step: one exchange before it, one after.

An exchange has two legs, each one small collective: inside a replica, then between replicas, where each rank talks to
those in its own place, so that all hear all without a third leg. Neither leg grows with the whole world.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from roll_batching.distributed.consensus import Facts, Failure, raise_as_one, together, words_of
from roll_batching.distributed.groups import divided_host_group

T = TypeVar("T")

_SLOTS = 56
"""Numbers that travel with an agreement; whoever has more sends them in a collective of their own."""
_FIRST = 1024
"""Bytes of a record that one collective carries; doubled, for good, when a longer one comes."""
_HEADER = 8
_rooms: dict[Any, int] = {}
"""By group: bytes of a record, the same on all of its ranks, as each sees all records."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks of a layout in two kinds of groups, on gloo; None for a rank that is alone in one."""

    everyone: Any
    replica: Any
    """This rank's replica."""
    peers: Any
    """The ranks in this rank's place of every replica, in the order of the replicas."""
    part: int
    """This rank's replica among `parts`."""
    parts: int

    @classmethod
    def of(cls, everyone: Any, data_parallel: Any, part: int) -> Team:
        """From the group of all ranks and Megatron's data-parallel group. Collective."""
        if everyone is None or dist.get_world_size(everyone) == 1:
            return cls(everyone=everyone, replica=None, peers=None, part=0, parts=1)
        ranks = dist.get_process_group_ranks(everyone)
        places: list[Any] = [None] * len(ranks)
        dist.all_gather_object(places, (part, sorted(dist.get_process_group_ranks(data_parallel))), group=everyone)
        replicas: dict[int, list[int]] = {}
        for rank, (other, _) in zip(ranks, places, strict=True):
            replicas.setdefault(other, []).append(rank)
        return cls(
            everyone=everyone,
            replica=divided_host_group(replicas.values()),
            peers=divided_host_group(peers for _, peers in places),
            part=part,
            parts=len(replicas),
        )

    @contextlib.contextmanager
    def agree(self, what: str) -> Iterator[Facts]:
        """`consensus` among all ranks, with replicas as parts. Collective: one exchange.

        `Facts.count` has numbers added up over replicas, which `Facts.total` holds afterwards.
        """
        facts = Facts()
        error: BaseException | None = None
        try:
            yield facts
        except Failure as caught:
            if self.replica is None and self.peers is None:
                raise
            error = caught
        votes = torch.tensor([int(error is not None), *facts.bounds(), len(facts.counted)], dtype=torch.int64)
        votes = torch.cat([votes, _padded(facts.counted[:_SLOTS])])
        if self.replica is not None:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self.replica)
        rows = votes[None]
        if self.peers is not None:
            rows = votes.new_empty(self.parts, len(votes))
            dist.all_gather(list(rows), votes, group=self.peers)
        failed, high, low, high_here, low_here, lengths = rows[:, :6].t()
        alike = bool((high == -low).all() and (high == high[0]).all() and (high_here == -low_here).all())
        if bool(failed.any()) or not alike:
            raise_as_one(self.everyone, what, error, facts, self.part)
        # All ranks of a replica have counted the same samples: the largest of equal numbers is each of them.
        facts.total = rows[:, 6:].contiguous().view(torch.float64).sum(0)[: len(facts.counted)]
        if int(lengths[0]) > _SLOTS:
            self._add_more(facts)

    def _add_more(self, facts: Facts) -> None:
        more = facts.counted[_SLOTS:].clone()
        if self.peers is not None:
            dist.all_reduce(more, group=self.peers)
        facts.total = torch.cat([facts.total, more])

    def join(self, what: str, make: Callable[[], T], merge: Callable[[Sequence[T]], T]) -> list[T]:
        """What the ranks of each replica made, merged, for every replica in order. Collective: one exchange.

        `merge` cannot fail. Raises `RankError` on all ranks when `make` fails on any; alone, `make`'s own error.
        """
        error: BaseException | None = None
        said: dict[int, str] = {}
        mine: Any = None
        try:
            mine = make()
        except Failure as caught:
            if self.replica is None and self.peers is None:
                raise
            error, said = caught, {dist.get_rank(): words_of(caught)}
        inside = _gathered(self.replica, (said, mine))
        said = {rank: words for other, _ in inside for rank, words in other.items()}
        whole = None if said else merge([made for _, made in inside])
        between = _gathered(self.peers, (said, whole))
        said = {rank: words for other, _ in between for rank, words in other.items()}
        if said:
            raise together(what, said) from error
        return [made for _, made in between]


def _padded(counted: torch.Tensor) -> torch.Tensor:
    """[_SLOTS] the bits of these numbers."""
    slots = torch.zeros(_SLOTS, dtype=torch.float64)
    slots[: len(counted)] = counted
    return slots.view(torch.int64)


def _gathered(group: Any, mine: Any) -> list[Any]:
    """What each rank of `group` has, in the order of its ranks: one collective, two for the first long ones."""
    if group is None:
        return [mine]
    data = pickle.dumps(mine)
    room = _rooms.get(group, _FIRST)
    records = _exchanged(group, data, room)
    longest = max(int.from_bytes(record[:_HEADER], "little") for record in records)
    if longest > room:
        while room < longest:
            room *= 2
        _rooms[group] = room
        records = _exchanged(group, data, room)
    return [pickle.loads(record[_HEADER:]) for record in records]


def _exchanged(group: Any, data: bytes, room: int) -> list[bytes]:
    """Every rank's [length, as much of its data as there is room for, filled up]."""
    record = len(data).to_bytes(_HEADER, "little") + data[:room].ljust(room, b"\0")
    size = dist.get_world_size(group)
    rows = torch.empty(size, len(record), dtype=torch.uint8)
    dist.all_gather(list(rows), torch.frombuffer(bytearray(record), dtype=torch.uint8), group=group)
    return [row.numpy().tobytes() for row in rows]
