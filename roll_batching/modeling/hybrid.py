"""Models whose layers have one part each: a Mamba-2 mixer, attention without RoPE, an MLP or experts, as in Nemotron-H.

One Megatron layer per letter of the pattern, so that pipelines are divided by layers as for other models. Megatron's
own MambaModel (0.16) needs CUDA and TransformerEngine, and so do its experts with a latent narrower than the model
(Nemotron 3 Super).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from roll_batching.modeling.layer_modules import ReplicatedKVAttention
from roll_batching.modeling.layers import has_replicated_kv_heads, submodules_of
from roll_batching.modeling.mamba import PackedMamba
from roll_batching.settings import ArchitectureConfig


@dataclass
class HybridTransformerConfig(TransformerConfig):
    """Megatron's config with the kinds of the layers and the sizes that it has no names for."""

    layer_kinds: str = ""
    """M, *, - or E for each layer of the whole model."""
    mamba_conv_kernel_dim: int = 4


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of ReLU. Megatron's own is compiled, anew for numbers of tokens of experts."""
    return F.relu(x).square()


def hybrid_options(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Options of `HybridTransformerConfig` beside those of other models."""
    hybrid = architecture.hybrid
    assert hybrid is not None
    return {
        "is_hybrid_model": True,
        "layer_kinds": hybrid.pattern,
        "mamba_num_heads": hybrid.mamba_num_heads,
        "mamba_head_dim": hybrid.mamba_head_dim,
        "mamba_num_groups": hybrid.mamba_num_groups,
        "mamba_state_dim": hybrid.mamba_state_dim,
        "mamba_conv_kernel_dim": hybrid.mamba_conv_kernel_dim,
        "gated_linear_unit": False,
        "activation_func": squared_relu,
        "no_rope_freq": [1] * architecture.num_layers,
        "moe_layer_freq": [int(kind == "E") for kind in hybrid.pattern],  # a list also separates layers in checkpoints
        "moe_latent_size": hybrid.moe_latent_size,
    }


def hybrid_block_spec(config: Any, layers: range, norm: type[torch.nn.Module], core: Any) -> TransformerBlockSubmodules:
    """The spec of a pipeline chunk with these layers of the whole model; `core` is the core attention."""
    kinds = {kind: _layer_spec(config, kind, norm, core) for kind in set(config.layer_kinds)}
    return TransformerBlockSubmodules(layer_specs=[kinds[config.layer_kinds[n]] for n in layers], layer_norm=norm)


def _layer_spec(config: Any, kind: str, norm: type[torch.nn.Module], core: Any) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if kind == "E" else None, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    if kind in "M*":
        parts.pre_mlp_layernorm = parts.mlp = IdentityOp
        parts.mlp_bda = IdentityFuncOp
    else:
        parts.input_layernorm = parts.self_attention = IdentityOp
        parts.self_attn_bda = IdentityFuncOp
    if kind == "M":
        parts.self_attention = ModuleSpec(module=PackedMamba)
    elif kind == "*":
        parts.self_attention.submodules.core_attention = core
        if has_replicated_kv_heads(config):
            parts.self_attention.module = ReplicatedKVAttention
    elif kind == "E" and config.moe_latent_size is not None:
        layer.module = LatentMixtureLayer
    return layer


# ---- experts in a latent


class _Projection(torch.nn.Linear):
    """A linear layer that all tensor-parallel ranks hold whole, called as Megatron's."""

    def __init__(self, config: Any, inputs: int, outputs: int, init: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(inputs, outputs, bias=False, device=device, dtype=config.params_dtype)
        # Each rank projects its part of the tokens, so Megatron adds the weight's gradients over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            init(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The output, and no bias."""
        return super().forward(x), None


class LatentMixture(MoELayer):
    """Megatron's mixture with a projection to the latent before tokens go to experts, and one back behind them."""

    def __init__(self, config: Any, submodules: Any, pg_collection: Any) -> None:
        # With moe_latent_size in its config, Megatron's constructor wants TransformerEngine; its passes do not.
        without = copy.copy(config)
        without.moe_latent_size = None
        super().__init__(without, dataclasses.replace(submodules, experts=IdentityOp), pg_collection=pg_collection)
        self.config = config
        experts = submodules.experts  # a partial since Megatron-Core 0.19
        build = experts if isinstance(experts, functools.partial) else functools.partial(build_module, experts)
        self.experts = build(self.num_local_experts, config, pg_collection=pg_collection)
        latent, hidden = config.moe_latent_size, config.hidden_size
        self.fc1_latent_proj = _Projection(config, hidden, latent, config.init_method)
        self.fc2_latent_proj = _Projection(config, latent, hidden, config.output_layer_init_method)


class LatentMixtureLayer(TransformerLayer):
    """Megatron's layer with a `LatentMixture`, whose process groups it gives to Megatron's own classes only."""

    def __init__(self, config: Any, submodules: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, dataclasses.replace(submodules, mlp=IdentityOp), *arguments, **keywords)
        self.mlp = LatentMixture(config, submodules_of(submodules.mlp), self.pg_collection)
        self.mlp.set_layer_number(self.layer_number)
        self.is_moe_layer, self.recompute_mlp = True, False
