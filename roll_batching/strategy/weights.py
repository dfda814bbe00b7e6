"""Reading and writing a model's parameters from outside its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.head import gpt_of


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


@torch.no_grad()
def copy_parameters(source: Sequence[Any], target: Sequence[Any]) -> None:
    """Copies the parameters of chunks into chunks of the same model and layout. Collective.

    Raises `LayoutError` when they are not the same, before anything is copied.
    """
    gather_parameters(source)
    gather_parameters(target)
    theirs, mine = [[dict(gpt_of(chunk).named_parameters()) for chunk in chunks] for chunks in (source, target)]
    shapes = [[{name: p.shape for name, p in chunk.items()} for chunk in chunks] for chunks in (theirs, mine)]
    if shapes[0] != shapes[1]:
        raise LayoutError(
            "parameters are copied between strategies of one model in one layout, and these two differ in theirs: give "
            "both roles the same architecture and the same parallel sizes"
        )
    for from_chunk, to_chunk in zip(theirs, mine, strict=True):
        for name, parameter in to_chunk.items():
            parameter.copy_(from_chunk[name])
