"""The deferred head: an output layer that returns hidden states, and their later projection to logits.

Logits `[tokens, vocabulary]` are the memory peak of an RL step. With the head deferred the model returns hidden states,
and log-probs are computed from them in chunks (`roll_batching.losses.vocab_parallel`). The output layer keeps its
module object, parameter, hooks and state-dict keys: only its class changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear

from roll_batching.errors import LayoutError


class DeferredHead(ColumnParallelLinear):
    """A ColumnParallelLinear that returns its input; the loss multiplies it with `head_weight` later."""

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """The hidden states [s, b, h] unchanged; with sequence parallelism s is this rank's shard."""
        return input_, None


def _is_plain(layer: Any) -> bool:
    """Whether an output layer is Megatron's ColumnParallelLinear, or a subclass of Megatron's, without bias."""
    is_megatron_s = isinstance(layer, ColumnParallelLinear) and type(layer).__module__.startswith("megatron.core.")
    return is_megatron_s and layer.bias is None


@functools.cache
def _deferred(base: Any) -> Any:
    """`DeferredHead`, as a subclass of `base` where that is a subclass of ColumnParallelLinear."""
    if base is ColumnParallelLinear:
        return DeferredHead
    return type(base.__name__, (DeferredHead, base), {})


def gpt_of(chunk: torch.nn.Module) -> Any:
    """The GPTModel inside Megatron's wrappers (DDP, Float16Module)."""
    model: Any = chunk
    while hasattr(model, "module"):
        model = model.module
    return model


def defer_head(gpt: Any) -> None:
    """Makes `gpt`'s output layer a `DeferredHead`; does nothing on stages without an output layer.

    Raises `LayoutError` for multi-token prediction, defer_embedding_wgrad_compute, and output layers that are not
    Megatron's ColumnParallelLinear, or a subclass of Megatron's, without bias.
    """
    if not gpt.post_process or isinstance(gpt.output_layer, DeferredHead):
        return
    with_heads = getattr(gpt, "mtp_process", False) and not hasattr(gpt, "predicts_ahead")
    if with_heads or gpt.config.defer_embedding_wgrad_compute:
        raise LayoutError(
            "the head cannot be deferred with Megatron's multi-token prediction or defer_embedding_wgrad_compute: turn "
            "them off"
        )
    if not _is_plain(gpt.output_layer):
        raise LayoutError(
            f"the head cannot be deferred for {type(gpt.output_layer).__name__}: only a ColumnParallelLinear without "
            "bias. Use defer_head=False"
        )
    gpt.output_layer.__class__ = _deferred(type(gpt.output_layer))  # type: ignore[arg-type]


@contextlib.contextmanager
def hidden_states_of(gpt: Any) -> Iterator[None]:
    """Defers the head inside, if the output layer is a plain one; `logits_at` handles both cases."""
    layer: Any = gpt.output_layer if gpt.post_process else None
    base: Any = type(layer)
    if isinstance(layer, DeferredHead) or not _is_plain(layer):
        yield
        return
    layer.__class__ = _deferred(base)
    try:
        yield
    finally:
        layer.__class__ = base


def logits_at(output: torch.Tensor, rows: torch.Tensor, gpt: Any) -> torch.Tensor:
    """Logits [n, vocabulary / tp] at the positions `rows` [n], indices into the flattened [b * s] of the output.

    `output` is [b, s, vocabulary / tp], or, with a deferred head, [b, s (/ tp with sequence parallelism), hidden], of
    which only these positions are projected.
    """
    if not is_deferred(gpt):
        return output.reshape(-1, output.shape[-1])[rows]
    weight = head_weight(gpt)
    return F.linear(head_input(output, weight, gpt)[rows], weight)


def is_deferred(gpt: Any) -> bool:
    """Whether the model returns hidden states instead of logits."""
    return bool(gpt.post_process and isinstance(gpt.output_layer, DeferredHead))


def head_weight(gpt: Any) -> torch.Tensor:
    """This rank's shard of the output weight, [vocabulary / tp, hidden]."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight


def head_input(hidden: torch.Tensor, weight: torch.Tensor, gpt: Any) -> torch.Tensor:
    """The head's input [rows * s, hidden], whole on every tensor-parallel rank, from the last stage's output.

    `hidden` is [rows, s, hidden]; with sequence parallelism s is this rank's shard. The backward of both mappings sums
    the gradients of the vocabulary shards over TP: without them the loss is right and the gradients are wrong.
    """
    hidden, group = hidden.to(weight.dtype), gpt.pg_collection.tp  # Float16Module made the output fp32
    if gpt.config.sequence_parallel:
        gathered = tensor_parallel.gather_from_sequence_parallel_region(
            hidden.transpose(0, 1), tensor_parallel_output_grad=True, group=group
        )
        return gathered.transpose(0, 1).reshape(-1, gathered.shape[-1])
    # No transpose after this mapping: for a gradient that is not contiguous, Megatron's `_reduce` (mappings.py)
    # all-reduces a copy and returns the original.
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group).reshape(-1, hidden.shape[-1])
