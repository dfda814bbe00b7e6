"""Resharding: weights of one model copied into another parallel layout of the same architecture, in buckets.

Each rank's shards are read from Megatron's sharded state (`megatron/core/dist_checkpointing`), as for checkpoints: what
can be saved in one layout and loaded in the other can be copied. Beside its own shards a rank holds one bucket to send
and one to receive.
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
from roll_batching.errors import LayoutError, first_of
from roll_batching.modeling.head import gpt_of
from roll_batching.strategy.checkpoint import model_shards
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.weights import Transfer

BUCKET_BYTES = 64 * 2**20
"""Largest bucket that a rank sends or receives."""
_ALIGNMENT = 16
"""Alignment in bytes of the pieces in a bucket, so that any dtype can be viewed there."""
_SHOWN = 5

Interval = tuple[int, int]
Box = tuple[Interval, ...]
"""[start, end) along each axis of a global tensor."""


class _Shard(NamedTuple):
    """Description of a rank's shard of a global tensor, as it is sent to the others."""

    name: str
    """Name of the global tensor, without Megatron's stacking: each layer is a tensor."""
    box: Box
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    padded: bool
    """Whether the first axis depends on the layout (a vocabulary, rounded up)."""


@dataclass(frozen=True)
class _Piece:
    """One message: the overlap of a unit with a shard of another rank."""

    unit: int
    """Number of the unit, the same on all ranks."""
    peer: int
    local: torch.Tensor
    """View of this rank's tensor: read by the sender, written by the receiver."""
    dtype: torch.dtype
    """Dtype of the sender's tensor; the receiver converts."""

    @property
    def bytes(self) -> int:
        size = self.local.numel() * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class Resharding:
    """Transfer plan between two layouts of one model, for any number of copies. Construction is collective.

    Args:
        source: the model to copy from; every process has shards of it.
        target: the model to write, of the same architecture.
        group: all processes, on gloo.
        bucket_bytes: most bytes that a rank sends or receives at a time, but at least one row of a tensor.

    Raises:
        RankError: on all ranks: the models differ, or this Megatron's sharded state has copies of the weights.
    """

    def __init__(self, source: ModelState, target: ModelState, group: Any, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.source, self.target, self._group = source, target, group
        source_tensors, target_tensors = _local_tensors(source), _local_tensors(target)
        if not target.heads:  # of multi-token prediction: only a model in training has them
            source_tensors = {shard: x for shard, x in source_tensors.items() if not shard.name.startswith("mtp.")}
        shards = exchange(group, "comparing the models", lambda: (list(source_tensors), list(target_tensors)))
        held, wanted = [of_source for of_source, _ in shards], [of_target for _, of_target in shards]
        with consensus(group, "comparing the models"):
            _check_not_copied(source, source_tensors.values())
            _check_not_copied(target, target_tensors.values())
            units = _units(held, wanted, bucket_bytes)
            _check_same_model(units, wanted)
        self._padding = list(_padding_rows(units, target_tensors))
        self._local, sent, received = _pieces(units, source_tensors, target_tensors, wanted)
        self._rounds = [
            tuple(
                sorted((p for p in pieces if first <= p.unit < end), key=lambda p: p.peer)
                for pieces in (sent, received)
            )
            for first, end in itertools.pairwise([0, *_round_ends(sent, received, len(units), bucket_bytes, group)])
        ]

    @torch.no_grad()
    def copy(self) -> Transfer:
        """Copies the current weights of the source into the target. Collective.

        Raises `RankError` on all ranks if one has no memory for its buckets.
        """
        started, total, largest = time.perf_counter(), 0, 0
        for rows in self._padding:
            rows.zero_()
        for source, target in self._local:
            target.copy_(source)
        device = group_device(dist.group.WORLD, self.source.device)
        with consensus(self._group, "memory for weights on their way"):
            buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in self._bucket_sizes()]
        for outgoing, incoming in self._rounds:
            sent, received = _exchange_buckets(outgoing, incoming, *buckets)
            total, largest = total + received, max(largest, sent, received)
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        seconds = time.perf_counter() - started
        return Transfer(bytes=total, seconds=seconds, buckets=len(self._rounds), largest=largest)

    def _bucket_sizes(self) -> list[int]:
        """Bytes of the largest bucket that this rank sends, and of the largest that it receives."""
        return [max((sum(p.bytes for p in pieces[side]) for pieces in self._rounds), default=0) for side in (0, 1)]


def _exchange_buckets(
    outgoing: Sequence[_Piece], incoming: Sequence[_Piece], send_buffer: torch.Tensor, receive_buffer: torch.Tensor
) -> tuple[int, int]:
    """Sends and receives one bucket; returns the bytes of both."""
    send_sizes, receive_sizes = _bytes_by_peer(outgoing), _bytes_by_peer(incoming)
    sent, received = send_buffer[: sum(send_sizes)], receive_buffer[: sum(receive_sizes)]
    # Bytes, as a bucket has pieces of several dtypes.
    for piece, view in _views(outgoing, sent):
        view.copy_(piece.local)
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes)
    for piece, view in _views(incoming, received):
        piece.local.copy_(view)
    return len(sent), len(received)


# ---- shards of both models


def _local_tensors(model: ModelState) -> dict[_Shard, torch.Tensor]:
    """This rank's tensors by shard. Tied weights on one rank are one shard."""
    tensors = {}
    for sharded in model_shards(model):
        stacked = sharded.prepend_axis_num
        name = ".".join([sharded.key, *(str(index) for index in sharded.global_offset[:stacked])])
        starts = sharded.global_offset[stacked:]
        box = tuple((start, start + size) for start, size in zip(starts, sharded.local_shape, strict=True))
        global_shape = tuple(sharded.global_shape[stacked:])
        tensors[_Shard(name, box, global_shape, sharded.dtype, sharded.allow_shape_mismatch)] = sharded.data
    return tensors


def _check_not_copied(model: ModelState, tensors: Any) -> None:
    """Raises `LayoutError` unless `tensors` share the memory of the model: writing to copies would have no effect."""
    pointers = {
        tensor.untyped_storage().data_ptr()
        for chunk in model.chunks
        for tensor in [*gpt_of(chunk).parameters(), *gpt_of(chunk).buffers()]
    }
    copies = [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in pointers]
    if copies:
        raise LayoutError(
            f"{len(copies)} tensors of the sharded state are not the model's memory in this version of Megatron-Core, "
            "so that weights cannot be copied between layouts: give both roles one layout"
        )


class _Unit(NamedTuple):
    """Part of a global tensor that is sent within one bucket."""

    shard: _Shard
    """The shard that contains the unit."""
    box: Box
    holders: tuple[int, ...]
    """Ranks that hold the shard."""


def _units(held: Sequence[list[_Shard]], wanted: Sequence[list[_Shard]], limit: int) -> list[_Unit]:
    """All units of all tensors, in one pseudo-random order on all ranks.

    In the order of layers the few ranks of one pipeline stage would send while the others wait.
    """
    holders: dict[_Shard, list[int]] = defaultdict(list)
    for rank, shards in enumerate(held):
        for shard in shards:
            holders[shard].append(rank)
    receivers: dict[str, int] = defaultdict(int)
    for shards in wanted:
        for name in {shard.name for shard in shards}:
            receivers[name] += 1
    units = []
    for shard, ranks in holders.items():
        copies = -(-receivers[shard.name] // len(ranks))  # that one holder sends
        row_bytes = math.prod(end - start for start, end in shard.box[1:]) * shard.dtype.itemsize * max(copies, 1)
        rows = max(1, (limit - copies * _ALIGNMENT) // row_bytes)
        (start, end), *rest = shard.box
        for first in range(start, end, rows):
            units.append(_Unit(shard, ((first, min(first + rows, end)), *rest), tuple(ranks)))
    # A checksum, as Python's own hash differs between processes.
    return sorted(
        units, key=lambda unit: (zlib.crc32(f"{unit.shard.name}{unit.box}".encode()), unit.shard[0], unit.box)
    )


def _check_same_model(units: Sequence[_Unit], wanted: Sequence[list[_Shard]]) -> None:
    """Raises `LayoutError` unless both have the same tensors."""
    sources = {unit.shard.name: unit.shard for unit in units}
    targets = {shard.name for shards in wanted for shard in shards}
    differences = {f"{name} is not here" for name in sources.keys() - targets}
    for shard in {shard for shards in wanted for shard in shards}:
        source = sources.get(shard.name)
        if source is None:
            differences.add(f"{shard.name} is not in the other")
            continue
        source_shape, target_shape = source.global_shape, shard.global_shape
        if source_shape[1:] != target_shape[1:] or (source_shape[0] != target_shape[0] and not shard.padded):
            differences.add(f"{shard.name} is {list(source_shape)} there and {list(target_shape)} here")
    if differences:
        raise LayoutError(
            "weights are copied between strategies of one model, and these two differ: "
            f"{first_of(sorted(differences), _SHOWN)}. Give both roles the same architecture"
        )


# ---- pieces and rounds


def _overlap(first: Box, second: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return box if all(start < end for start, end in box) else None


def _view(tensor: torch.Tensor, shard: _Shard, box: Box) -> torch.Tensor:
    """The part `box` of a global tensor, as a view of this rank's `shard` of it."""
    return tensor[tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, shard.box, strict=True))]


def _padding_rows(units: Sequence[_Unit], target: dict[_Shard, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Rows of the target's padded vocabulary that the source does not have."""
    rows = {unit.shard.name: unit.shard.global_shape[0] for unit in units}
    for shard, tensor in target.items():
        if shard.padded and shard.box[0][1] > rows[shard.name]:
            yield tensor[max(0, rows[shard.name] - shard.box[0][0]) :]


def _pieces(
    units: Sequence[_Unit],
    source: dict[_Shard, torch.Tensor],
    target: dict[_Shard, torch.Tensor],
    wanted: Sequence[list[_Shard]],
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[_Piece], list[_Piece]]:
    """(local copies as (from, to), pieces to send, pieces to receive) of this rank, in the order of units.

    A rank that holds a unit copies it locally; the other receivers are spread evenly over the holders.
    """
    me = dist.get_rank()
    names = {shard.name for shard in [*source, *target]}
    receivers: dict[str, list[tuple[int, _Shard]]] = defaultdict(list)
    for rank, shards in enumerate(wanted):
        for shard in shards:
            if shard.name in names:
                receivers[shard.name].append((rank, shard))
    local, sent, received = [], [], []
    for unit_index, unit in enumerate(units):
        remote = 0
        for rank, shard in receivers.get(unit.shard.name, ()):
            box = _overlap(unit.box, shard.box)
            if box is None:
                continue
            if rank in unit.holders:
                if rank == me:
                    local.append((_view(source[unit.shard], unit.shard, box), _view(target[shard], shard, box)))
                continue
            sender = unit.holders[(unit_index + remote) % len(unit.holders)]
            remote += 1
            if sender == me:
                sent.append(_Piece(unit_index, rank, _view(source[unit.shard], unit.shard, box), unit.shard.dtype))
            if rank == me:
                received.append(_Piece(unit_index, sender, _view(target[shard], shard, box), unit.shard.dtype))
    return local, sent, received


def _round_ends(sent: Sequence[_Piece], received: Sequence[_Piece], units: int, limit: int, group: Any) -> list[int]:
    """Ends of the rounds: each has as many of the next units as fit the buckets of all ranks. Collective."""
    totals = []
    for pieces in (sent, received):
        sizes = np.zeros(units + 1, dtype=np.int64)
        np.add.at(sizes, [piece.unit + 1 for piece in pieces], [piece.bytes for piece in pieces])
        totals.append(sizes.cumsum())
    ends, done = [], 0
    while done < units:
        # Every rank's buckets must hold the round, so that the smallest number decides.
        fits = min(int(np.searchsorted(total, total[done] + limit, side="right")) - 1 for total in totals)
        end = torch.tensor(max(fits, done + 1))
        dist.all_reduce(end, op=dist.ReduceOp.MIN, group=group)
        done = int(end)
        ends.append(done)
    return ends


def _bytes_by_peer(pieces: Sequence[_Piece]) -> list[int]:
    sizes = [0] * dist.get_world_size()
    for piece in pieces:
        sizes[piece.peer] += piece.bytes
    return sizes


def _views(pieces: Sequence[_Piece], bucket: torch.Tensor) -> Iterator[tuple[_Piece, torch.Tensor]]:
    """Each piece with its view of `bucket`. Sender and receiver have the same order: by peer, then by unit."""
    start = 0
    for piece in pieces:
        size = piece.local.numel() * piece.dtype.itemsize
        yield piece, bucket[start : start + size].view(piece.dtype).view(piece.local.shape)
        start += piece.bytes
