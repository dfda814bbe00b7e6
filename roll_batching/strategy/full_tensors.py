"""A model's parameters as full tensors, under the names of the Hugging Face directory that it came from.

Tensor-parallel shards are gathered on the first rank of their group, which owns the full tensors: every pipeline stage
and every expert-parallel rank owns its own part of the model. `TensorStream` sends all of them to rank 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from roll_batching.distributed import consensus, exchange, group_device
from roll_batching.distributed.groups import gather_shards
from roll_batching.errors import CheckpointError
from roll_batching.huggingface.directory import CONFIG, directory_of, read_json
from roll_batching.huggingface.families import rules_of, untrained_tensors
from roll_batching.huggingface.layer_rules import EMBEDDING, HEAD, copies_in_heads
from roll_batching.huggingface.stored import StoredTensors, torch_dtype
from roll_batching.huggingface.tensors import Sizes, expected_tensors, pieces
from roll_batching.modeling.pretrained import PlacedParameter, family_of, placed_parameters
from roll_batching.strategy.model_state import ModelState
from roll_batching.strategy.resharding import BUCKET_BYTES
from roll_batching.strategy.weights import gather_parameters


@dataclass(frozen=True, kw_only=True)
class FullTensors:
    """Names, shapes and dtypes of a model directory's tensors, and this rank's parameters behind them."""

    origin: Path
    stored: StoredTensors
    sizes: Sizes
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors, by name."""
    dtypes: Mapping[str, torch.dtype]
    """Dtypes of all tensors in the files, by name."""
    parameters: tuple[PlacedParameter, ...]
    """Parameters with a shard on this rank, in the same order on all ranks that share a parameter."""

    untrained: tuple[str, ...]
    """Tensors of the files that the model lacks (multi-token prediction)."""
    copies: Mapping[str, str]
    """Copies of other tensors in a trained head: the name of the original, by the name of the copy."""

    def bytes_of(self, name: str) -> int:
        """Size of a tensor in its file."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize


def describe_full_tensors(state: ModelState, source: str, *, with_head: bool = False) -> FullTensors:
    """The full tensors of a model, as the model directory `source` has them. Not collective.

    `with_head`: tied embeddings are also there as the output head.

    Raises `CheckpointError` where the model did not come from that directory.
    """
    architecture = state.architecture
    if architecture is None:
        raise CheckpointError(
            "a model that was built outside (from_parts) has no model directory to be written as: use save"
        )
    origin = directory_of(source)
    family = family_of(origin, state.own_family)
    tied, sizes, stored = architecture.tie_word_embeddings, Sizes.of(architecture), StoredTensors(origin)
    expected = expected_tensors(rules_of(family, architecture), sizes)
    untrained = untrained_tensors(family, architecture, read_json(origin / CONFIG), stored.shapes)
    copies = copies_in_heads(family, architecture, stored.shapes)
    head, embedding = HEAD.first_checkpoint_name, EMBEDDING.first_checkpoint_name
    if with_head and tied and embedding in expected:
        copies[head] = embedding
    problems = stored.misfits(expected, [head, *untrained, *copies])
    if problems:
        raise CheckpointError(f"{origin} is not the directory that this model came from: {'; '.join(problems)}")
    return FullTensors(
        origin=origin,
        stored=stored,
        sizes=sizes,
        shapes=expected,
        dtypes={name: torch_dtype(stored.dtypes[name]) for name in expected},
        untrained=tuple(untrained),
        copies=copies,
        parameters=tuple(
            _join_experts(
                parameter
                for parameter in placed_parameters(state.chunks, family, architecture)
                # Under a pipeline the last stage has a copy of tied embeddings as its head: the first stage gives them.
                if parameter.is_first_replica and not (tied and parameter.rule.ours == HEAD.ours)
            )
        ),
    )


def _join_experts(placed: Iterable[PlacedParameter]) -> Iterator[PlacedParameter]:
    """Yield the parameters; experts of this rank stored in one checkpoint tensor become one parameter with `parts`."""
    stacks: dict[str, list[PlacedParameter]] = {}
    for parameter in placed:
        if not parameter.rule.is_stacked:
            yield parameter
        else:
            stacks.setdefault(parameter.rule.first_checkpoint_name, []).append(parameter)
    for name, parts in stacks.items():
        # Ranks that share a tensor know it by one name, whichever experts they have.
        yield dataclasses.replace(parts[0], name=name, group=parts[0].expert_group, parts=tuple(parts))


def owner_rank(placed: PlacedParameter) -> int:
    """Global rank of the owner of a parameter's full tensors."""
    return dist.get_global_rank(placed.group, 0)


def tensor_names(placed: PlacedParameter) -> list[str]:
    """Names of the directory's tensors that a parameter is fused from."""
    return [name for name, _ in placed.rule.theirs]


@torch.no_grad()
def gather_full_tensors(placed: PlacedParameter, sizes: Sizes, device: torch.device) -> dict[str, torch.Tensor] | None:
    """A parameter's full tensors on its owner, by name, on `device`, in the model's dtype; None on other ranks.

    Collective among the tensor-parallel ranks of the parameter.
    """
    if placed.parts:
        return _gather_experts(placed, sizes, device)
    shards = _gather_shards(placed, device)
    if shards is None:
        return None
    tensors: dict[str, torch.Tensor] = {}
    for rank, shard in enumerate(shards):
        for piece in pieces(placed.rule, sizes, rank, placed.ranks):
            if piece.name not in tensors:
                shape = next(sizes.shape(words) for name, words in placed.rule.theirs if name == piece.name)
                tensors[piece.name] = torch.empty(shape, dtype=shard.dtype, device=device)
            full = tensors[piece.name]
            target = full[piece.rows] if piece.columns is None else full[piece.rows, piece.columns]
            target.copy_(shard[piece.at])
    return tensors


def _gather_experts(placed: PlacedParameter, sizes: Sizes, device: torch.device) -> dict[str, torch.Tensor] | None:
    """The tensor of all experts on the first rank that shares it; None on others. Collective among these."""
    name, dimensions = placed.rule.theirs[0]
    local = torch.stack([part.values() for part in placed.parts])
    shards = [local] if placed.group.size() == 1 else gather_shards(local, placed.group)
    if shards is None:
        return None
    full = torch.empty(sizes.shape(dimensions), dtype=local.dtype, device=device)
    for number, shard in enumerate(shards):
        expert_rank, rank = divmod(number, placed.ranks)
        for expert, values in enumerate(shard, expert_rank * len(local)):
            for piece in pieces(placed.rule, sizes, rank, placed.ranks):
                piece.select(full[expert]).copy_(values[piece.at])
    return {name: full}


def _gather_shards(placed: PlacedParameter, device: torch.device) -> list[torch.Tensor] | None:
    """All shards of a parameter on its owner; None on other ranks."""
    local = placed.values()
    if placed.ranks == 1 or placed.rule.join == "copy":
        return [local.to(device)] * placed.ranks if placed.rank == 0 else None
    shards = gather_shards(local, placed.group)
    return None if shards is None else [shard.to(device) for shard in shards]


def cast_to_file_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in the dtype of its file. Raises `CheckpointError` for values beyond fp16."""
    converted = tensor.to(dtype)
    if dtype is torch.float16 and not bool(converted.isfinite().all()) and bool(tensor.isfinite().all()):
        problem = f"{name} has values beyond fp16, the precision of the files that the model came from"
        raise CheckpointError(f"{problem}: set their dtype to bfloat16 (config.json) and convert them")
    return converted


# ---- all tensors to rank 0


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
        sources = [
            _Source(rank, *parameter) for rank, parameters in enumerate(owned_by_rank) for parameter in parameters
        ]
        sizes = [sum(map(self._full.bytes_of, source_.tensors)) for source_ in sources]
        self._buckets = list(_split_into_buckets(sources, sizes, bucket_bytes))
        self.device = group_device(dist.group.WORLD, state.device)

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(
            self._full.bytes_of(name) for sources in self._buckets for source in sources for name in source.tensors
        )

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
