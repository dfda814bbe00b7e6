"""Settings of parts of a model: rope scaling, latent attention, delta nets, hybrid layers, experts, vision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from roll_batching.settings.fields import MOST_TOKENS, Settings, setting

MOST_PARTS = 2**16
"""Most layers, heads, experts, or channels of a head."""
WIDEST = 2**20
"""Most channels of a layer."""


class RopeScaling(Settings):
    """Scaling of rotary frequencies for long contexts, in Hugging Face's names."""

    type: Literal["linear", "llama3", "yarn"] = setting(help="Kind of scaling.")
    factor: float = setting(1.0, help="How many times longer than in pre-training.", ge=1)
    low_freq_factor: float = setting(1.0, help="llama3: wavelengths above the original length over this scale.", gt=0)
    high_freq_factor: float = setting(4.0, help="llama3: wavelengths below it over this stay as they are.", gt=0)
    original_max_position_embeddings: int = setting(8192, help="llama3 and yarn: context length of pre-training.", gt=0)
    beta_fast: float = setting(32.0, help="yarn: channels with more turns over that length stay as they are.", gt=0)
    beta_slow: float = setting(1.0, help="yarn: channels with fewer turns are divided by factor.", gt=0)
    truncate: bool = setting(True, help="yarn: whether the two limits are rounded to whole channels.")
    attention_factor: float | None = setting(
        None, help="yarn: factor of the rotated channels. Default: from factor, mscale and mscale_all_dim.", gt=0
    )
    mscale: float | None = setting(None, help="yarn: DeepSeek's parameter of that factor.", ge=0)
    mscale_all_dim: float | None = setting(
        None,
        help="yarn: with multi-latent attention the parameter of the attention's scale; also of that factor.",
        ge=0,
    )

    @property
    def rotated_factor(self) -> float:
        """Factor of rotated queries and keys: `attention_factor`, or inferred as in transformers."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's growth of attention's temperature with the context (Peng et al. 2023, arXiv 2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class LatentAttentionConfig(Settings):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434), in Megatron's names."""

    q_lora_rank: int | None = setting(None, help="Width of the queries' latent; default: none.", gt=0, le=WIDEST)
    kv_lora_rank: int = setting(help="Width of the latent of keys and values.", gt=0, le=WIDEST)
    qk_head_dim: int = setting(help="Channels of a head's queries and keys that are not rotated.", gt=0, le=MOST_PARTS)
    qk_pos_emb_head_dim: int = setting(
        help="Rotated channels; those of keys are the same for all heads.", gt=0, le=MOST_PARTS, multiple_of=2
    )
    v_head_dim: int = setting(help="Channels of a head's values.", gt=0, le=MOST_PARTS)
    rotary_interleaved: bool = setting(True, help="Whether channels 2i and 2i + 1 turn together.")


class DeltaNetConfig(Settings):
    """Gated delta nets (arXiv 2412.06464) in place of attention in some layers, as in Qwen3-Next."""

    layers: tuple[Literal[0, 1], ...] = setting(help="1 for each layer with a delta net, 0 for those with attention.")
    num_key_heads: int = setting(help="Heads of queries and keys.", gt=0, le=MOST_PARTS)
    num_value_heads: int = setting(help="Heads of values, a multiple of num_key_heads.", gt=0, le=MOST_PARTS)
    key_head_dim: int = setting(help="Channels of a head's queries and keys.", gt=0, le=MOST_PARTS)
    value_head_dim: int = setting(help="Channels of a head's values.", gt=0, le=MOST_PARTS)
    conv_kernel_dim: int = setting(4, help="Tokens that the convolution before spans.", ge=2, le=MOST_PARTS)

    @model_validator(mode="after")
    def _check_heads(self) -> DeltaNetConfig:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(f"num_value_heads must be a multiple of num_key_heads={self.num_key_heads}")
        if all(self.layers) or not any(self.layers):
            raise ValueError("layers must name layers with a delta net and layers with attention")
        return self


class HybridConfig(Settings):
    """Layers of one part each: a Mamba-2 mixer, attention without RoPE, an MLP with squared ReLU or experts."""

    pattern: str = setting(help="A letter per layer: M (Mamba), * (attention), - (MLP) or E (experts).")
    mamba_num_heads: int = setting(help="Heads of a Mamba layer.", gt=0, le=MOST_PARTS)
    mamba_head_dim: int = setting(help="Channels of a head.", gt=0, le=MOST_PARTS)
    mamba_num_groups: int = setting(help="Groups of heads that share B and C.", gt=0, le=MOST_PARTS)
    mamba_state_dim: int = setting(help="States per channel.", gt=0, le=MOST_PARTS)
    mamba_conv_kernel_dim: int = setting(4, help="Tokens that the convolution before spans.", ge=2, le=MOST_PARTS)
    moe_latent_size: int | None = setting(None, help="Width of experts' latent; default: none.", gt=0, le=WIDEST)


class MoEConfig(Settings):
    """Mixture-of-experts layers. Absent: every layer is dense."""

    num_experts: int = setting(help="Experts per layer.", ge=2, le=MOST_PARTS)
    router_topk: int = setting(2, help="Experts that each token visits.", ge=1)
    ffn_hidden_size: int | None = setting(
        None, help="Width of an expert; default: the dense layers' width.", gt=0, le=WIDEST
    )
    shared_expert_ffn_hidden_size: int | None = setting(
        None, help="Width of the shared expert; default: none.", gt=0, le=WIDEST
    )
    shared_expert_gate: bool = setting(False, help="Whether a gate weighs the shared expert, as in Qwen3-Next.")
    aux_loss_coeff: float = setting(0.0, help="Weight of the load-balancing loss.", ge=0)
    z_loss_coeff: float = setting(0.0, help="Weight of the router's z-loss.", ge=0)
    layer_freq: Annotated[int, Field(ge=1)] | tuple[Literal[0, 1], ...] = setting(
        1, help="Every how many layers one is a mixture; or a list, 1 for each layer that is one and 0 for the others."
    )
    router_pre_softmax: bool = setting(
        False,
        help="true: an expert's weight is its probability among all. false: among those that the token visits, so "
        "that they sum to one.",
    )
    router_score_function: Literal["softmax", "sigmoid"] = setting(
        "softmax", help="Scores of experts. sigmoid: DeepSeek-V3's; the weights of a token's experts then sum to one."
    )
    router_expert_bias: bool = setting(
        False, help="A bias per expert that is added to sigmoid scores for the choice of experts, not to their weights."
    )
    router_bias_update_rate: float = setting(
        0.0,
        help="How much each optimizer step moves the expert biases towards equal numbers of tokens "
        "(moe_router_bias_update_rate, 0.001 in Megatron). 0: they stay as loaded, as in transformers.",
        ge=0,
        lt=1,
    )
    router_num_groups: int | None = setting(
        None,
        help="Groups of experts; a token visits experts of router_group_topk groups only. Default: no groups.",
        ge=2,
    )
    router_group_topk: int | None = setting(None, help="Groups that each token visits; with router_num_groups.", ge=1)
    router_scaling_factor: float = setting(1.0, help="Factor of the weights of experts.", gt=0)
    router_dtype: Literal["fp32"] | None = setting(
        None, help="Precision of the router's product and scores; default: that of the activations."
    )

    @model_validator(mode="after")
    def _check_router(self) -> MoEConfig:
        if self.router_expert_bias and self.router_score_function != "sigmoid":
            raise ValueError("router_expert_bias needs router_score_function: sigmoid; set it, or leave the bias out")
        if self.router_bias_update_rate and not self.router_expert_bias:
            raise ValueError("router_bias_update_rate has no effect without router_expert_bias: leave it out")
        if self.shared_expert_gate and self.shared_expert_ffn_hidden_size is None:
            raise ValueError("shared_expert_gate needs shared_expert_ffn_hidden_size: set it, or leave the gate out")
        groups, chosen = self.router_num_groups, self.router_group_topk
        if (groups is None) != (chosen is None):
            raise ValueError("router_num_groups and router_group_topk belong together: set both, or none")
        if groups is not None and chosen is not None:
            if self.num_experts % groups or chosen > groups:
                raise ValueError(
                    f"{self.num_experts} experts cannot be chosen from {chosen} of {groups} groups: router_num_groups "
                    "must divide num_experts and be at least router_group_topk"
                )
            if self.router_topk % chosen or self.router_topk // chosen > self.num_experts // groups:
                raise ValueError(
                    f"router_topk={self.router_topk} must be a multiple of router_group_topk={chosen}, and at most "
                    f"the experts of these groups ({chosen} x {self.num_experts // groups})"
                )
        return self

    def is_mixture(self, layer: int) -> bool:
        """Whether the layer with this index, from 0 on, is a mixture."""
        every = self.layer_freq
        return layer % every == 0 if isinstance(every, int) else bool(every[layer])


class VisionConfig(Settings):
    """A vision encoder, in transformers' names, and how its outputs enter the text model."""

    type: Literal["qwen2_5_vl", "qwen3_vl"] = setting("qwen2_5_vl", help="The model family whose encoder it is.")
    depth: int = setting(help="Layers.", gt=0, le=MOST_PARTS)
    hidden_size: int = setting(help="Width of a layer.", gt=0, le=MOST_PARTS)
    intermediate_size: int = setting(help="Width of the feed-forward layer.", gt=0, le=MOST_PARTS)
    num_heads: int = setting(help="Heads of attention.", gt=0, le=MOST_PARTS)
    patch_size: int = setting(14, help="Pixels along a side of a patch.", gt=0, le=MOST_PARTS)
    temporal_patch_size: int = setting(2, help="Frames of a patch; of an image they are equal.", gt=0, le=MOST_PARTS)
    spatial_merge_size: int = setting(2, help="Patches along a side that become one token.", gt=0, le=MOST_PARTS)
    window_size: int = setting(
        112, help="qwen2_5_vl: pixels along a side of the windows of attention.", gt=0, le=MOST_PARTS
    )
    fullatt_block_indexes: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (7, 15, 23, 31), help="qwen2_5_vl: layers whose attention has no windows."
    )
    num_position_embeddings: int = setting(
        2304, help="qwen3_vl: positions of a square grid, interpolated to the size of each image.", gt=0, le=WIDEST
    )
    deepstack_visual_indexes: tuple[Annotated[int, Field(ge=0)], ...] = setting(
        (), help="qwen3_vl: layers whose outputs are added behind the first layers of the text model, in this order."
    )
    image_mean: tuple[float, float, float] = setting(
        (0.48145466, 0.4578275, 0.40821073), help="Mean of each channel, of pixels from 0 to 1."
    )
    image_std: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (
        setting((0.26862954, 0.26130258, 0.27577711), help="Standard deviation of each channel.")
    )
    mrope_section: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = (
        setting((16, 24, 24), help="Pairs of rotated channels by the axis of their position: time, height, width.")
    )
    mrope_interleaved: bool = setting(
        False, help="Whether the axes take turns along the channels; otherwise each has its channels together."
    )
    image_token_id: int = setting(help="Token that stands for a part of an image.", ge=0, le=MOST_TOKENS)
    video_token_id: int = setting(help="The same for videos, which are not supported.", ge=0, le=MOST_TOKENS)
    vision_start_token_id: int = setting(help="Token before an image.", ge=0, le=MOST_TOKENS)
    vision_end_token_id: int = setting(help="Token behind an image.", ge=0, le=MOST_TOKENS)

    @model_validator(mode="after")
    def _check_shape(self) -> VisionConfig:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(f"hidden_size must be a multiple of 4 * num_heads = {4 * self.num_heads}")
        if self.type == "qwen2_5_vl" and self.window_size < self.patch_size * self.spatial_merge_size:
            raise ValueError("window_size must be at least patch_size * spatial_merge_size")
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError("num_position_embeddings must be a square: the positions of a grid")
        layers = self.deepstack_visual_indexes
        if any(layer >= self.depth for layer in layers) or list(layers) != sorted({*layers}):
            raise ValueError(f"deepstack_visual_indexes must be ascending layers below depth={self.depth}")
        section = self.mrope_section
        if self.mrope_interleaved and any(axis + 3 * (section[axis] - 1) >= sum(section) for axis in (1, 2)):
            raise ValueError(f"mrope_section: height and width take turns with time, which has too few of {section}")
        for name in _OTHER_ENCODERS[self.type]:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with type {self.type}: leave it out")
        return self


_OTHER_ENCODERS: Mapping[str, tuple[str, ...]] = {
    "qwen2_5_vl": ("num_position_embeddings", "deepstack_visual_indexes"),
    "qwen3_vl": ("window_size", "fullatt_block_indexes"),
}
"""Fields of `VisionConfig` of other types, by type."""
