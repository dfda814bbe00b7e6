"""The layer spec of a GPTModel that takes packs: for built models, and for people who build their own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from roll_batching.errors import LayoutError
from roll_batching.modeling.attention import PackedAttention
from roll_batching.modeling.rotary import RotarySettings


class PackedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked for sequence parallelism (Megatron's wrapper of it refuses that)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedLayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, marked for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def packed_layer_spec(config: TransformerConfig, rotary: RotarySettings | None = None) -> Any:
    """Spec of one transformer layer whose core attention takes packs.

    With `rotary`, build the GPTModel with `position_embedding_type="none"`: the core rotates. Without
    it, queries and keys are used as the model rotated them. Raises `LayoutError` for norms other than
    RMSNorm and LayerNorm.
    """
    norms: dict[str, type[torch.nn.Module]] = {"RMSNorm": PackedRMSNorm, "LayerNorm": PackedLayerNorm}
    if config.normalization not in norms:
        raise LayoutError(f"normalization {config.normalization!r} is not supported: use one of {', '.join(norms)}")
    norm = norms[config.normalization]
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = functools.partial(PackedAttention, rotary=rotary)
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    return layer


def packed_block_spec(config: TransformerConfig, layers: int, rotary: RotarySettings | None = None) -> Any:
    """Spec of a transformer block of `layers` layers, for one pipeline chunk."""
    layer = packed_layer_spec(config, rotary)
    norm = layer.submodules.input_layernorm
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
