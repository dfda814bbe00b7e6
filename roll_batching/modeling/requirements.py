"""Checks that device and installed libraries can compute a model, before its first forward pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roll_batching.packing.attention_backend import AttentionBackend, AttentionRequirements, installed_versions

ENGINE = "transformer-engine"
_RECOMPUTED_BY_ENGINE = {"layernorm", "mla_up_proj", "moe_act"}
"""Modules whose recompute imports TransformerEngine for its FP8 state (Megatron 0.16 to 0.19)."""
ENGINE_LAYERS = AttentionRequirements(
    devices=("cuda",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    libraries=((ENGINE, "2.9"), ("transformer-engine-torch", "2.9")),
)
"""Requirements of TransformerEngine's layers. Before 2.9 its attention trained packs wrongly."""
EXPERT_BIASES = (
    "Megatron-Core adds the biases of experts once per tensor-parallel rank: set tensor_model_parallel_size to 1, and "
    "divide the model by pipeline_model_parallel_size and expert_model_parallel_size"
)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Device and libraries, as `refusals` reads them."""

    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of installed distributions, by name."""
    compute_capability: tuple[int, int] | None
    """Compute capability of the CUDA device; None on the CPU."""
    weight_gradient_kernel: bool = False
    """Whether APEX's kernel for gradient accumulation fusion is installed."""

    @classmethod
    def here(cls, device: torch.device, distributions: Iterable[str] = ()) -> Installed:
        """Those of this process, with the versions of `distributions`."""
        return cls(
            versions=installed_versions(distributions),
            compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            weight_gradient_kernel=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        )


def recomputed_modules(config: Any) -> tuple[str, ...]:
    """Megatron's names of selectively recomputed modules; empty for full or no recompute."""
    return tuple(config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()


def refusals_here(
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    backend: AttentionBackend | None,
    engine_layers: bool,
    recomputed: Sequence[str] = (),
    latent_attention: bool = False,
    attention_sinks: bool = False,
    value_dim: int | None = None,
    has_window: bool = False,
) -> list[str]:
    """`refusals` for the device and libraries of this process."""
    needs = [ENGINE_LAYERS, *([] if backend is None else [backend.requirements])]
    libraries = [name for one in needs for name, _ in one.libraries]
    return refusals(
        device=device.type,
        dtype=dtype,
        head_dim=head_dim,
        backend=backend,
        engine_layers=engine_layers,
        recomputed=recomputed,
        latent_attention=latent_attention,
        attention_sinks=attention_sinks,
        value_dim=value_dim,
        has_window=has_window,
        installed=Installed.here(device, libraries),
    )


def refusals(
    *,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    backend: AttentionBackend | None,
    engine_layers: bool,
    recomputed: Sequence[str] = (),
    latent_attention: bool = False,
    attention_sinks: bool = False,
    value_dim: int | None = None,
    has_window: bool = False,
    installed: Installed,
) -> list[str]:
    """Errors of the first forward pass that can be known before it, each with its remedy. Pure.

    Args:
        device: "cpu" or "cuda".
        dtype: dtype of queries, keys and values.
        head_dim: head dimension.
        backend: the attention backend; None for a model with its own attention core.
        engine_layers: whether the layers are TransformerEngine's.
        recomputed: selectively recomputed modules.
        latent_attention: whether attention is multi-latent, with values of other dimensions than keys.
        attention_sinks: whether every softmax has a learnt logit beside those of keys.
        value_dim: head dimension of values; None: `head_dim`.
        has_window: whether a layer has a sliding window.
        installed: versions and device.
    """
    problems = []
    if engine_layers:
        problems += _engine_refusals(device, dtype, installed)
    if ENGINE not in installed.versions and (named := sorted(_RECOMPUTED_BY_ENGINE & set(recomputed))):
        problems.append(
            f"recompute_modules: {named} needs TransformerEngine, which is not installed: install {ENGINE}, or "
            "recompute core_attn, mlp, moe or shared_experts, or whole layers (recompute_granularity: full)"
        )
    if latent_attention:
        problems += _latent_attention_refusals(backend, recomputed)
    if attention_sinks and not getattr(backend, "sinks", False):
        name = "the model's own attention" if backend is None else f"the attention backend {backend.name}"
        problems.append(f"attention sinks are not computed by {name}: set attention_backend: dense, or flash_attn_4")
    if attention_sinks and engine_layers:
        problems.append("attention sinks are built into Megatron's local layers: set transformer_impl: local")
    if backend is not None:
        found = _attention_refusals(backend, device, dtype, head_dim, installed)
        limits, capability = backend.requirements.device_limits, installed.compute_capability
        if limits is not None and capability is not None and not found:
            found = limits(
                compute_capability=capability,
                head_dim=head_dim,
                value_dim=value_dim or head_dim,
                has_window=has_window,
                has_sinks=attention_sinks,
            )
        problems += found
    return problems


def _latent_attention_refusals(backend: AttentionBackend | None, recomputed: Sequence[str]) -> list[str]:
    problems = []
    if backend is None or not (backend.rotates and getattr(backend, "narrow_values", False)):
        name = "the model's own attention" if backend is None else f"the attention backend {backend.name}"
        problems.append(
            f"multi-latent attention needs a backend that rotates and takes values with fewer channels than keys, and "
            f"{name} does not: choose dense, varlen or flash_attn"
        )
    if "mla_up_proj" in recomputed:
        problems.append(
            "recompute_modules: mla_up_proj is not supported for packs: recompute core_attn or whole layers"
        )
    return problems


def _engine_refusals(device: str, dtype: torch.dtype, installed: Installed) -> list[str]:
    name, instead = "TransformerEngine's layers", "set transformer_impl: local, or build packed_layer_spec without them"
    if device not in ENGINE_LAYERS.devices:
        return [f"{name} compute on CUDA, not on {device}: {instead}"]
    problems = [f"{name} need {one}, or {instead}" for one in ENGINE_LAYERS.missing(installed.versions)]
    if ENGINE_LAYERS.dtypes is not None and dtype not in ENGINE_LAYERS.dtypes:
        problems.append(f"{name} do not compute in {_dtype_name(dtype)}: {instead}")
    return problems


def _attention_refusals(
    backend: AttentionBackend, device: str, dtype: torch.dtype, head_dim: int, installed: Installed
) -> list[str]:
    needs, name = backend.requirements, f"the attention backend {backend.name}"
    if device not in needs.devices:
        return [f"{name} runs on {' and '.join(needs.devices)}, not on {device}: choose another attention_backend"]
    problems = [f"{name} needs {one}, or {needs.instead}" for one in needs.missing(installed.versions)]
    if needs.compute_capability is not None and installed.compute_capability is not None:
        if installed.compute_capability < needs.compute_capability:
            least, this = (".".join(map(str, x)) for x in (needs.compute_capability, installed.compute_capability))
            problems.append(
                f"{name} needs compute capability {least} or later, this GPU has {this}: use another GPU, or choose "
                "another attention_backend"
            )
    if needs.dtypes is not None and dtype not in needs.dtypes:
        known = " and ".join(_dtype_name(one) for one in needs.dtypes)
        problems.append(
            f"{name} computes in {known}, not in {_dtype_name(dtype)}: set model_args.dtype to auto or bf16 "
            "(TransformerConfig.bf16 and params_dtype in a model of your own), or choose another attention_backend"
        )
    if head_dim > (needs.largest_head or head_dim) or head_dim % needs.head_multiple:
        limit = "" if needs.largest_head is None else f" of up to {needs.largest_head} channels,"
        problems.append(
            f"{name} takes heads{limit} a multiple of {needs.head_multiple}, not of {head_dim}: change kv_channels (or "
            "hidden_size and num_attention_heads), or choose another attention_backend"
        )
    return problems


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def adam_problems(strategy: Any, device: torch.device) -> list[str]:
    """Reasons why TransformerEngine's Adam (`use_precision_aware_optimizer`) cannot run here; empty without it."""
    if not strategy.use_precision_aware_optimizer:
        return []
    name = "use_precision_aware_optimizer uses TransformerEngine's Adam, which"
    if device.type == "cpu":
        return [f"{name} runs on CUDA, not on cpu: leave it out"]
    libraries = [library for library, _ in ENGINE_LAYERS.libraries]
    missing = ENGINE_LAYERS.missing(installed_versions(libraries))
    return [f"{name} needs {'; '.join(missing)}, or leave it out"] if missing else []
