"""Layer specs of GPTModels that take packs: for built models, and for your own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from roll_batching.errors import LayoutError
from roll_batching.megatron_patches.layers import define_router_gemm
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.kernels import Layers
from roll_batching.modeling.layers import has_replicated_kv_heads, has_window, is_mixture, submodules_of
from roll_batching.modeling.rotary import PackRotation, RotarySettings
from roll_batching.packing.attention_backend import AttentionBackend, Rotation, attention_backend


class PackedRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked for sequence parallelism, which Megatron's wrapper (WrappedTorchNorm) refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class ZeroCenteredRMSNorm(PackedRMSNorm):
    """RMSNorm whose factor is 1 + weight, as in Gemma. Megatron has it in TransformerEngine's norms only.

    Computes in fp32: 1 + weight has fewer digits than the weight.
    """

    def reset_parameters(self) -> None:
        """Sets the weight to zeros."""
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised x, in its dtype."""
        factor = 1 + self.weight.float() if self.weight.dtype.itemsize < 4 else 1 + self.weight
        return F.rms_norm(x.to(factor.dtype), self.normalized_shape, factor, self.eps).to(x.dtype)


class PackedLayerNorm(torch.nn.LayerNorm):
    """torch's LayerNorm, marked for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class BiasedExpertOutput(RowParallelLinear):
    """The last linear layer of an expert with a bias, which Megatron adds to the output in place.

    Without tensor and expert parallelism the output is a view that autograd does not let it change (Megatron-Core 0.16
    to 0.19).
    """

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, copied so that it is no view, and the bias."""
        output, bias = super().forward(input_)
        return output.clone(), bias


def packed_layer_spec(
    config: TransformerConfig,
    rotary: RotarySettings | None = None,
    *,
    experts: bool | None = None,
    attention: AttentionBackend | str = "auto",
    layers_of: Layers = "local",
    sandwich_norms: bool = False,
    delta_net: bool = False,
) -> Any:
    """The spec of a transformer layer whose core attention takes packs.

    Args:
        config: the model's config.
        rotary: RoPE inside the core; build the GPTModel with `position_embedding_type="none"`. None: the model rotates
            queries and keys.
        experts: whether the layer is a mixture of experts; None: if the config has experts.
        attention: a backend, its name or dotted path, or "auto", the default of this device.
        layers_of: "local", Megatron's own layers with torch's norms, or "transformer_engine", Megatron's spec for it:
            norms are fused into the next linear layer, experts are one grouped layer if `moe_grouped_gemm`.
        sandwich_norms: whether attention and feed-forward layers have norms behind them, too (local layers only).
        delta_net: whether a gated delta net takes the place of attention.

    Raises:
        LayoutError: for norms other than RMSNorm and LayerNorm, for `rotary` with a core that does not rotate, and if
            TransformerEngine is asked for and cannot be imported; for multi-latent attention without `rotary`.
        ConfigError: for an unknown backend.
    """
    norms: dict[str, type[torch.nn.Module]] = {"RMSNorm": PackedRMSNorm, "LayerNorm": PackedLayerNorm}
    if config.normalization not in norms:
        raise LayoutError(f"normalization {config.normalization!r} is not supported: use one of {', '.join(norms)}")
    norm = norms[config.normalization]
    if config.num_moe_experts is not None:
        define_router_gemm()
    latent = config.multi_latent_attention
    core = core_attention(config, None if latent else rotary, attention=attention)
    if layers_of == "transformer_engine":
        from roll_batching.modeling.engine_layers import engine_layer_spec

        layer = engine_layer_spec(config, rotary, experts=experts, norm=norm, core=core, delta_net=delta_net)
        if not latent and not delta_net:
            _set_attention(layer.submodules.self_attention, config)
        return layer
    if config.layernorm_zero_centered_gamma:
        if norm is not PackedRMSNorm:
            raise LayoutError("layernorm_zero_centered_gamma is supported for RMSNorm only: unset it")
        norm = ZeroCenteredRMSNorm
    if latent:
        from roll_batching.modeling.latent_attention import latent_layer_spec  # few models need it

        return latent_layer_spec(config, rotary, experts=experts, norm=norm, core=core)
    layer = _local_layer(config, core, norm, experts=experts, delta_net=delta_net)
    if sandwich_norms and not delta_net:
        from roll_batching.modeling.layer_modules import SandwichLayer  # few models need it

        layer.module, layer.params = SandwichLayer, {"norm": norm}
    return layer


def _local_layer(
    config: TransformerConfig, core: Any, norm: type[torch.nn.Module], *, experts: bool | None, delta_net: bool
) -> Any:
    """The spec of a layer of Megatron's own modules; arguments as in `packed_layer_spec`."""
    layer = get_gpt_layer_local_spec(
        num_experts=None if experts is False else config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    if config.add_bias_linear and config.num_moe_experts is not None and experts is not False:
        submodules_of(submodules_of(layer.submodules.mlp).experts).linear_fc2 = BiasedExpertOutput
    if delta_net:
        from roll_batching.modeling.recurrent_layer import PackedDeltaNet  # few models need it

        layer.submodules.self_attention = ModuleSpec(module=PackedDeltaNet)
        return layer
    _set_attention(layer.submodules.self_attention, config)
    submodules = layer.submodules.self_attention.submodules
    submodules.core_attention = core
    if config.qk_layernorm:
        submodules.q_layernorm = submodules.k_layernorm = norm
    return layer


def _set_attention(spec: Any, config: TransformerConfig) -> None:
    """Replaces Megatron's class of self-attention in a spec if it cannot compute output gates or replicated heads."""
    if config.attention_output_gate or has_replicated_kv_heads(config):
        from roll_batching.modeling.layer_modules import GatedSelfAttention, ReplicatedKVAttention  # for few models

        spec.module = ReplicatedKVAttention if has_replicated_kv_heads(config) else GatedSelfAttention


def core_attention(
    config: TransformerConfig, rotary: RotarySettings | None = None, *, attention: AttentionBackend | str = "auto"
) -> Any:
    """The `core_attention` of a layer spec, for your own specs. Arguments and errors as in `packed_layer_spec`."""
    backend = attention_backend(attention, "cuda" if torch.cuda.is_available() else "cpu")
    backend = _with_window(backend, config)
    if rotary is not None and not backend.rotates:
        raise LayoutError(
            f"the attention backend {backend.name} does not rotate: leave rotary out, and build the GPTModel with "
            "position_embedding_type='rope'"
        )
    if rotary is None:
        return functools.partial(_build_core, backend, None, None)
    rotation = local = PackRotation(rotary, config.kv_channels)
    if rotary.local_base is not None:
        local = PackRotation(rotary.of_windows, config.kv_channels)
    return functools.partial(_build_core, backend, rotation, local)


def _with_window(backend: AttentionBackend, config: TransformerConfig) -> AttentionBackend:
    """The backend for the config's sliding window; `backend` itself if the config or the backend has no windows."""
    window = getattr(config, "window_size", None)
    if window is None or window[0] < 0 or not getattr(backend, "windows", False):
        return backend
    return backend.for_window(window[0] + 1)  # Megatron counts the tokens to the left


def _build_core(
    backend: AttentionBackend, rotation: Rotation | None, local: Rotation | None, **arguments: Any
) -> torch.nn.Module:
    """A layer's core attention; `local` is the rotation of layers with a sliding window."""
    config, layer_number = arguments["config"], arguments["layer_number"]
    if has_window(config, layer_number):
        rotation = local
    if config.no_rope_freq and config.no_rope_freq[layer_number - 1]:  # layer numbers start at 1
        rotation = None
    core: Any = backend.build_core(rotation, **arguments)
    core.pack_backend, core.pack_rotates = backend, rotation is not None  # `from_parts` reads both
    return core


def replace_local_cores(chunks: Sequence[Any], *, attention: AttentionBackend | str = "auto") -> int:
    """Gives a built model attention over packs where it has Megatron's local one, which refuses packs.

    Weights, checkpoints and arithmetic stay: the cores have no parameters, and Megatron's own goes on to compute whole
    sequences. `attention` is as in `packed_layer_spec`.
    Returns the number of layers changed; TransformerEngine's cores take packs, and stay. Raises `LayoutError` for cores
    with attention sinks, which are parameters.
    """
    backend = attention_backend(attention, "cuda" if torch.cuda.is_available() else "cpu")
    changed = 0
    for layer in (layer for chunk in chunks for layer in gpt_of(chunk).decoder.layers):
        attends: Any = getattr(layer, "self_attention", None)
        if isinstance(getattr(attends, "core_attention", None), DotProductAttention):
            if getattr(attends.config, "softmax_type", "vanilla") != "vanilla":
                raise LayoutError(
                    f"softmax_type={attends.config.softmax_type!r}: its parameters would be lost; "
                    "build the model from packed_layer_spec(config)"
                )
            whole = attends.core_attention
            attends.core_attention = _build_core(
                _with_window(backend, attends.config),
                None,
                None,
                config=attends.config,
                layer_number=attends.layer_number,
                attn_mask_type=attends.attn_mask_type,
                attention_type=attends.attention_type,
                softmax_scale=attends.config.softmax_scale,
                pg_collection=attends.pg_collection,
            )
            attends.core_attention.of_whole_sequences = whole
            changed += 1
    return changed


def packed_block_spec(
    config: TransformerConfig,
    layers: int,
    rotary: RotarySettings | None = None,
    *,
    first: int = 0,
    attention: AttentionBackend | str = "auto",
    layers_of: Layers = "local",
    sandwich_norms: bool = False,
) -> Any:
    """The spec of a pipeline chunk of `layers` layers; `first` is the index of its first layer in the whole model.

    With experts, `moe_layer_freq` selects the mixture layers of the whole model: every n-th from index 0 on, or those
    with a 1 in the list. A list `linear_attention_freq` selects those with gated delta nets.
    """
    held = range(first, first + layers)
    if getattr(config, "layer_kinds", None):
        from roll_batching.modeling.hybrid import hybrid_block_spec  # few models need it

        return hybrid_block_spec(config, held, PackedRMSNorm, core_attention(config, None, attention=attention))
    delta_nets = getattr(config, "linear_attention_freq", None) or [0] * (first + layers)
    held_kinds = [(is_mixture(config.moe_layer_freq, index), bool(delta_nets[index])) for index in held]
    kinds = {
        kind: packed_layer_spec(
            config, rotary, experts=kind[0], attention=attention, layers_of=layers_of, sandwich_norms=sandwich_norms,
            delta_net=kind[1],
        )
        for kind in {(False, False), *held_kinds}  # a chunk without layers has the norm before the head all the same
    }  # fmt: skip
    specs = [kinds[kind] for kind in held_kinds]
    if layers_of == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=TENorm)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=kinds[False, False].submodules.input_layernorm)
