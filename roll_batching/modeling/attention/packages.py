"""The attention backends of other packages: flash-attn, flash-attn-4 and TransformerEngine.

flash-attn serves torch versions without variable-length attention. The kernels of flash-attn-4 compile on first use,
without a C++ compiler. TransformerEngine's attention is called through Megatron's wrapper and PackedSeqParams.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from roll_batching.errors import LayoutError
from roll_batching.modeling.attention.varlen import VarlenBackend, VarlenCore, VarlenSpans, kernel_window
from roll_batching.packing.attention_backend import AttentionBackend, Rotation
from roll_batching.packing.collectives import GatheredKeys, LocalKeys


class FlashCore(VarlenCore):
    """Attention over all spans in one call of `flash_attn_varlen_func`."""

    @staticmethod
    def kernel_has_windows() -> bool:
        """See `VarlenCore.kernel_has_windows`: flash-attn 2.3 or later."""
        from flash_attn import flash_attn_varlen_func

        return "window_size" in inspect.signature(flash_attn_varlen_func).parameters

    def kernel(self, query: torch.Tensor, keys: LocalKeys | GatheredKeys, spans: VarlenSpans) -> torch.Tensor:
        """See `VarlenCore.kernel`."""
        from flash_attn import flash_attn_varlen_func

        key, value = keys.take(spans.key_rows)
        windowed = {} if self.window is None else {"window_size": kernel_window(self.window)}
        out: torch.Tensor = flash_attn_varlen_func(
            query,
            key,
            value,
            spans.cu_queries,
            spans.cu_keys,
            spans.max_queries,
            spans.max_keys,
            softmax_scale=self.scale,
            causal=True,
            **windowed,
        )
        return out


class FlashBackend(VarlenBackend):
    """flash-attn's `flash_attn_varlen_func`.

    Limits are from its README and `csrc/flash_attn/flash_api.cpp`. Before 2.1 it aligned the causal mask to the first
    key instead of the last, which is wrong if a rank holds only part of the queries (context parallelism).
    """

    name = "flash_attn"
    core_type = FlashCore
    requirements = replace(
        VarlenBackend.requirements,
        libraries=(("flash-attn", "2.1"),),
        instead="set attention_backend: flash_attn_4 and pip install 'roll-batching[flash-attn]', without a compiler, "
        "or choose another attention_backend",
    )


# ---- flash-attn-4


_ARGUMENTS = (
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    *("softmax_scale", "causal", "window_size", "learnable_sink"),
)
"""Arguments that `FlashFourCore` passes, by name: the fourth by position is not the fourth of flash-attn 2."""


class FlashFourCore(VarlenCore):
    """Attention over all spans in one call of `flash_attn.cute.flash_attn_varlen_func`."""

    applies_sinks = True
    pads_values = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        installed_function()

    @staticmethod
    def kernel_has_windows() -> bool:
        """See `VarlenCore.kernel_has_windows`: every version that `installed_function` takes has them."""
        return True

    def kernel(self, query: torch.Tensor, keys: LocalKeys | GatheredKeys, spans: VarlenSpans) -> torch.Tensor:
        """See `VarlenCore.kernel`; values keep their own number of channels."""
        key, value = keys.take(spans.key_rows)
        # It reads -1 as "all" only where both sides have it, so a layer without a window passes none.
        windowed = {} if self.window is None else {"window_size": kernel_window(self.window)}
        sinks = {} if self.softmax_offset is None else {"learnable_sink": self.softmax_offset}
        out, _ = installed_function()(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=spans.cu_queries,
            cu_seqlens_k=spans.cu_keys,
            max_seqlen_q=spans.max_queries,
            max_seqlen_k=spans.max_keys,
            softmax_scale=self.scale,
            causal=True,
            **windowed,
            **sinks,
        )
        result: torch.Tensor = out
        return result


@functools.cache
def installed_function() -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """`flash_attn_varlen_func` of flash-attn-4, which returns the output and the log of the softmax's sums.

    Raises `LayoutError` if it cannot be imported, or lacks an argument that this module passes.
    """
    remedy = "pip install 'roll-batching[flash-attn]', or choose another attention_backend"
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise LayoutError(f"flash-attn-4 cannot be imported ({error}): {remedy}") from error
    missing = sorted(set(_ARGUMENTS) - set(inspect.signature(flash_attn_varlen_func).parameters))
    if missing:
        raise LayoutError(
            f"flash_attn.cute.flash_attn_varlen_func has no argument {', '.join(missing)} in the installed version of "
            f"flash-attn-4: {remedy}"
        )
    function: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = flash_attn_varlen_func
    return function


def device_limits(
    *, compute_capability: tuple[int, int], head_dim: int, value_dim: int, has_window: bool, has_sinks: bool
) -> list[str]:
    """Refusals by device, head dimensions, windows and attention sinks; empty if the kernels compute the model.

    From `_validate_head_dims`, `_flash_attn_bwd` and the SM120 kernels' shared memory in `flash_attn/cute` 4.0.0b36.
    """
    name, device = "the attention backend flash_attn_4", ".".join(map(str, compute_capability))
    instead = f"on compute capability {device}: choose attention_backend: varlen, or dense"
    major, heads = compute_capability[0], (head_dim, value_dim)
    if major > 12:
        return [f"{name} has no kernels for compute capability {device}: choose attention_backend: varlen, or dense"]
    problems = []
    standard = max(heads) <= (256 if major == 9 else 128)
    of_blackwell = major in (10, 11) and heads in ((192, 128), (256, 256))
    if value_dim % 8 or not (standard or of_blackwell):
        widths = {9: "up to 256", 12: "up to 128"}.get(major, "up to 128, 192 with values of 128, or 256")
        problems.append(
            f"{name} takes heads of {widths} channels in multiples of 8, not of {head_dim} with values of {value_dim}, "
            f"{instead}"
        )
    if has_window and of_blackwell and head_dim == 256:
        problems.append(f"{name} has no backward pass for sliding windows with heads of 256 channels {instead}")
    if has_sinks and (major == 12 or (of_blackwell and head_dim == 256)):
        problems.append(f"{name} has no backward pass for attention sinks of heads of {head_dim} channels {instead}")
    return problems


class FlashFourBackend(VarlenBackend):
    """flash-attn-4's `flash_attn_varlen_func`; the metadata of a pack are those of `varlen`.

    Masks are aligned to the last key, and windows count from it. Before compute capability 9.0 it has no backward pass.
    """

    name = "flash_attn_4"
    core_type = FlashFourCore
    requirements = replace(
        VarlenBackend.requirements,
        compute_capability=(9, 0),
        libraries=(("flash-attn-4", "4.0"),),
        instead="pip install 'roll-batching[flash-attn]', or choose another attention_backend",
        device_limits=device_limits,
    )
    sinks = True


# ---- TransformerEngine


class EngineBackend(AttentionBackend):
    """TransformerEngine's DotProductAttention over `thd`.

    It exchanges keys between context-parallel ranks itself, and the model applies RoPE before it. Before 2.9 it trained
    packs wrongly (checked by Megatron-Core, `transformer_config.py` of its branch dev). It selects a kernel by shape
    and device, among those that the NVTE_* variables allow.
    """

    name = "transformer_engine"
    requirements = replace(VarlenBackend.requirements, libraries=(("transformer-engine", "2.9"),))
    dense_decodes = True
    windows = True

    def build_core(self, rotation: Rotation | None, **arguments: Any) -> torch.nn.Module:
        """See `AttentionBackend.build_core`; `rotation` is None here, as the model rotates."""
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        core: torch.nn.Module = TEDotProductAttention(**arguments)
        return core
