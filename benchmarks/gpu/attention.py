"""Attention backends on packs against plain fp64 attention, by the measure of `roll-batching doctor`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from roll_batching.packing.attention_backend import attention_backend, installed_versions
from roll_batching.tools.doctor.attention import LARGEST_ERROR, LARGEST_HALF_ERROR, Heads, measure_attention


def compare(name: str, device: torch.device, dtype: torch.dtype, shape: Heads, cp: int, tokens: int) -> dict[str, Any]:
    """Compare one case; with `cp` above 1 on each context-parallel rank, which has fewer queries than keys."""
    started = time.perf_counter()
    errors, attended = measure_attention(attention_backend(name, device.type), device, dtype, shape, tokens, cp=cp)
    limit = LARGEST_ERROR.get(dtype, LARGEST_HALF_ERROR)
    case = f"{name}, {str(dtype).removeprefix('torch.')}, {shape.heads} heads on {shape.groups}, width {shape.dim}"
    case += f", values {shape.values}" * (shape.values not in (0, shape.dim))
    case += f", window {shape.window}" * (shape.window is not None) + ", sinks" * shape.has_sinks
    case += f", a rank of context parallel size {cp}" if cp > 1 else ""
    figures = {"seconds": time.perf_counter() - started, "seconds of the backend, first call": attended}
    return {"case": case, "figures": figures, "limits": {what: [error, limit] for what, error in errors.items()}}


def is_refused(name: str, device: torch.device, shape: Heads) -> bool:
    """Whether the backend refuses such heads on this device."""
    limits = attention_backend(name, device.type).requirements.device_limits
    return limits is not None and bool(
        limits(
            compute_capability=torch.cuda.get_device_capability(device),
            head_dim=shape.dim,
            value_dim=shape.values or shape.dim,
            has_window=shape.window is not None,
            has_sinks=shape.has_sinks,
        )
    )


def run(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Compare this package's backends on sizes of real models; on a CPU only the dense one."""
    tokens = 200 if dry else 4000
    sizes = [(16, 8, 128), (8, 8, 64), (12, 2, 96), (8, 1, 192), (8, 4, 256), (14, 2, 64)]
    shapes = [Heads(heads=heads, groups=groups, dim=dim) for heads, groups, dim in sizes]
    kinds = [("dense", torch.float32, shapes[:2]), ("dense", torch.bfloat16, shapes[:3])]
    named = {"flash-attn": "flash_attn", "flash-attn-4": "flash_attn_4"}
    variable = ["varlen", *(named[one] for one in installed_versions(named))] if device.type == "cuda" else []
    for name in variable:
        kinds = [(name, torch.bfloat16, shapes), (name, torch.float16, shapes[:1]), *kinds]
    kinds = [(name, dtype, some[:2] if dry else some) for name, dtype, some in kinds]
    # Gemma's windows, gpt-oss's windows and sinks, DeepSeek's values.
    special = [
        Heads(heads=8, groups=4, window=48),
        Heads(heads=8, groups=1, dim=64, window=32, has_sinks=True),
        Heads(heads=4, groups=4, dim=192, values=128),
    ]
    kinds += [*((one, torch.bfloat16, special) for one in variable), ("dense", torch.float32, special)]
    for name, dtype, some in kinds:
        for shape in some:
            if shape.has_sinks and not getattr(attention_backend(name, device.type), "sinks", False):
                continue
            if not is_refused(name, device, shape):
                for cp in (1, 2):
                    yield compare(name, device, dtype, shape, cp, tokens)
