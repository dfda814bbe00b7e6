"""Chooses layers, attention and fusions by device and installed libraries, with the reasons."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.requirements import Installed
from roll_batching.packing.attention_backend import AttentionBackend, attention_backend, default_attention
from roll_batching.settings import ArchitectureConfig, MegatronConfig
from roll_batching.settings.attention_backends import AUTO

logger = logging.getLogger(__name__)

Layers = Literal["local", "transformer_engine"]
"""Megatron's two layer specs of a GPTModel."""
ENGINE = "transformer-engine"
"""Name of TransformerEngine's distribution."""
VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
"""Environment variables that disable TransformerEngine's attention kernels."""
_ATTENTION_OF_VARIABLES = {
    "auto": ("1", "1", "1"),
    "flash": ("1", "0", "0"),
    "fused": ("0", "1", "0"),
    "unfused": ("0", "0", "1"),
    "local": ("0", "0", "0"),
}
"""Values of `VARIABLES` for each of Megatron's `AttnBackend` (`LanguageModule._set_attention_backend`)."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels of a model's layers."""

    layers: Layers
    attention: AttentionBackend
    fusions: Mapping[str, str]
    """Fusion options of Megatron's TransformerConfig: "" if on, else why it is off."""
    notice: str
    """The choice and its reasons as text."""

    @property
    def options(self) -> dict[str, bool]:
        """`fusions` as arguments of TransformerConfig."""
        return {name: not reason for name, reason in self.fusions.items()}


def choose_kernels(strategy: MegatronConfig, architecture: ArchitectureConfig, device: torch.device) -> Kernels:
    """The kernels that `strategy` names; for `auto` the fastest tested ones that are installed.

    Raises `ConfigError` for an unknown attention backend.
    """
    layers: Layers = "transformer_engine" if strategy.transformer_impl == "transformer_engine" else "local"
    installed = Installed.here(device, [ENGINE])
    choice = strategy.attention_backend
    why = "as configured"
    if choice == AUTO:
        entry = default_attention(device.type)
        choice, why = entry.name, entry.because
        rotates_itself = architecture.multi_latent_attention is not None or architecture.gated_delta_net is not None
        if layers == "transformer_engine" and not rotates_itself:
            choice, why = "transformer_engine", "part of its layers"
        elif architecture.attention_sinks:
            choice, why = "dense", "the only tested one with attention sinks"
    attention = attention_backend(choice, device.type)
    if architecture.sliding_window is not None and getattr(attention, "windows", False):
        attention = attention.for_window(architecture.sliding_window)
    fused = fusions(
        device=device.type,
        layers=layers,
        rotates=attention.rotates,
        experts=architecture.moe is not None,
        installed=installed,
    )
    activation = architecture.activation if architecture.hybrid is None else "squared_relu"
    if activation != "silu" and not fused["bias_activation_fusion"]:
        fused["bias_activation_fusion"] = f"Megatron has no kernel for {activation} on every device"
    parts = [f"attention: {attention.name} ({why})", f"layers: {_describe_layers(strategy, layers, installed)}"]
    if architecture.gated_delta_net is not None and device.type == "cuda":
        from roll_batching.modeling.delta_kernels import PACKAGE, kernel  # few models need it

        parts.append(
            f"gated delta nets: {f'plain torch ({PACKAGE} is not installed)' if kernel() is None else PACKAGE}"
        )
    if on := [name for name, reason in fused.items() if not reason]:
        parts.append(f"fused: {', '.join(on)}")
    off: dict[str, list[str]] = {}
    for name, reason in fused.items():
        if reason:
            off.setdefault(reason, []).append(name)
    parts += [f"not fused: {', '.join(names)} ({reason})" for reason, names in off.items()]
    return Kernels(layers=layers, attention=attention, fusions=fused, notice="; ".join(parts))


def _describe_layers(strategy: MegatronConfig, layers: Layers, installed: Installed) -> str:
    if strategy.transformer_impl != AUTO:
        return f"{layers} (as configured)"
    if ENGINE not in installed.versions:
        return f"{layers} (TransformerEngine is not installed)"
    return (
        f"{layers} (tested on a GPU, unlike TransformerEngine's; transformer_impl: transformer_engine takes those of "
        f"the {installed.versions[ENGINE]} that is installed)"
    )


def fusions(*, device: str, layers: Layers, rotates: bool, experts: bool, installed: Installed) -> dict[str, str]:
    """Megatron's fusion options: "" if on, else why it is off. Pure.

    Args:
        device: "cpu" or "cuda".
        layers: the layer spec.
        rotates: whether the attention core rotates queries and keys itself.
        experts: whether the model has a mixture of experts; its fusions are left out otherwise.
        installed: versions and device.
    """
    engine = "" if ENGINE in installed.versions else "TransformerEngine is not installed"
    with_layers = "" if layers == "transformer_engine" else "needs transformer_impl: transformer_engine"
    reasons = {
        "bias_activation_fusion": "",
        "bias_dropout_fusion": "no linear layer before a residual has a bias",
        "masked_softmax_fusion": "no attention backend materialises the scores",
        "gradient_accumulation_fusion": ""
        if installed.weight_gradient_kernel
        else "APEX's fused_weight_gradient_mlp_cuda is not installed",
        "apply_rope_fusion": "the attention core rotates itself" if rotates else engine,
    }
    if experts:
        reasons |= dict.fromkeys(("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"), with_layers)
    if device == "cpu":
        # Grouped experts have other parameters, not only another kernel: they follow the layers on every device.
        return {
            name: reason if name == "moe_grouped_gemm" else reason or "nothing is fused on the CPU"
            for name, reason in reasons.items()
        }
    return reasons


def engine_attention(variables: Mapping[str, str] = os.environ) -> Any:
    """Megatron's `AttnBackend` for the NVTE_* variables: with any other, Megatron refuses to build a model.

    Raises `LayoutError` for a combination of variables that no `AttnBackend` has.
    """
    from megatron.core.transformer.enums import AttnBackend

    present = [variables.get(name) for name in VARIABLES]
    for name, values in _ATTENTION_OF_VARIABLES.items():
        if all(variable is None or variable == value for variable, value in zip(present, values, strict=True)):
            return AttnBackend[name]
    settings = ", ".join(f"{name}={value}" for name, value in zip(VARIABLES, present, strict=True) if value is not None)
    raise LayoutError(
        f"{settings} (system_envs or the environment) is a combination of TransformerEngine's attention kernels that "
        "Megatron-Core does not accept: set one of them to 1 and the other two to 0, all to 1, or leave them out"
    )


@functools.cache
def tell(notice: str) -> None:
    """Logs a notice once per process."""
    logger.warning("%s", notice)
