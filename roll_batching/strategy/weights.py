"""Reading and writing a model's parameters from outside its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.head import gpt_of
from roll_batching.strategy.state import ModelState


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a copy took, on this rank."""

    bytes: int = 0
    """Received from other ranks."""
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
    """Makes the parameters of `chunks` whole on every data-parallel rank. Collective; nothing to do for most layouts.

    Under `overlap_param_gather` each rank updates its share of the parameters in the optimizer's step and gets the
    others' in the next forward pass, module by module: in between, every rank holds parameters that are a step old.
    The forward pass knows; whoever reads or writes parameters by other ways calls this first.
    """
    for chunk in chunks:
        if getattr(chunk, "use_forward_hook", False):
            chunk.start_param_sync(force_sync=True)


def check_same_parameters(source: ModelState, target: ModelState) -> None:
    """Raises `LayoutError` unless both are the same model, and this rank has the same part of both."""
    theirs, mine = ([_shapes(chunk) for chunk in model.chunks] for model in (source, target))
    if theirs != mine or _place(source) != _place(target):
        raise LayoutError(
            "parameters are copied between strategies of one model, and these two differ in theirs: give both roles "
            "the same architecture"
        )


def _place(model: ModelState) -> tuple[int, ...]:
    layout = model.layout
    return layout.tp_rank, layout.cp_rank, layout.pp_rank, layout.dp_rank


def _shapes(chunk: Any) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in gpt_of(chunk).named_parameters()}


@torch.no_grad()
def copy_parameters(source: Sequence[Any], target: Sequence[Any]) -> None:
    """Copies the parameters of chunks into chunks of the same model and layout. Collective."""
    gather_parameters(source)
    gather_parameters(target)
    for theirs, mine in zip(source, target, strict=True):
        values = dict(gpt_of(theirs).named_parameters())
        for name, parameter in gpt_of(mine).named_parameters():
            parameter.copy_(values[name])
