"""Multi-latent attention (MLA) over packs: Megatron's layer, with RoPE from the positions of the pack.

Megatron's own rotation of packs waits for the device in every layer, and its local layers lose gradients under tensor
parallelism: every rank uses the rotated channels of the keys, which all heads share, for its own heads only, and the
gradients of these are not summed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from roll_batching.errors import LayoutError
from roll_batching.megatron_patches.layers import latent_attention_construction
from roll_batching.modeling.rotary import PackRotation, RotarySettings
from roll_batching.settings import ArchitectureConfig

NORM_EPSILON = 1e-6
"""Epsilon of the norms of latents: DeepSeek's code (and transformers) use it whatever `rms_norm_eps` says."""


def latent_options(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Arguments of Megatron's MLATransformerConfig that TransformerConfig does not have."""
    latent, scaling = architecture.multi_latent_attention, architecture.rope_scaling
    assert latent is not None
    with_yarn = scaling is not None and scaling.type == "yarn"
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_head_dim,
        "qk_pos_emb_head_dim": latent.qk_pos_emb_head_dim,
        "v_head_dim": latent.v_head_dim,
        # Megatron's rotation is not used, but its scale of attention: YaRN's mscale, 1 without one.
        "rope_type": "rope",
        "rotary_scaling_factor": scaling.factor if with_yarn and scaling is not None else 1.0,
        "mscale_all_dim": (scaling.mscale_all_dim or 0.0) if with_yarn and scaling is not None else 0.0,
    }


class PackedLatentAttention(MLASelfAttention):
    """Megatron's MLA with RoPE from positions, for cores that do not rotate themselves.

    It builds the norms of its latents itself: Megatron-Core 0.19 builds them for queries with latents only, and, like
    TransformerEngine, inside the next linear layer.
    """

    def __init__(
        self, *arguments: Any, rotary: RotarySettings, norm: Callable[..., torch.nn.Module], **keywords: Any
    ) -> None:
        with latent_attention_construction():
            super().__init__(*arguments, **keywords)
        config = self.config
        if config.q_lora_rank is not None:
            self.q_layernorm = norm(config, config.q_lora_rank, eps=NORM_EPSILON)
        self.kv_layernorm = norm(config, config.kv_lora_rank, eps=NORM_EPSILON)
        self.rotary_pos_emb = None
        self._rotation = PackRotation(rotary, self.config.qk_pos_emb_head_dim)
        self.core_attention.pack_rotates = True  # `from_parts` reads it: nobody else may rotate

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **keywords: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Rotated queries and keys, values, and the latents of queries and of keys and values.

        For a pack queries and keys are [tokens, heads, head_dim]; for a pass with a cache [positions, rows, ...].
        """
        config, heads = self.config, self.num_attention_heads_per_partition
        q_latent = hidden_states
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            (q_latent,) = self._down(self.linear_q_down_proj, hidden_states, config.q_lora_rank)
            q_latent = self.q_layernorm(self._scatter(q_latent))
            query, _ = self.linear_q_up_proj(q_latent)
        kv_latent, k_rotated = self._down(
            self.linear_kv_down_proj, hidden_states, config.kv_lora_rank, config.qk_pos_emb_head_dim
        )
        kv_latent = self.kv_layernorm(self._scatter(kv_latent))
        keys_values, _ = self.linear_kv_up_proj(kv_latent)
        # Each rank's heads give a part of the gradient of the channels that all heads share.
        k_rotated = copy_to_tensor_model_parallel_region(k_rotated, group=self.tp_group)
        query = query.view(*query.shape[:-1], heads, self.q_head_dim)
        keys_values = keys_values.view(*keys_values.shape[:-1], heads, config.qk_head_dim + config.v_head_dim)
        k_rotated = k_rotated.unsqueeze(-2)
        if packed_seq_params.qkv_format == "thd":
            query, keys_values, k_rotated = (x.squeeze(1) for x in (query, keys_values, k_rotated))
        q_kept, q_rotated = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        k_kept, value = keys_values.split([config.qk_head_dim, config.v_head_dim], -1)
        q_rotated, k_rotated = self._rotation(q_rotated, k_rotated, packed_seq_params)
        query = torch.cat([q_kept, q_rotated], -1)
        key = torch.cat([k_kept, k_rotated.expand(*k_kept.shape[:-1], -1)], -1)
        return query, key, value.contiguous(), q_latent, kv_latent

    def _run_core_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **keywords: Any
    ) -> torch.Tensor:
        """The core's output; Megatron-Core 0.19 would widen the values of packs, which our cores take as they are."""
        output: torch.Tensor = self.core_attention(query, key, value, attention_mask, **keywords)
        return output

    def _down(self, projection: Any, hidden: torch.Tensor, *widths: int) -> tuple[torch.Tensor, ...]:
        """The output of a projection whose rows are sharded, whole on every rank, split into `widths`."""
        output, _ = projection(hidden)
        if self.tp_group.size() > 1:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output.split(list(widths), -1)

    def _scatter(self, latent: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of `latent`, which a projection has gathered under sequence parallelism."""
        if not self.config.sequence_parallel:
            return latent
        return scatter_to_sequence_parallel_region(latent, group=self.tp_group)


class LatentCore:
    """Constructs the core attention of a backend; Megatron's MLA takes a class, not a function."""

    def __new__(cls, **arguments: Any) -> Any:  # type: ignore[misc]
        """The core; `build` makes it of Megatron's arguments."""
        return arguments.pop("build")(**arguments)


def latent_layer_spec(
    config: TransformerConfig,
    rotary: RotarySettings | None,
    *,
    experts: bool | None,
    norm: type[torch.nn.Module],
    core: Callable[..., torch.nn.Module],
) -> Any:
    """The spec of a layer with `PackedLatentAttention` and the core that `core` builds.

    Raises `LayoutError` without `rotary`.
    """
    layer = get_gpt_layer_local_spec(
        num_experts=None if experts is False else config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=False,  # `PackedLatentAttention` adds the latents' norms
        multi_latent_attention=True,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    take_packs(layer.submodules.self_attention, rotary, norm, core)
    return layer


def take_packs(
    attention: Any, rotary: RotarySettings | None, norm: type[torch.nn.Module], core: Callable[..., torch.nn.Module]
) -> None:
    """Makes the spec of Megatron's multi-latent attention one of `PackedLatentAttention`."""
    if rotary is None:
        raise LayoutError("multi-latent attention over packs rotates itself: give rotary, and a backend that rotates")
    attention.module = PackedLatentAttention
    attention.params = {**attention.params, "rotary": rotary, "norm": norm}
    attention.submodules.core_attention = ModuleSpec(module=LatentCore, params={"build": core})
