"""Settings of the model: its architecture, and ROLL's `model_args`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ValidationError, model_validator

from roll_batching.errors import ConfigError, LayoutError
from roll_batching.settings.adapters import AdapterArgs
from roll_batching.settings.fields import MOST_TOKENS, AlsoInFile, Settings, setting
from roll_batching.settings.model_parts import (
    MOST_PARTS,
    WIDEST,
    DeltaNetConfig,
    HybridConfig,
    LatentAttentionConfig,
    MoEConfig,
    RopeScaling,
    VisionConfig,
)

if TYPE_CHECKING:
    from roll_batching.huggingface.config_json import Translation


class ArchitectureConfig(Settings):
    """A dense or mixture decoder in the shape of Qwen and Llama."""

    vocab_size: int = setting(
        help="Tokens of the vocabulary; padded up inside where tensor parallelism needs it.", gt=0, le=MOST_TOKENS
    )
    hidden_size: int = setting(help="Width of the residual stream.", gt=0, le=WIDEST)
    num_layers: int = setting(help="Decoder layers.", gt=0, le=MOST_PARTS)
    num_attention_heads: int = setting(help="Query heads.", gt=0, le=MOST_PARTS)
    num_query_groups: int | None = setting(None, help="Key and value heads; default: as many as query heads.", gt=0)
    kv_channels: int | None = setting(
        None, help="Width of one head; default: hidden_size / num_attention_heads.", gt=0, le=MOST_PARTS
    )
    ffn_hidden_size: int | None = setting(
        None, help="Width of the gated feed-forward layer; default: 4 x hidden_size.", gt=0, le=WIDEST
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
        if self.multi_latent_attention or self.hybrid or self.mtp_num_layers or self.vision or self.sandwich_norms:
            from roll_batching.settings.contradictions import problem_of_parts  # few models have them

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
        help="Your own model family as `package.module:NAME`, for an unsupported `model_type` (docs/architecture.md).",
    )
    vision_encoder: bool = setting(
        False, help="Whether a model of Qwen3.5 has its vision encoder. Jobs with data_args.images set it."
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
    # ROLL writes `~` for "take what the checkpoint says"; here the device decides.
    dtype: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "fp64"],
        AlsoInFile(None, lambda value: "auto" if value is None else value),
    ] = setting(
        "auto",
        help="Precision of weights and activations. auto: fp32 on CPU, bf16 on CUDA. fp32 and fp64: CPU only. fp16 "
        "trains with a loss scale (training_args.initial_loss_scale).",
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
        described = None
        if isinstance(name, str) and isinstance(family, str | None):
            described = describe_model(name, family, vision_encoder=data.get("vision_encoder") is True)
        if described is None or described.problems:
            return data
        return {**data, "architecture": _over(described.architecture, data.get("architecture"))}


def _over(below: Any, given: Any) -> Any:
    """`given`, with values of `below` for keys that `given` lacks or sets to None."""
    if given is None:
        return below
    if isinstance(given, ArchitectureConfig):
        return given
    if isinstance(below, Mapping) and isinstance(given, Mapping):
        return {**below, **{key: _over(below.get(key), value) for key, value in given.items()}}
    return given


def describe_model(name: str, family: str | None = None, *, vision_encoder: bool = False) -> Translation | None:
    """The translated `config.json` of the model `name`; None if there is no such directory. Raises nothing.

    Errors of reading and of `ArchitectureConfig` are among the problems. Other arguments are as in `ModelArgs`.
    """
    # Imported here: most configurations name no model directory.
    from roll_batching.huggingface.config_json import Translation, translate_directory
    from roll_batching.huggingface.directory import find_directory

    path = find_directory(name)
    if path is None:
        return None
    try:
        described = translate_directory(path, family, vision_encoder=vision_encoder)
    except ConfigError as error:
        return Translation(problems=[str(error)])
    if not described.problems:
        try:
            ArchitectureConfig.model_validate(described.architecture)
        except ValidationError as error:
            for detail in error.errors():
                key = ".".join(str(part) for part in detail["loc"] if isinstance(part, str))
                described.problems.append(f"{key}: {detail['input']!r} is not possible ({detail['msg']})")
    return described
