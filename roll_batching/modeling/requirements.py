"""What the device and the installed libraries cannot compute, said before the first forward pass meets it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8
_AMPERE = (8, 0)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What the answer of `refusals` depends on beside the model."""

    torch_version: str
    compute_capability: tuple[int, int] | None
    """Of the CUDA device; None on the CPU."""
    router_product: bool
    """Whether Megatron has a product for its routers (before 0.17 it comes from TransformerEngine alone)."""
    transformer_engine: bool
    """Whether TransformerEngine can be imported."""

    @classmethod
    def here(cls, device: torch.device) -> Installed:
        """What this process runs on."""
        from megatron.core.transformer.moe import moe_utils

        return cls(
            torch_version=torch.__version__,
            compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            router_product=hasattr(moe_utils, "te_general_gemm"),
            transformer_engine=importlib.util.find_spec("transformer_engine") is not None,
        )


def refusals(
    *, device: str, dtype: torch.dtype, head_dim: int | None, experts: bool, installed: Installed
) -> list[str]:
    """Everything that would fail inside the first forward pass, each with what to install or to set. Pure.

    Args:
        device: "cpu" or "cuda".
        dtype: of queries, keys and values.
        head_dim: width of a head in `PackedAttention`; None where a model brings an attention core of its own.
        experts: whether the model has a mixture of experts.
        installed: versions and device.

    The kernel's limits are those of `mha_varlen_fwd` in PyTorch's `flash_attn/flash_api.cpp`.
    """
    problems = []
    if experts and not installed.router_product:
        problems.append(
            "this Megatron-Core computes the router of a mixture of experts with TransformerEngine alone, which is not "
            "installed: install transformer-engine, or megatron-core 0.17 or later"
        )
    if device != "cuda" or head_dim is None:
        return problems
    if _major_minor(installed.torch_version) < (2, 10):
        problems.append(
            f"PyTorch {installed.torch_version} has no variable-length attention (torch.nn.attention.varlen) for packs "
            "on CUDA: install torch 2.10 or later, or build the model with TransformerEngine's attention (from_parts)"
        )
    if installed.compute_capability is not None and installed.compute_capability < _AMPERE:
        major, minor = installed.compute_capability
        problems.append(
            f"the variable-length attention kernel needs compute capability 8.0 (Ampere) or later, this GPU has "
            f"{major}.{minor}: use another GPU"
        )
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        problems.append(
            f"the variable-length attention kernel computes in bfloat16 and float16, not in {name}: set "
            "model_args.dtype to auto or bf16 (TransformerConfig.bf16 and params_dtype in a model of your own)"
        )
    if head_dim > _LARGEST_HEAD or head_dim % _HEAD_MULTIPLE:
        problems.append(
            f"the variable-length attention kernel takes heads of up to {_LARGEST_HEAD} channels, a multiple of "
            f"{_HEAD_MULTIPLE}, not of {head_dim}: change kv_channels (or hidden_size and num_attention_heads)"
        )
    return problems


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
