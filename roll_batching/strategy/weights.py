"""Reading and writing a model's parameters outside its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.experts import expert_biases
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.layers import has_uneven_stages
from roll_batching.strategy.model_state import ModelState


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes, seconds and buckets of a weight transfer, on this rank."""

    bytes: int = 0
    """Bytes received from other ranks."""
    seconds: float = 0.0
    buckets: int = 0
    largest: int = 0
    """Bytes of the largest bucket, sent or received."""

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(
            bytes=self.bytes + other.bytes,
            seconds=self.seconds + other.seconds,
            buckets=self.buckets + other.buckets,
            largest=max(self.largest, other.largest),
        )


@torch.no_grad()
def gather_parameters(chunks: Sequence[Any]) -> None:
    """All-gathers the parameters of `chunks` that the optimizer has updated. Collective.

    Under `overlap_param_gather` the optimizer's step updates each rank's own shard alone, and the next forward pass
    gathers the others, module by module: in between, every rank's parameters are partly one step old. Forward passes
    wait for the gather; call this before reading or writing parameters in any other way. Otherwise it does nothing.

    Raises `CollectiveError` on this rank, where the gather fails.
    """
    overlapping = [chunk for chunk in chunks if getattr(chunk, "use_forward_hook", False)]  # set by DDP
    if not overlapping:
        return
    from roll_batching.strategy.checkpoint_files import alone  # few models need it

    with alone("gathering the parameters"):
        for chunk in overlapping:
            chunk.start_param_sync(force_sync=True)


def has_same_stages(source: ModelState, target: ModelState) -> bool:
    """Whether two models in one layout have the same layers in each pipeline stage; equal on all ranks."""
    configs = [gpt_of(model.chunks[0]).config for model in (source, target)]
    if not any(has_uneven_stages(config) for config in configs):
        return True
    from roll_batching.modeling.layer_layout import layers_of_all_chunks  # few models need it

    source_layers, target_layers = map(layers_of_all_chunks, configs)
    return source_layers == target_layers


def check_same_parameters(source: ModelState, target: ModelState) -> None:
    """Raises `LayoutError` unless both models have the same parameters, and this rank the same shards of them."""
    source_shapes, target_shapes = (
        [_shapes(chunk, with_heads=target.heads > 0) for chunk in model.chunks] for model in (source, target)
    )
    if source_shapes != target_shapes or _layout_ranks(source) != _layout_ranks(target):
        raise LayoutError(
            "parameters are copied between strategies of one model, and these two differ in theirs: give both roles "
            "the same architecture"
        )


def _layout_ranks(model: ModelState) -> tuple[int, ...]:
    layout = model.layout
    return layout.tp_rank, layout.cp_rank, layout.pp_rank, layout.dp_rank


def _shapes(chunk: Any, *, with_heads: bool) -> dict[str, torch.Size]:
    """Shapes by name; unless `with_heads`, without prediction heads and their copy of the embedding."""
    gpt = gpt_of(chunk)
    shapes = {name: tensor.shape for name, tensor in (*gpt.named_parameters(), *expert_biases(gpt))}
    heads = () if with_heads else ("mtp.",) if gpt.pre_process else ("mtp.", "embedding.")
    return {name: shape for name, shape in shapes.items() if not name.startswith(heads)}


@torch.no_grad()
def copy_parameters(source: Sequence[Any], target: Sequence[Any]) -> None:
    """Copies parameters between the chunks of two models with one layout. Collective."""
    gather_parameters(source)
    gather_parameters(target)
    for source_chunk, target_chunk in zip(source, target, strict=True):
        values = dict(gpt_of(source_chunk).named_parameters())
        for name, parameter in gpt_of(target_chunk).named_parameters():
            parameter.copy_(values[name])
        biases = dict(expert_biases(gpt_of(source_chunk)))
        for name, bias in expert_biases(gpt_of(target_chunk)):
            bias.copy_(biases[name])
