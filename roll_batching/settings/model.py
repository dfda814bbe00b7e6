"""Settings of the model: architecture, rope scaling, mixture of experts, and ROLL's `model_args`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from roll_batching.errors import ConfigError, LayoutError
from roll_batching.settings.adapters import AdapterArgs
from roll_batching.settings.fields import MOST_TOKENS, Settings, setting
from roll_batching.settings.model_parts import VisionConfig, problem_of_parts

if TYPE_CHECKING:
    from roll_batching.huggingface.config_json import Translation

_MOST_PARTS = 2**16
"""Most layers, heads, experts, or channels of a head."""
_WIDEST = 2**20
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

    q_lora_rank: int | None = setting(None, help="Width of the queries' latent; default: none.", gt=0, le=_WIDEST)
    kv_lora_rank: int = setting(help="Width of the latent of keys and values.", gt=0, le=_WIDEST)
    qk_head_dim: int = setting(help="Channels of a head's queries and keys that are not rotated.", gt=0, le=_MOST_PARTS)
    qk_pos_emb_head_dim: int = setting(
        help="Rotated channels; those of keys are the same for all heads.", gt=0, le=_MOST_PARTS, multiple_of=2
    )
    v_head_dim: int = setting(help="Channels of a head's values.", gt=0, le=_MOST_PARTS)
    rotary_interleaved: bool = setting(True, help="Whether channels 2i and 2i + 1 turn together.")


class DeltaNetConfig(Settings):
    """Gated delta nets (arXiv 2412.06464) in place of attention in some layers, as in Qwen3-Next."""

    layers: tuple[Literal[0, 1], ...] = setting(help="1 for each layer with a delta net, 0 for those with attention.")
    num_key_heads: int = setting(help="Heads of queries and keys.", gt=0, le=_MOST_PARTS)
    num_value_heads: int = setting(help="Heads of values, a multiple of num_key_heads.", gt=0, le=_MOST_PARTS)
    key_head_dim: int = setting(help="Channels of a head's queries and keys.", gt=0, le=_MOST_PARTS)
    value_head_dim: int = setting(help="Channels of a head's values.", gt=0, le=_MOST_PARTS)
    conv_kernel_dim: int = setting(4, help="Tokens that the convolution before spans.", ge=2, le=_MOST_PARTS)

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
    mamba_num_heads: int = setting(help="Heads of a Mamba layer.", gt=0, le=_MOST_PARTS)
    mamba_head_dim: int = setting(help="Channels of a head.", gt=0, le=_MOST_PARTS)
    mamba_num_groups: int = setting(help="Groups of heads that share B and C.", gt=0, le=_MOST_PARTS)
    mamba_state_dim: int = setting(help="States per channel.", gt=0, le=_MOST_PARTS)
    mamba_conv_kernel_dim: int = setting(4, help="Tokens that the convolution before spans.", ge=2, le=_MOST_PARTS)
    moe_latent_size: int | None = setting(None, help="Width of experts' latent; default: none.", gt=0, le=_WIDEST)


class MoEConfig(Settings):
    """Mixture-of-experts layers. Absent: every layer is dense."""

    num_experts: int = setting(help="Experts per layer.", ge=2, le=_MOST_PARTS)
    router_topk: int = setting(2, help="Experts that each token visits.", ge=1)
    ffn_hidden_size: int | None = setting(
        None, help="Width of an expert; default: the dense layers' width.", gt=0, le=_WIDEST
    )
    shared_expert_ffn_hidden_size: int | None = setting(
        None, help="Width of the shared expert; default: none.", gt=0, le=_WIDEST
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
            raise ValueError("router_expert_bias needs router_score_function: sigmoid")
        if self.router_bias_update_rate and not self.router_expert_bias:
            raise ValueError("router_bias_update_rate has no effect without router_expert_bias: leave it out")
        if self.shared_expert_gate and self.shared_expert_ffn_hidden_size is None:
            raise ValueError("shared_expert_gate needs shared_expert_ffn_hidden_size")
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


class ArchitectureConfig(Settings):
    """A dense or mixture decoder in the shape of Qwen and Llama."""

    vocab_size: int = setting(
        help="Tokens of the vocabulary; padded up inside where tensor parallelism needs it.", gt=0, le=MOST_TOKENS
    )
    hidden_size: int = setting(help="Width of the residual stream.", gt=0, le=_WIDEST)
    num_layers: int = setting(help="Decoder layers.", gt=0, le=_MOST_PARTS)
    num_attention_heads: int = setting(help="Query heads.", gt=0, le=_MOST_PARTS)
    num_query_groups: int | None = setting(None, help="Key and value heads; default: as many as query heads.", gt=0)
    kv_channels: int | None = setting(
        None, help="Width of one head; default: hidden_size / num_attention_heads.", gt=0, le=_MOST_PARTS
    )
    ffn_hidden_size: int | None = setting(
        None, help="Width of the gated feed-forward layer; default: 4 x hidden_size.", gt=0, le=_WIDEST
    )
    max_position_embeddings: int = setting(4096, help="Longest sequence the model is meant for.", gt=0)
    rotary_base: float = setting(10000.0, help="Base of the rotary frequencies.", gt=0)
    rotary_percent: float = setting(1.0, help="Share of each head's channels that is rotated.", gt=0, le=1)
    rope_scaling: RopeScaling | None = setting(None, help="Scaling of the rotary frequencies; default: none.")
    rotary_local_base: float | None = setting(
        None, help="Base of layers with the sliding window, without rope_scaling; default: that of all layers.", gt=0
    )
    norm_epsilon: float = setting(1e-6, help="Epsilon of RMSNorm.", gt=0)
    zero_centered_norms: bool = setting(False, help="Whether a norm's factor is 1 + its weight, as in Gemma.")
    sandwich_norms: bool = setting(
        False, help="Norms behind attention and feed-forward layers, too, before they are added, as in Gemma."
    )
    scaled_embedding: bool = setting(False, help="Whether embeddings are multiplied by sqrt(hidden_size), as in Gemma.")
    tie_word_embeddings: bool = setting(False, help="Whether the output head shares the embedding's weight.")
    qk_layernorm: bool | Literal["all_heads"] = setting(
        False, help="Normalise queries and keys: per head, as Qwen3 does; all_heads: all together, as in MiniMax-M2."
    )
    add_qkv_bias: bool = setting(False, help="Bias on the query, key and value projections, as Qwen2 has.")
    add_bias_linear: bool = setting(
        False,
        help="Bias on every linear layer, router and experts included, as gpt-oss has. Without tensor parallelism.",
    )
    swiglu_limit: float | None = setting(
        None, help="gpt-oss's gate: both halves clamped here, sigmoid of 1.702 x, and 1 added. Default: SwiGLU.", gt=0
    )
    activation: Literal["silu", "gelu_tanh"] = setting(
        "silu", help="Activation of the gate of feed-forward layers. gelu_tanh: GELU by tanh, as in Gemma."
    )
    query_pre_attn_scalar: float | None = setting(
        None, help="Scores are products divided by the square root of this; default: a head's channels.", gt=0
    )
    attention_sinks: bool = setting(
        False, help="A learnt logit per head that takes its share of every softmax, as gpt-oss has."
    )
    attention_output_gate: bool = setting(False, help="Whether a gate per channel weighs attention, as in Qwen3-Next.")
    gated_delta_net: DeltaNetConfig | None = setting(
        None, help="Layers with a gated delta net in place of attention; default: none."
    )
    hybrid: HybridConfig | None = setting(None, help="Layers with one part each, as in Nemotron-H; default: none.")
    init_std: float = setting(0.02, help="Standard deviation of the random initial weights.", gt=0)
    sliding_window: int | None = setting(
        None,
        help="Tokens that a token attends to at most, itself included; attention backends without "
        "windows refuse longer sequences. Default: no window.",
        gt=0,
    )
    window_layers: tuple[Literal[0, 1], ...] | None = setting(
        None, help="1 for each layer with the sliding window and 0 for the others; default: all have it."
    )
    hidden_dropout: float = setting(0.0, help="Dropout after attention and feed-forward layers.", ge=0, lt=1)
    multi_latent_attention: LatentAttentionConfig | None = setting(
        None, help="Multi-latent attention, whose head dimensions replace kv_channels; default: none."
    )
    moe: MoEConfig | None = setting(None, help="Mixture-of-experts layers; default: dense.")
    vision: VisionConfig | None = setting(None, help="Vision encoder of a model that takes images; default: none.")
    mtp_num_layers: int | None = setting(None, help="Trained heads of multi-token prediction (MTP).", ge=0, le=64)

    @model_validator(mode="after")
    def _check_windows(self) -> ArchitectureConfig:
        if self.window_layers is not None:
            if self.sliding_window is None:
                raise ValueError("window_layers has no effect without sliding_window: leave it out")
            if len(self.window_layers) != self.num_layers:
                raise ValueError(f"window_layers has {len(self.window_layers)} entries for {self.num_layers} layers")
        if self.rotary_local_base is not None and self.sliding_window is None:
            raise ValueError("rotary_local_base has no effect without sliding_window: leave it out")
        delta = self.gated_delta_net
        if delta is not None and len(delta.layers) != self.num_layers:
            raise ValueError(f"gated_delta_net.layers has {len(delta.layers)} entries for {self.num_layers} layers")
        if self.activation != "silu" and self.swiglu_limit is not None:
            raise ValueError("activation has no effect with swiglu_limit: leave it out")
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> ArchitectureConfig:
        if (problem := problem_of_parts(self)) is not None:
            raise ValueError(problem)
        return self

    @property
    def kv_heads(self) -> int:
        """Key and value heads, resolved."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        """Width of the queries and keys of one head, resolved."""
        latent = self.multi_latent_attention
        if latent is not None:
            return latent.qk_head_dim + latent.qk_pos_emb_head_dim
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def value_dim(self) -> int:
        """Width of the values of one head, resolved."""
        latent = self.multi_latent_attention
        return self.head_dim if latent is None else latent.v_head_dim

    @property
    def ffn_width(self) -> int:
        """Width of the dense feed-forward layer, resolved."""
        return self.ffn_hidden_size or 4 * self.hidden_size


class ModelArgs(AdapterArgs):
    """`model_args`: which model, in which precision."""

    model_name_or_path: str | None = setting(
        None,
        help="Directory of a Hugging Face model (`config.json`, safetensors), or its name where Hugging Face's cache "
        "holds it: architecture, weights and tokenizer come from there. Default: `pretrain`.",
    )
    family: str | None = setting(
        None,
        help="Your own model family as `package.module:NAME`, for a directory whose `model_type` is not supported "
        "(docs/architecture.md). Default: the family of `model_type`.",
    )
    architecture: ArchitectureConfig | None = setting(
        None,
        help="The model's shape, for weights that start at random; beside model_name_or_path what is given must agree. "
        "Roles without one take actor_train's.",
    )
    value_head: bool = setting(
        False,
        help="One output per token, its value, in place of the vocabulary: the model of a critic. The role `critic` "
        "has it, and no other role.",
    )
    value_head_std: float = setting(0.0, help="Standard deviation of a value head's random start; 0: it is 0.", ge=0)
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = setting(
        "auto", help="Precision of weights and activations. auto: fp32 on CPU, bf16 on CUDA. fp32 and fp64: CPU only."
    )

    def architecture_to_build(self, heads: int | None) -> ArchitectureConfig:
        """The architecture with `heads` of multi-token prediction (None: its own). Raises `LayoutError` without one."""
        if self.architecture is None:
            raise LayoutError(
                "model_args.architecture is missing: it gives the shape of the model to build, unless "
                "model_args.model_name_or_path names a directory that does"
            )
        if self.value_head:
            heads = 0
        return self.architecture if heads is None else self.architecture.model_copy(update={"mtp_num_layers": heads})

    @model_validator(mode="before")
    @classmethod
    def _from_directory(cls, data: Any) -> Any:
        # Keys of `architecture` override the directory's; jobs/config/model_rules.py reports where they differ.
        name, family = (data.get("model_name_or_path"), data.get("family")) if isinstance(data, dict) else (None, None)
        found = None
        if isinstance(name, str) and isinstance(family, str | None):
            found = describe_model(name, family)
        if found is None or found.problems:
            return data
        return {**data, "architecture": _over(found.architecture, data.get("architecture"))}

    @model_validator(mode="before")
    @classmethod
    def _auto_dtype(cls, data: Any) -> Any:
        # ROLL writes `~` for "take what the checkpoint says"; here the device decides.
        if isinstance(data, dict) and "dtype" in data and data["dtype"] is None:
            return {**data, "dtype": "auto"}
        return data


def _over(below: Any, given: Any) -> Any:
    """`given` where it says something, else `below`."""
    if given is None:
        return below
    if isinstance(given, ArchitectureConfig):
        return given
    if isinstance(below, Mapping) and isinstance(given, Mapping):
        return {**below, **{key: _over(below.get(key), value) for key, value in given.items()}}
    return given


def describe_model(name: str, family: str | None = None) -> Translation | None:
    """The translated `config.json` of the model `name`; None if there is no such directory. Raises nothing.

    Errors of reading and of `ArchitectureConfig` are among the problems. `family` is as in `ModelArgs`.
    """
    # Imported here: most configurations name no model directory.
    from roll_batching.huggingface.config_json import Translation, translate_directory
    from roll_batching.huggingface.directory import find_directory

    path = find_directory(name)
    if path is None:
        return None
    try:
        found = translate_directory(path, family)
    except ConfigError as error:
        return Translation(problems=[str(error)])
    if not found.problems:
        try:
            ArchitectureConfig.model_validate(found.architecture)
        except ValidationError as error:
            for one in error.errors():
                key = ".".join(str(part) for part in one["loc"] if isinstance(part, str))
                found.problems.append(f"{key}: {one['input']!r} is not possible ({one['msg']})")
    return found
