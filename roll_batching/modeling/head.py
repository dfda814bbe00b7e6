"""The deferred head: an output layer that hands hidden states on, and what turns them into logits later.

The whole `[tokens, vocabulary]` is what makes an RL step's memory peak. With the head deferred, the
model's output is hidden states, and log-probabilities are computed from them in token chunks (see
`roll_batching.losses.vocab_parallel`). The output layer keeps its module object, parameter, hooks and
state-dict keys: only its class changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import ColumnParallelLinear

from roll_batching.errors import LayoutError


class DeferredHead(ColumnParallelLinear):
    """A ColumnParallelLinear that returns its input; `head_weight` and the loss do its work later."""

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Hidden states [s, b, h] as they came (a sequence-parallel shard stays a shard)."""
        return input_, None


def gpt_of(chunk: torch.nn.Module) -> Any:
    """The GPTModel inside Megatron's wrappers (DDP, Float16Module)."""
    model: Any = chunk
    while hasattr(model, "module"):
        model = model.module
    return model


def defer_head(gpt: Any) -> None:
    """Turns `gpt`'s output layer into one that hands hidden states on; models without one are left alone.

    Raises `LayoutError` for multi-token prediction, deferred embedding gradients, and output layers
    that are not plain ColumnParallelLinear.
    """
    if not gpt.post_process or isinstance(gpt.output_layer, DeferredHead):
        return
    if getattr(gpt, "mtp_process", False) or gpt.config.defer_embedding_wgrad_compute:
        raise LayoutError(
            "the head cannot be deferred with multi-token prediction or defer_embedding_wgrad_compute: turn them off"
        )
    if type(gpt.output_layer) is not ColumnParallelLinear or gpt.output_layer.bias is not None:
        raise LayoutError(
            f"the head cannot be deferred for {type(gpt.output_layer).__name__}: only a ColumnParallelLinear without "
            "bias. Use defer_head=False"
        )
    gpt.output_layer.__class__ = DeferredHead


@contextlib.contextmanager
def hidden_states_of(gpt: Any) -> Iterator[None]:
    """Inside, the model hands hidden states on where its output layer is a plain one; `logits_at` takes either."""
    layer: Any = gpt.output_layer if gpt.post_process else None
    if type(layer) is not ColumnParallelLinear or layer.bias is not None:
        yield
        return
    layer.__class__ = DeferredHead
    try:
        yield
    finally:
        layer.__class__ = ColumnParallelLinear


def logits_at(output: torch.Tensor, rows: torch.Tensor, gpt: Any) -> torch.Tensor:
    """Logits [n, vocabulary / tp] of the positions `rows` [n], which count through a model's output row by row.

    `output` is [b, s, vocabulary / tp], or, of a deferred head, [b, s (/ tp with sequence parallelism), hidden]: then
    no other logits are computed.
    """
    if not is_deferred(gpt):
        return output.reshape(-1, output.shape[-1])[rows]
    weight = head_weight(gpt)
    return F.linear(head_input(output, weight, gpt)[rows], weight)


def is_deferred(gpt: Any) -> bool:
    """Whether the model's output is hidden states."""
    return bool(gpt.post_process and isinstance(gpt.output_layer, DeferredHead))


def head_weight(gpt: Any) -> torch.Tensor:
    """This rank's vocabulary rows of the output weight, [vocabulary / tp, hidden]."""
    if gpt.share_embeddings_and_output_weights:
        return gpt.shared_embedding_or_output_weight()
    return gpt.output_layer.weight


def head_input(hidden: torch.Tensor, weight: torch.Tensor, gpt: Any) -> torch.Tensor:
    """Hidden states of the last stage, ready for the head: [rows * s, hidden] on every tensor-parallel rank.

    `hidden` is the model's output [rows, s, hidden] (with sequence parallelism s is a shard). Both
    mappings sum the vocabulary shards' parts of the gradient over TP in their backward; without
    them the loss looks right and the gradients are wrong.
    """
    hidden, group = hidden.to(weight.dtype), gpt.pg_collection.tp  # Float16Module made the output fp32
    if gpt.config.sequence_parallel:
        whole = tensor_parallel.gather_from_sequence_parallel_region(
            hidden.transpose(0, 1), tensor_parallel_output_grad=True, group=group
        )
        return whole.transpose(0, 1).reshape(-1, whole.shape[-1])
    # Nothing may be transposed behind this mapping: its backward all-reduces a copy of a gradient that is
    # not contiguous, and returns the original (Megatron's mappings, `_reduce`).
    return tensor_parallel.copy_to_tensor_model_parallel_region(hidden, group=group).reshape(-1, hidden.shape[-1])
