"""A model's tensors under the names of its model directory, whole, on rank 0, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange, group_device
from roll_batching.strategy.resharding import BUCKET_BYTES
from roll_batching.strategy.state import ModelState
from roll_batching.strategy.weights import gather_parameters
from roll_batching.strategy.whole_tensors import gathered, in_precision, names_of, owner_of, whole_tensors

_PLANNING = "naming the model's tensors"


@dataclass(kw_only=True)
class Bucket:
    """Tensors that travel together."""

    tensors: list[tuple[str, torch.Tensor]]
    """On rank 0, in the names, shapes and precisions of the model directory; nothing elsewhere."""
    last: bool
    error: Exception | None = None
    """What this rank could not give. Its tensors are there, and worth nothing."""


@dataclass(frozen=True)
class _Part:
    """A parameter whose tensors go to rank 0."""

    owner: int
    parameter: str
    tensors: tuple[str, ...]


class TensorStream:
    """The tensors of the model of `state`, as the model directory `source` has them, as often as they are asked for.

    Building it is collective. Rank 0 holds one bucket at a time; an owner of tensors one parameter, its shards and its
    whole. A bucket has `bucket_bytes` at most, and one parameter at least. Raises RankError, the same on all ranks,
    where the model did not come from that directory.
    """

    def __init__(self, state: ModelState, source: str, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.state = state
        group = state.layout.host_group
        with consensus(group, _PLANNING):
            self._whole = whole_tensors(state, source)
        self._mine = {(owner_of(placed), placed.name): placed for placed in self._whole.parameters}
        owned = [
            (parameter, tuple(names_of(placed)))
            for (owner, parameter), placed in self._mine.items()
            if owner == dist.get_rank()
        ]
        everyone = exchange(group, _PLANNING, lambda: owned)
        # All ranks take up the parameters in one order: none waits for another that waits for it.
        parts = [_Part(owner, *one) for owner, some in enumerate(everyone) for one in some]
        self._buckets = list(
            _in_buckets(parts, [sum(map(self._whole.bytes_of, p.tensors)) for p in parts], bucket_bytes)
        )
        self.device = group_device(dist.group.WORLD, state.device)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(self._whole.bytes_of(name) for parts in self._buckets for part in parts for name in part.tensors)

    def buckets(self) -> Iterator[Bucket]:
        """The tensors as they are now. Collective, also between the buckets: whoever reads them goes on with all."""
        gather_parameters(self.state.chunks)
        for number, parts in enumerate(self._buckets):
            bucket = Bucket(tensors=[], last=number == len(self._buckets) - 1)
            for part in parts:
                self._collect(part, bucket)
            yield bucket

    def _collect(self, part: _Part, bucket: Bucket) -> None:
        """One parameter's tensors, into rank 0's bucket."""
        rank, placed = dist.get_rank(), self._mine.get((part.owner, part.parameter))
        found = None if placed is None else gathered(placed, self._whole.sizes, self.device)
        for name in part.tensors if rank in (0, part.owner) else ():
            dtype = self._whole.dtypes[name]
            if found is not None:
                try:
                    tensor = in_precision(name, found[name], dtype)
                except Exception as error:  # told with the bucket: the others are on their way
                    tensor, bucket.error = found[name].to(dtype), error
                if rank != 0:
                    dist.send(tensor.view(torch.uint8), 0)
            else:
                tensor = torch.empty(self._whole.shapes[name], dtype=dtype, device=self.device)
                dist.recv(tensor.view(torch.uint8), part.owner)
            if rank == 0:
                bucket.tensors.append((name, tensor))


def _in_buckets(parts: Sequence[_Part], sizes: Sequence[int], limit: int) -> Iterator[list[_Part]]:
    bucket: list[_Part] = []
    held = 0
    for part, size in zip(parts, sizes, strict=True):
        if bucket and held + size > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(part)
        held += size
    if bucket:
        yield bucket
