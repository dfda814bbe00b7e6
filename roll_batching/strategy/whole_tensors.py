"""A model's parameters as the tensors of the model directory that it came from: whole, under their names there.

Tensor-parallel shards meet on the first rank of their group, which owns the tensors that they make: every stage and
every expert's rank owns what it has of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from roll_batching.errors import CheckpointError
from roll_batching.huggingface.directory import directory_of
from roll_batching.huggingface.families import HEAD, rules_of
from roll_batching.huggingface.stored import StoredTensors, torch_dtype
from roll_batching.huggingface.tensors import Sizes, expected_tensors, pieces
from roll_batching.modeling.pretrained import PlacedParameter, family_of, placed_parameters
from roll_batching.strategy.state import ModelState


@dataclass(frozen=True, kw_only=True)
class WholeTensors:
    """The tensors of a model directory, and the parameters that they come from."""

    origin: Path
    stored: StoredTensors
    sizes: Sizes
    shapes: Mapping[str, tuple[int, ...]]
    """Of all tensors, by name."""
    dtypes: Mapping[str, torch.dtype]
    """Of all tensors, by name: as the files have them."""
    parameters: tuple[PlacedParameter, ...]
    """In which this rank has a part, owner or not, in an order that is the same on all that share one."""

    def bytes_of(self, name: str) -> int:
        """What a tensor takes in its file."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize


def whole_tensors(state: ModelState, source: str) -> WholeTensors:
    """What the model of `state` gives, in the names of the model directory `source`. Not collective.

    Raises CheckpointError where the model did not come from that directory.
    """
    architecture = state.architecture
    if architecture is None:
        raise CheckpointError("a model that was built outside (from_parts) has no model directory to be written as")
    origin = directory_of(source)
    family = family_of(origin, state.own_family)
    tied, sizes, stored = architecture.tie_word_embeddings, Sizes.of(architecture), StoredTensors(origin)
    expected = expected_tensors(rules_of(family, architecture), sizes)
    problems = stored.misfits(expected, [HEAD.theirs[0][0]])
    if problems:
        raise CheckpointError(f"{origin} is not the directory that this model came from: {'; '.join(problems)}")
    return WholeTensors(
        origin=origin,
        stored=stored,
        sizes=sizes,
        shapes=expected,
        dtypes={name: torch_dtype(stored.dtypes[name]) for name in expected},
        parameters=tuple(
            placed
            for placed in placed_parameters(state.chunks, family, architecture)
            if placed.is_first_replica and not (tied and placed.rule.ours == HEAD.ours)
        ),
    )


def owner_of(placed: PlacedParameter) -> int:
    """The rank among all that gets the whole tensors of a parameter."""
    return dist.get_global_rank(placed.group, 0)


def names_of(placed: PlacedParameter) -> list[str]:
    """The tensors that a parameter is made of."""
    return [name for name, _ in placed.rule.theirs]


@torch.no_grad()
def gathered(placed: PlacedParameter, sizes: Sizes, device: torch.device) -> dict[str, torch.Tensor] | None:
    """The whole tensors of a parameter on its owner, by name, on `device` and in the model's precision; None elsewhere.

    Collective among the ranks that share the parameter.
    """
    shards = _shards(placed, device)
    if shards is None:
        return None
    found: dict[str, torch.Tensor] = {}
    for rank, shard in enumerate(shards):
        for piece in pieces(placed.rule, sizes, rank, placed.ranks):
            if piece.name not in found:
                shape = next(sizes.shape(words) for name, words in placed.rule.theirs if name == piece.name)
                found[piece.name] = torch.empty(shape, dtype=shard.dtype, device=device)
            whole = found[piece.name]
            target = whole[piece.rows] if piece.columns is None else whole[piece.rows, piece.columns]
            target.copy_(shard[piece.at])
    return found


def _shards(placed: PlacedParameter, device: torch.device) -> list[torch.Tensor] | None:
    """The shards of a parameter, on its owner; None on the others."""
    mine = placed.parameter.detach().contiguous()
    if placed.ranks == 1 or placed.rule.join == "copy":
        return [mine.to(device)] * placed.ranks if placed.rank == 0 else None
    raw = mine.view(torch.uint8)  # of any precision, whatever the group's backend knows
    parts = [torch.empty_like(raw) for _ in range(placed.ranks)] if placed.rank == 0 else None
    dist.gather(raw, parts, dst=owner_of(placed), group=placed.group)
    return None if parts is None else [part.view(mine.dtype).to(device) for part in parts]


def in_precision(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` as its file has it. Raises CheckpointError where the model's values are beyond it."""
    converted = tensor.to(dtype)
    if dtype is torch.float16 and not bool(converted.isfinite().all()) and bool(tensor.isfinite().all()):
        text = f"{name} has values beyond fp16, the precision of the files that the model came from"
        raise CheckpointError(f"{text}: set their dtype to bfloat16 (config.json) and convert them")
    return converted
