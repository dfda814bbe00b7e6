"""A family of models: how its `config.json` and its tensors map to Megatron's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll_batching.huggingface.tensors import TensorRule


@dataclass(frozen=True, kw_only=True)
class EncoderFields:
    """How a family's `vision_config` and image processor map to `architecture.vision`, and the encoder's tensors."""

    sizes: Mapping[str, Any]
    """Fields of `vision_config` with their defaults in transformers, named so in `architecture.vision`, too."""
    tokens: Mapping[str, int]
    """Tokens of images and videos, beside `vision_config`, with their defaults in transformers."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other settings of `architecture.vision`: without them, fields of RoPE and of the image processor decide."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `vision_config` with one supported value."""
    on_request: bool = False
    """Whether the encoder is built only where `ModelArgs.vision_encoder` asks for it: else the text model alone."""
    rules: Callable[[Any], list[TensorRule]]
    """Rules of the encoder's tensors in a model with an `ArchitectureConfig`."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family of transformers: how its `config.json` and tensors map to Megatron's GPTModel."""

    model_type: str
    architecture: str
    """The class that `architectures` names."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of absent fields, from the family's configuration class."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """The family's own fields with one supported value; they precede those of `ALWAYS`."""
    add_qkv_bias: bool = False
    qk_layernorm: bool | Literal["all_heads"] = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `model_args.architecture` that all models of the family have."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """The family's own fields that are numbers, and their names in `model_args.architecture`."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """The family's own fields that are true or false, and their names in `model_args.architecture`."""
    partial_rope: bool = False
    """Whether the family reads `partial_rotary_factor`; others rotate whole heads."""
    windows: bool = False
    """Whether the family has the fields of sliding windows (`SLIDING`)."""
    local_rope: bool = False
    """Whether layers with a window have RoPE of their own, with the fields `LOCAL_ROPE`."""
    needs_layer_types: bool = False
    """Whether `layer_types` must say which layers have a window."""
    mixture: tuple[TensorRule, ...] = ()
    """Rules of a mixture-of-experts layer; empty for dense families."""
    experts_share_ffn: bool = False
    """Whether `intermediate_size` is the width of an expert."""
    latent_attention: bool = False
    """Whether attention is DeepSeek's multi-latent attention, with the fields `LATENT_ATTENTION`."""
    sigmoid_routing: bool = False
    """Whether the router is DeepSeek-V3's, with the fields `SIGMOID_EXPERTS` instead of `EXPERTS`."""
    shared_expert: bool = False
    """Whether mixture layers have a shared expert with a gate, `shared_expert_intermediate_size` wide."""
    delta_net: tuple[TensorRule, ...] = ()
    """Rules of a layer with a gated delta net; empty for families without the fields `DELTA_NET_FIELDS`."""
    hybrid: Mapping[str, tuple[TensorRule, ...]] = field(default_factory=dict)
    """Rules of layers with one part each, by their letters in `HybridConfig.pattern`; empty for other families."""
    untrained: tuple[str, ...] = ()
    """Beginnings of names of tensors that are not trained unless asked for: layers of multi-token prediction,
    encoders."""
    image_axes: bool = False
    """Whether RoPE may have the fields `IMAGE_AXES`."""
    text_model: str | None = None
    """`model_type` in `text_config`, for families with a vision encoder; None: `config.json` is the text model's."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Pairs of prefixes of tensor names: in the rules, and in the family's files."""
    other_prefixes: tuple[tuple[str, str], ...] = ()
    """`prefixes` for files of another version of transformers, where the family has such files."""
    encoder: EncoderFields | None = None
    """The vision encoder, where one can be trained, too."""
    stacks_gated_experts: bool = False
    """Whether `mixture` is `STACKED_GATED_MIXTURE`: matrices of experts are [inputs, outputs] on the hub, and
    [outputs, inputs] in files of transformers 5."""
    normalised_experts: bool = False
    """Whether the routing weights of a token always sum to one; otherwise `norm_topk_prob` decides."""
    router: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `architecture.moe` that all models of the family have."""
    rewrite: Callable[[Mapping[str, Any], list[str]], Mapping[str, Any]] | None = None
    """Translates the family's own fields to common ones; gets `config.json`, and a list that it adds problems to."""
