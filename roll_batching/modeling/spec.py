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


def packed_layer_spec(
    config: TransformerConfig, rotary: RotarySettings | None = None, *, experts: bool | None = None
) -> Any:
    """Spec of one transformer layer whose core attention takes packs.

    `experts` says whether it is a mixture; None: whenever the config has experts. With `rotary`, build the
    GPTModel with `position_embedding_type="none"`: the core rotates. Without it, queries and keys are used as
    the model rotated them. Raises `LayoutError` for norms other than RMSNorm and LayerNorm.
    """
    norms: dict[str, type[torch.nn.Module]] = {"RMSNorm": PackedRMSNorm, "LayerNorm": PackedLayerNorm}
    if config.normalization not in norms:
        raise LayoutError(f"normalization {config.normalization!r} is not supported: use one of {', '.join(norms)}")
    norm = norms[config.normalization]
    layer = get_gpt_layer_local_spec(
        num_experts=None if experts is False else config.num_moe_experts,
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


def packed_block_spec(
    config: TransformerConfig, layers: int, rotary: RotarySettings | None = None, *, first: int = 0
) -> Any:
    """Spec of a transformer block of `layers` layers, for one pipeline chunk; `first` is its first layer's index.

    With experts, every `moe_layer_freq`-th layer of the whole model is a mixture, from index 0 on.
    """
    every = config.moe_layer_freq
    kinds = [packed_layer_spec(config, rotary, experts=mixture) for mixture in (False, True)]
    specs = [kinds[index % every == 0] for index in range(first, first + layers)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=kinds[0].submodules.input_layernorm)
