"""What a sequence costs a model: the planner's cost, read from Megatron's own config."""

from __future__ import annotations

from typing import Any

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.modeling.spec import is_mixture
from roll_batching.planning import FlopsCost


def model_cost(config: Any, vocab_size: int, layout: ParallelLayout) -> FlopsCost:
    """Training FLOPs by length for a GPTModel with this TransformerConfig, per tensor- and context-parallel rank."""
    experts = config.num_moe_experts
    layers = range(config.num_layers)
    return FlopsCost.from_model(
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=vocab_size,
        gated_linear_unit=config.gated_linear_unit,
        num_experts=experts,
        num_moe_layers=sum(is_mixture(config.moe_layer_freq, layer) for layer in layers) if experts else None,
        moe_router_topk=config.moe_router_topk if experts else 1,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size if experts else None,
        moe_shared_expert_size=(config.moe_shared_expert_intermediate_size or 0) if experts else 0,
        tp_size=layout.tp_size,
        cp_size=layout.cp_size,
    )
