"""Layer specs of TransformerEngine's layers over packs: plain attention, multi-latent attention, gated delta nets.

Linear layers, norms and experts are TransformerEngine's, so that they compute in FP8 where the config says so. Only the
cores between linear layers are others', in the precision of the weights: core attention is the attention backend's, the
rotation of multi-latent attention and the recurrence of gated delta nets are the package's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from roll_batching.errors import LayoutError
from roll_batching.modeling.rotary import RotarySettings


def require_engine() -> None:
    """Raises `LayoutError` if Megatron could not import TransformerEngine."""
    if not HAVE_TE:
        raise LayoutError(
            "TransformerEngine cannot be imported (python -c 'import transformer_engine.pytorch' shows why): fix its "
            "installation, or build local layers"
        )


def engine_layer_spec(
    config: TransformerConfig,
    rotary: RotarySettings | None,
    *,
    experts: bool | None,
    norm: type[torch.nn.Module],
    core: Callable[..., torch.nn.Module],
    delta_net: bool,
) -> Any:
    """Megatron's spec of a layer of TransformerEngine, with the core attention that `core` builds.

    Args:
        config: the model's config.
        rotary: RoPE of multi-latent attention.
        experts: whether the layer is a mixture of experts; None: if the config has experts.
        norm: class of the norms of latents.
        core: builds the core attention.
        delta_net: whether a gated delta net takes the place of attention.

    Raises `LayoutError` without TransformerEngine, and for multi-latent attention without `rotary`.
    """
    require_engine()
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=None if experts is False else config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    attention = layer.submodules.self_attention
    if config.multi_latent_attention:
        from roll_batching.modeling.latent_attention import take_packs  # few models need it

        # Megatron's own spec has layers here whose weights every tensor-parallel rank holds whole.
        attention.submodules.linear_q_down_proj = TEColumnParallelLinear
        attention.submodules.linear_kv_down_proj = TEColumnParallelLinear
        take_packs(attention, rotary, norm, core)
    elif delta_net:
        from roll_batching.modeling.recurrent_layer import PackedDeltaNet  # few models need it

        # Megatron's spec has the norm inside the projection of attention.
        layer.submodules.input_layernorm = TENorm
        layer.submodules.self_attention = ModuleSpec(
            module=PackedDeltaNet, params={"column": TEColumnParallelLinear, "row": TERowParallelLinear}
        )
    else:
        attention.submodules.core_attention = core
    return layer
