"""The attention backend of the package flash-attn, for torch versions without variable-length attention."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from roll_batching.modeling.attention.varlen import VarlenBackend, VarlenCore, VarlenSpans, kernel_window
from roll_batching.packing.attention_backend import AttentionRequirements, Rotation
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
    requirements = AttentionRequirements(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        largest_head=256,
        head_multiple=8,
        compute_capability=(8, 0),
        libraries=(("flash-attn", "2.1"),),
        instead="set attention_backend: flash_attn_4 and pip install 'roll-batching[flash-attn]', without a compiler, "
        "or choose another attention_backend",
    )

    def build_core(self, rotation: Rotation | None, **arguments: Any) -> torch.nn.Module:
        """See `AttentionBackend.build_core`."""
        return FlashCore(rotation=rotation, **arguments)
