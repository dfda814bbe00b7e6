"""Layers of a model by its TransformerConfig: pipeline chunks, stages of unequal size, mixtures of experts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention

from roll_batching.settings.megatron_config import SPLIT_KEYS


def has_uneven_stages(config: Any) -> bool:
    """Whether a model with this TransformerConfig has a key for pipeline stages of unequal size."""
    return any(getattr(config, key, None) not in (None, False) for key in SPLIT_KEYS)


def layers_of_chunk(config: TransformerConfig, pp_rank: int, vp_stage: int | None) -> range:
    """Indices of the layers of a pipeline chunk in the whole model, from Megatron's own functions.

    `vp_stage` is None without virtual stages.
    """
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    return range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))


def is_mixture(layer_freq: int | Sequence[int], layer: int) -> bool:
    """Whether layer `layer` (from 0, of the whole model) is a mixture of experts under `moe_layer_freq`."""
    return layer % layer_freq == 0 if isinstance(layer_freq, int) else bool(layer_freq[layer])


def recurrent_layers(config: Any) -> str | None:
    """The architecture's key of layers with a state per sequence, in a model with this TransformerConfig; or None."""
    if getattr(config, "linear_attention_freq", None):
        return "gated_delta_net"
    return "hybrid" if getattr(config, "layer_kinds", None) else None


def has_replicated_kv_heads(config: TransformerConfig) -> bool:
    """Whether a model has fewer key-value heads than tensor-parallel ranks, which share them."""
    heads = config.num_query_groups or config.num_attention_heads
    return not config.multi_latent_attention and heads < config.tensor_model_parallel_size


def has_window(config: TransformerConfig, layer_number: int) -> bool:
    """Whether a layer (numbers start at 1) has the sliding window of the config."""
    size = getattr(config, "window_size", None)
    if size is None or size[0] < 0:
        return False
    return bool(is_layer_window_attention(size, getattr(config, "window_attn_skip_freq", None), layer_number))


def mark_shards(model: torch.nn.Module) -> None:
    """Marks weights that tensor parallelism shards, which Megatron marks only where it draws them.

    The gradient norm counts other weights on the first tensor-parallel rank alone.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        sharded = isinstance(module, (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding))
        if sharded and weight is not None and not hasattr(weight, "tensor_model_parallel"):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(weight, True, dim, 1)


def submodules_of(spec: Any) -> Any:
    """Submodules of a spec: a `ModuleSpec`, or for mixtures of experts since Megatron-Core 0.19 a `partial`."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
