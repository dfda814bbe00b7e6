"""The backend of TransformerEngine: its attention as Megatron wraps it, fed with Megatron's PackedSeqParams alone."""

from __future__ import annotations

from typing import Any

import torch

from roll_batching.packing.attention_backend import AttentionBackend, AttentionRequirements, Rotation


class EngineBackend(AttentionBackend):
    """TransformerEngine's DotProductAttention over `thd`.

    It exchanges keys between context-parallel ranks itself, and the model rotates before it. Before 2.9 packs trained
    wrongly (Megatron-Core's own check, `transformer_config.py` of its branch dev). Which of its kernels attends, it
    decides by shape and device, within what the variables NVTE_* allow.
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
