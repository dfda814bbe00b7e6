"""Checks that device and installed libraries can compute a model, before its first forward pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roll_batching.packing.attention_backend import (
    AttentionBackend,
    AttentionRequirements,
    attention_name,
    installed_versions,
)

ENGINE = "transformer-engine"
_RECOMPUTED_BY_ENGINE = {"layernorm", "mla_up_proj", "moe_act"}
"""Modules whose recompute imports TransformerEngine for its FP8 state (Megatron 0.16 to 0.19)."""
ENGINE_LAYERS = AttentionRequirements(
    devices=("cuda",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    libraries=((ENGINE, "2.9"), ("transformer-engine-torch", "2.9")),
)
"""Requirements of TransformerEngine's layers. Before 2.9 its attention trained packs wrongly."""


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
        """The device and libraries of this process, with the versions of `distributions`."""
        return cls(
            versions=installed_versions(distributions),
            compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            weight_gradient_kernel=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        )


def recomputed_modules(config: Any) -> tuple[str, ...]:
    """Megatron's names of selectively recomputed modules; empty for full or no recompute."""
    return tuple(config.recompute_modules or ()) if config.recompute_granularity == "selective" else ()


@dataclass(frozen=True, kw_only=True)
class ModelDemands:
    """A model's requirements on device and libraries."""

    dtype: torch.dtype
    """Dtype of queries, keys and values."""
    head_dim: int
    backend: AttentionBackend | None
    """Attention backend; None: the model has an attention core of its own."""
    engine_layers: bool
    """Whether the layers are TransformerEngine's."""
    recomputed: Sequence[str] = ()
    """Selectively recomputed modules."""
    latent_attention: bool = False
    """Whether attention is multi-latent, with values of other dimensions than keys."""
    attention_sinks: bool = False
    """Whether every softmax has a learnt logit in addition to those of keys."""
    value_dim: int | None = None
    """Head dimension of values; None: `head_dim`."""
    has_window: bool = False
    """Whether a layer has a sliding window."""

    def refusals_here(self, device: torch.device) -> list[str]:
        """`refusals` for the device and libraries of this process."""
        needs = [ENGINE_LAYERS, *([] if self.backend is None else [self.backend.requirements])]
        return self.refusals(
            device.type, Installed.here(device, [name for need in needs for name, _ in need.libraries])
        )

    def refusals(self, device: str, installed: Installed) -> list[str]:
        """Errors of the first forward pass that can be known before it, each with its remedy. Pure.

        `device` is "cpu" or "cuda".
        """
        backend, problems = self.backend, []
        if self.engine_layers:
            problems += _engine_refusals(device, self.dtype, installed)
        if ENGINE not in installed.versions and (modules := sorted(_RECOMPUTED_BY_ENGINE & set(self.recomputed))):
            problems.append(
                f"recompute_modules: {modules} needs TransformerEngine, which is not installed: install {ENGINE}, or "
                "recompute core_attn, mlp, moe or shared_experts, or whole layers (recompute_granularity: full)"
            )
        if self.latent_attention:
            problems += _latent_attention_refusals(backend, self.recomputed)
        if self.attention_sinks and not getattr(backend, "sinks", False):
            problems.append(
                f"attention sinks are not computed by {attention_name(backend)}: set attention_backend: dense, or "
                "flash_attn_4"
            )
        if self.attention_sinks and self.engine_layers:
            problems.append("attention sinks are built into Megatron's local layers: set transformer_impl: local")
        if backend is None:
            return problems
        refused = _attention_refusals(backend, device, self.dtype, self.head_dim, installed)
        limits, capability = backend.requirements.device_limits, installed.compute_capability
        if limits is not None and capability is not None and not refused:
            refused = limits(
                compute_capability=capability,
                head_dim=self.head_dim,
                value_dim=self.value_dim or self.head_dim,
                has_window=self.has_window,
                has_sinks=self.attention_sinks,
            )
        return problems + refused


def _latent_attention_refusals(backend: AttentionBackend | None, recomputed: Sequence[str]) -> list[str]:
    problems = []
    if backend is None or not (backend.rotates and getattr(backend, "narrow_values", False)):
        problems.append(
            f"multi-latent attention needs a backend that rotates and takes values with fewer channels than keys, and "
            f"{attention_name(backend)} does not: choose dense, varlen or flash_attn"
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
    problems = [f"{name} need {library}, or {instead}" for library in ENGINE_LAYERS.missing(installed.versions)]
    if ENGINE_LAYERS.dtypes is not None and dtype not in ENGINE_LAYERS.dtypes:
        problems.append(f"{name} do not compute in {_dtype_name(dtype)}: {instead}")
    return problems


def _attention_refusals(
    backend: AttentionBackend, device: str, dtype: torch.dtype, head_dim: int, installed: Installed
) -> list[str]:
    needs, name = backend.requirements, attention_name(backend)
    if device not in needs.devices:
        return [f"{name} runs on {' and '.join(needs.devices)}, not on {device}: choose another attention_backend"]
    problems = [f"{name} needs {library}, or {needs.instead}" for library in needs.missing(installed.versions)]
    if needs.compute_capability is not None and installed.compute_capability is not None:
        if installed.compute_capability < needs.compute_capability:
            least, this = (".".join(map(str, x)) for x in (needs.compute_capability, installed.compute_capability))
            problems.append(
                f"{name} needs compute capability {least} or later, this GPU has {this}: use another GPU, or choose "
                "another attention_backend"
            )
    if needs.dtypes is not None and dtype not in needs.dtypes:
        supported_dtypes = " and ".join(_dtype_name(supported) for supported in needs.dtypes)
        problems.append(
            f"{name} computes in {supported_dtypes}, not in {_dtype_name(dtype)}: set model_args.dtype to auto or bf16 "
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


def optimizer_problems(training: Any, strategy: Any, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Reasons why the optimizer of these `TrainingArgs` cannot train weights of `dtype` here; empty if it can."""
    return [
        *adam_problems(strategy, device),
        *(_muon_problems(training, strategy, dtype) if training.uses_muon else ()),
    ]


def is_muon_of_0_16() -> bool:
    """Whether the installed Megatron-Core's Muon is that of 0.16, which needs Emerging-Optimizers 0.1."""
    from megatron.core.optimizer import OptimizerConfig

    return hasattr(OptimizerConfig, "muon_use_nesterov")


def _muon_problems(training: Any, strategy: Any, dtype: torch.dtype) -> list[str]:
    is_old = is_muon_of_0_16()
    problems = [] if (problem := _package_problem(is_old)) is None else [problem]
    steps = training.muon_num_ns_steps
    if is_old and training.muon_coefficient_type != "quintic":
        name = training.muon_coefficient_type
        problems.append(f"muon_coefficient_type {name} needs Megatron-Core 0.19: install that, or leave it out")
    if is_old and steps % 5:
        text = "Emerging-Optimizers 0.1 takes multiples of 5, the length of its series of coefficients"
        problems.append(f"muon_num_ns_steps is {steps}, and {text}: set 5 or 10, or install Megatron-Core 0.19")
    if not is_old and strategy.use_distributed_optimizer and dtype is torch.float32:
        problems.append(
            "use_distributed_optimizer with optimizer: muon needs weights in bf16 with this version of Megatron-Core, "
            "whose layer-wise optimizer fails in fp32: set model_args.dtype: bf16, or leave it out"
        )
    return problems


def _package_problem(is_old: bool) -> str | None:
    """Why the package emerging_optimizers does not serve this Megatron-Core, with the cure; None if it does.

    PyPI's distribution of that name (999.9.9) is a placeholder, so only the content counts.
    """
    tag, fits = ("v0.1.0", "0.1") if is_old else ("v0.3.1", "0.2 or later")
    try:
        from emerging_optimizers import orthogonalized_optimizers, package_info  # noqa: F401
    except ImportError as error:
        fault = f"which cannot be imported ({error})"
    else:
        version = str(package_info.__version__)
        if (version.startswith("0.1.")) is is_old:
            return None
        fault = f"and {version} is installed"
    return (
        f"optimizer: muon needs NVIDIA's package Emerging-Optimizers {fits} for this Megatron-Core, {fault}. It is not "
        "on PyPI, where the name holds a placeholder: pip install "
        f"'emerging_optimizers @ git+https://github.com/NVIDIA-NeMo/Emerging-Optimizers@{tag}', or set optimizer: adam"
    )


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
