"""The attention backend of TransformerEngine, through Megatron's wrapper and PackedSeqParams."""

from __future__ import annotations

from typing import Any

import torch

from roll_batching.packing.attention_backend import AttentionBackend, AttentionRequirements, Rotation


class EngineBackend(AttentionBackend):
    """TransformerEngine's DotProductAttention over `thd`.

    It exchanges keys between context-parallel ranks itself, and the model applies RoPE before it. Before 2.9 it trained
    packs wrongly (checked by Megatron-Core, `transformer_config.py` of its branch dev). It selects a kernel by shape
    and device, among those that the NVTE_* variables allow.
    """

    name = "transformer_engine"
    requirements = AttentionRequirements(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        largest_head=256,
        head_multiple=8,
        compute_capability=(8, 0),
        libraries=(("transformer-engine", "2.9"),),
    )
    dense_decodes = True
    windows = True

    def build_core(self, rotation: Rotation | None, **arguments: Any) -> torch.nn.Module:
        """See `AttentionBackend.build_core`; `rotation` is None here, as the model rotates."""
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        core: torch.nn.Module = TEDotProductAttention(**arguments)
        return core
