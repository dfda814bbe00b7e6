"""Stream of a model's full tensors under Hugging Face names, to rank 0, in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange, group_device
from roll_batching.strategy.full_tensors import (
    cast_to_file_dtype,
    describe_full_tensors,
    gather_full_tensors,
    owner_rank,
    tensor_names,
)
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.resharding import BUCKET_BYTES
from roll_batching.strategy.weights import gather_parameters

_LISTING = "listing the model's tensors"


@dataclass(kw_only=True)
class Bucket:
    """Tensors that are sent together."""

    tensors: list[tuple[str, torch.Tensor]]
    """On rank 0: (name, tensor) as in the model directory. Empty on other ranks."""
    last: bool
    error: Exception | None = None
    """This rank's error in converting a tensor. The bucket is complete, but its values are invalid."""


@dataclass(frozen=True)
class _Source:
    """A parameter whose full tensors one rank sends to rank 0."""

    owner: int
    parameter: str
    tensors: tuple[str, ...]


class TensorStream:
    """Full tensors of a model as its model directory `source` has them, for any number of passes.

    Construction is collective. Rank 0 holds one bucket at a time; an owner one parameter, as shards and full tensors.
    A bucket has at most `bucket_bytes`, and at least one parameter.

    Raises:
        RankError: the same on all ranks, where the model did not come from that directory.
    """

    def __init__(self, state: ModelState, source: str, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.state = state
        group = state.layout.host_group
        with consensus(group, _LISTING):
            self._full = describe_full_tensors(state, source)
        # Engines sample without the heads of multi-token prediction.
        parameters = [placed for placed in self._full.parameters if not placed.name.startswith("mtp.")]
        self._placed = {(owner_rank(placed), placed.name): placed for placed in parameters}
        owned = [
            (parameter, tuple(tensor_names(placed)))
            for (owner, parameter), placed in self._placed.items()
            if owner == dist.get_rank()
        ]
        owned_by_rank = exchange(group, _LISTING, lambda: owned)
        # All ranks take the parameters in one order: with different orders, two gathers could wait for each other.
        sources = [_Source(rank, *one) for rank, parameters in enumerate(owned_by_rank) for one in parameters]
        sizes = [sum(map(self._full.bytes_of, source_.tensors)) for source_ in sources]
        self._buckets = list(_split_into_buckets(sources, sizes, bucket_bytes))
        self.device = group_device(dist.group.WORLD, state.device)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(self._full.bytes_of(name) for sources in self._buckets for one in sources for name in one.tensors)

    def buckets(self) -> Iterator[Bucket]:
        """The current tensors, bucket by bucket. Every step is collective: all ranks exhaust the iterator."""
        gather_parameters(self.state.chunks)
        for number, sources in enumerate(self._buckets):
            bucket = Bucket(tensors=[], last=number == len(self._buckets) - 1)
            for source in sources:
                self._send(source, bucket)
            yield bucket

    def _send(self, source: _Source, bucket: Bucket) -> None:
        """Sends one parameter's tensors from its owner into rank 0's bucket."""
        rank, placed = dist.get_rank(), self._placed.get((source.owner, source.parameter))
        tensors = None if placed is None else gather_full_tensors(placed, self._full.sizes, self.device)
        for name in source.tensors if rank in (0, source.owner) else ():
            dtype = self._full.dtypes[name]
            if tensors is not None:
                try:
                    tensor = cast_to_file_dtype(name, tensors[name], dtype)
                except Exception as error:  # raised after the bucket: rank 0 is already waiting in its receive
                    tensor, bucket.error = tensors[name].to(dtype), error
                if rank != 0:
                    dist.send(tensor.view(torch.uint8), 0)
            else:
                tensor = torch.empty(self._full.shapes[name], dtype=dtype, device=self.device)
                dist.recv(tensor.view(torch.uint8), source.owner)
            if rank == 0:
                bucket.tensors.append((name, tensor))


def _split_into_buckets(sources: Sequence[_Source], sizes: Sequence[int], limit: int) -> Iterator[list[_Source]]:
    bucket: list[_Source] = []
    filled = 0
    for source, size in zip(sources, sizes, strict=True):
        if bucket and filled + size > limit:
            yield bucket
            bucket, filled = [], 0
        bucket.append(source)
        filled += size
    if bucket:
        yield bucket
