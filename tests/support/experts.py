"""Mixtures of experts on the CPU, also where Megatron-Core wants TransformerEngine for the router's product."""

from __future__ import annotations


def let_experts_run() -> None:
    """Megatron-Core 0.16 without TransformerEngine lacks the name whose None chooses its own plain product."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
