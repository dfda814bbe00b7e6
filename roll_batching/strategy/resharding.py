"""Weights from one model into another of the same architecture in another parallel layout, in buckets.

Who holds what is read from Megatron's sharded state (`megatron/core/dist_checkpointing`), as for checkpoints: what can
be saved in one layout and loaded in the other can be copied. No rank ever holds more than its own shards and one bucket
on its way in and one on its way out.
"""

from __future__ import annotations

import itertools
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange, group_device
from roll_batching.errors import LayoutError
from roll_batching.modeling.head import gpt_of
from roll_batching.strategy.checkpoint import model_shards
from roll_batching.strategy.state import ModelState
from roll_batching.strategy.weights import Transfer

BUCKET_BYTES = 64 * 2**20
"""What a rank sends at a time at most, and what it receives."""
_ALIGNMENT = 16
"""Bytes that the parts of a bucket begin at multiples of, so that any dtype can be read there."""
_SHOWN = 5

Interval = tuple[int, int]
Box = tuple[Interval, ...]
"""First and last + 1 along each axis of a whole tensor."""


class _Shard(NamedTuple):
    """Part of a whole tensor on one rank, as the others hear of it."""

    name: str
    """Of the whole tensor; layers that Megatron stacks are tensors of their own."""
    box: Box
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    padded: bool
    """Whether the whole tensor's first axis depends on the layout (a vocabulary, rounded up)."""


@dataclass(frozen=True)
class _Piece:
    """What goes from a shard of one rank into a shard of another."""

    unit: int
    """Its number in the order of all."""
    peer: int
    own: torch.Tensor
    """The part of this rank's tensor: read by the sender, written by the receiver."""
    dtype: torch.dtype
    """On the way: the sender's."""

    @property
    def bytes(self) -> int:
        size = self.own.numel() * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class Resharding:
    """The way of a model's weights into another's. Building it is collective, and so is every copy.

    Args:
        source: whose weights are copied; all processes have a part of it.
        target: whose weights are written, of the same architecture.
        group: all processes, on gloo.
        bucket_bytes: what a rank sends at a time at most, and what it receives; at least a row of each tensor.

    Raises:
        RankError: on all ranks: the two are not the same model, or a version of Megatron describes weights by copies.
    """

    def __init__(self, source: ModelState, target: ModelState, group: Any, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.source, self.target, self._group = source, target, group
        theirs, mine = _tensors(source), _tensors(target)
        everyone = exchange(group, "comparing the models", lambda: (list(theirs), list(mine)))
        with consensus(group, "comparing the models"):
            _check_shared(source, theirs.values())
            _check_shared(target, mine.values())
            units = _units([held for held, _ in everyone], [wanted for _, wanted in everyone], bucket_bytes)
            _check_same(units, [wanted for _, wanted in everyone])
        self._padding = list(_padding(units, mine))
        self._local, out, into = _pieces(units, theirs, mine, [wanted for _, wanted in everyone])
        self._rounds = [
            tuple(sorted((p for p in pieces if first <= p.unit < end), key=lambda p: p.peer) for pieces in (out, into))
            for first, end in itertools.pairwise([0, *_rounds(out, into, len(units), bucket_bytes, group)])
        ]

    @torch.no_grad()
    def copy(self) -> Transfer:
        """Writes the source's weights, as they are now, into the target.

        Raises `RankError` on all ranks where one has no memory for its buckets.
        """
        began, received, largest = time.perf_counter(), 0, 0
        for rows in self._padding:
            rows.zero_()
        for theirs, mine in self._local:
            mine.copy_(theirs)
        device = group_device(dist.group.WORLD, self.source.device)
        with consensus(self._group, "memory for weights on their way"):
            buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in self._largest()]
        for going, coming in self._rounds:
            sent, taken = _exchanged(going, coming, *buckets)
            received, largest = received + taken, max(largest, sent, taken)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        took = time.perf_counter() - began
        return Transfer(bytes=received, seconds=took, buckets=len(self._rounds), largest=largest)

    def _largest(self) -> list[int]:
        """Bytes of the largest bucket out, and of the largest in."""
        return [max((sum(p.bytes for p in pieces[side]) for pieces in self._rounds), default=0) for side in (0, 1)]


def _exchanged(
    going: Sequence[_Piece], coming: Sequence[_Piece], out: torch.Tensor, into: torch.Tensor
) -> tuple[int, int]:
    """One bucket out and one in, in the memory that is given: the bytes of both."""
    sent, taken = _by_peer(going), _by_peer(coming)
    outgoing, incoming = out[: sum(sent)], into[: sum(taken)]
    for piece, place in _places(going, outgoing):
        place.copy_(piece.own)
    dist.all_to_all_single(incoming, outgoing, taken, sent)
    for piece, place in _places(coming, incoming):
        piece.own.copy_(place)
    return len(outgoing), len(incoming)


# ---- who holds what


def _tensors(model: ModelState) -> dict[_Shard, torch.Tensor]:
    """This rank's shards; of equal ones (tied weights on one rank are one) the last."""
    found = {}
    for piece in model_shards(model):
        stacked = piece.prepend_axis_num
        name = ".".join([piece.key, *(str(at) for at in piece.global_offset[:stacked])])
        starts = piece.global_offset[stacked:]
        box = tuple((at, at + size) for at, size in zip(starts, piece.local_shape, strict=True))
        whole = tuple(piece.global_shape[stacked:])
        found[_Shard(name, box, whole, piece.dtype, piece.allow_shape_mismatch)] = piece.data
    return found


def _check_shared(model: ModelState, tensors: Any) -> None:
    """Raises `LayoutError` unless `tensors` are the model's own memory."""
    own = {
        tensor.untyped_storage().data_ptr()
        for chunk in model.chunks
        for tensor in [*gpt_of(chunk).parameters(), *gpt_of(chunk).buffers()]
    }
    copies = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in own]
    if copies:
        raise LayoutError(
            f"{len(copies)} tensors of the sharded state are not the model's memory in this version of Megatron-Core, "
            "so that weights cannot be copied between layouts: give both roles one layout"
        )


class _Unit(NamedTuple):
    """Part of a whole tensor that travels in one bucket."""

    shard: _Shard
    """What its holders have of the tensor."""
    box: Box
    holders: tuple[int, ...]


def _units(held: Sequence[list[_Shard]], wanted: Sequence[list[_Shard]], limit: int) -> list[_Unit]:
    """All parts of all tensors, in an order that is the same on all ranks and mixes layers.

    Layers are mixed since those of one pipeline stage lie on a few ranks, which would send alone.
    """
    holders: dict[_Shard, list[int]] = defaultdict(list)
    for rank, shards in enumerate(held):
        for shard in shards:
            holders[shard].append(rank)
    wanting: dict[str, int] = defaultdict(int)
    for shards in wanted:
        for name in {shard.name for shard in shards}:
            wanting[name] += 1
    units = []
    for shard, ranks in holders.items():
        copies = -(-wanting[shard.name] // len(ranks))  # that one holder sends
        row = math.prod(end - start for start, end in shard.box[1:]) * shard.dtype.itemsize * max(copies, 1)
        rows = max(1, (limit - copies * _ALIGNMENT) // row)
        (start, end), *rest = shard.box
        for first in range(start, end, rows):
            units.append(_Unit(shard, ((first, min(first + rows, end)), *rest), tuple(ranks)))
    return sorted(
        units, key=lambda unit: (zlib.crc32(f"{unit.shard.name}{unit.box}".encode()), unit.shard[0], unit.box)
    )


def _check_same(units: Sequence[_Unit], wanted: Sequence[list[_Shard]]) -> None:
    """Raises `LayoutError` unless the source has all of what the target wants."""
    whole = {unit.shard.name: unit.shard for unit in units}
    different = set()
    for shard in {shard for shards in wanted for shard in shards}:
        theirs = whole.get(shard.name)
        if theirs is None:
            different.add(f"{shard.name} is not in the other")
        elif theirs.whole[1:] != shard.whole[1:] or (theirs.whole[0] != shard.whole[0] and not shard.padded):
            different.add(f"{shard.name} is {list(theirs.whole)} there and {list(shard.whole)} here")
    if different:
        some = sorted(different)[:_SHOWN]
        raise LayoutError(
            f"weights are copied between strategies of one model, and these two differ: {'; '.join(some)}"
            f"{' and more' if len(different) > len(some) else ''}. Give both roles the same architecture"
        )


# ---- what goes where


def _overlap(one: Box, other: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < end for start, end in box) else None


def _part(tensor: torch.Tensor, shard: _Shard, box: Box) -> torch.Tensor:
    """The part `box` of the whole tensor in this rank's `shard` of it."""
    return tensor[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, shard.box, strict=True))]


def _padding(units: Sequence[_Unit], mine: dict[_Shard, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Rows of a vocabulary, rounded up, that the source does not have."""
    rows = {unit.shard.name: unit.shard.whole[0] for unit in units}
    for shard, tensor in mine.items():
        if shard.padded and shard.box[0][1] > rows[shard.name]:
            yield tensor[max(0, rows[shard.name] - shard.box[0][0]) :]


def _pieces(
    units: Sequence[_Unit],
    theirs: dict[_Shard, torch.Tensor],
    mine: dict[_Shard, torch.Tensor],
    wanted: Sequence[list[_Shard]],
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[_Piece], list[_Piece]]:
    """What stays on this rank (from, into), what leaves it and what comes, in the order of units.

    Who wants a part that lies on its rank takes that; the others are spread over the holders.
    """
    me = dist.get_rank()
    names = {shard.name for shard in [*theirs, *mine]}
    wanting: dict[str, list[tuple[int, _Shard]]] = defaultdict(list)
    for rank, shards in enumerate(wanted):
        for shard in shards:
            if shard.name in names:
                wanting[shard.name].append((rank, shard))
    local, out, into = [], [], []
    for number, unit in enumerate(units):
        remote = 0
        for rank, shard in wanting.get(unit.shard.name, ()):
            box = _overlap(unit.box, shard.box)
            if box is None:
                continue
            if rank in unit.holders:
                if rank == me:
                    local.append((_part(theirs[unit.shard], unit.shard, box), _part(mine[shard], shard, box)))
                continue
            sender = unit.holders[(number + remote) % len(unit.holders)]
            remote += 1
            if sender == me:
                out.append(_Piece(number, rank, _part(theirs[unit.shard], unit.shard, box), unit.shard.dtype))
            if rank == me:
                into.append(_Piece(number, sender, _part(mine[shard], shard, box), unit.shard.dtype))
    return local, out, into


def _rounds(out: Sequence[_Piece], into: Sequence[_Piece], units: int, limit: int, group: Any) -> list[int]:
    """Ends of the rounds: in each, as many of the next units travel as fit the buckets of all ranks. Collective."""
    totals = []
    for pieces in (out, into):
        sizes = np.zeros(units + 1, dtype=np.int64)
        np.add.at(sizes, [piece.unit + 1 for piece in pieces], [piece.bytes for piece in pieces])
        totals.append(sizes.cumsum())
    ends, done = [], 0
    while done < units:
        fits = min(int(np.searchsorted(total, total[done] + limit, side="right")) - 1 for total in totals)
        end = torch.tensor(max(fits, done + 1))
        dist.all_reduce(end, op=dist.ReduceOp.MIN, group=group)
        done = int(end)
        ends.append(done)
    return ends


def _by_peer(pieces: Sequence[_Piece]) -> list[int]:
    sizes = [0] * dist.get_world_size()
    for piece in pieces:
        sizes[piece.peer] += piece.bytes
    return sizes


def _places(pieces: Sequence[_Piece], bucket: torch.Tensor) -> Iterator[tuple[_Piece, torch.Tensor]]:
    """Each piece with its place in `bucket`; pieces are by peer, then in the order of units, which both sides know."""
    at = 0
    for piece in pieces:
        size = piece.own.numel() * piece.dtype.itemsize
        yield piece, bucket[at : at + size].view(piece.dtype).view(piece.own.shape)
        at += piece.bytes
