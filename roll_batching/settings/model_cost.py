"""Predicted times of packs of a model, from its settings: without torch, for planning beside a training process."""

from __future__ import annotations

from roll_batching.planning import FlopsCost
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.settings.model import ArchitectureConfig


def architecture_cost(model: ArchitectureConfig, *, tp_size: int = 1) -> FlopsCost:
    """Training FLOPs by length, per tensor-parallel rank; equals `modeling.cost.model_cost`."""
    moe = model.moe
    return FlopsCost.from_model(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_width,
        num_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        vocab_size=model.vocab_size,
        num_experts=None if moe is None else moe.num_experts,
        num_moe_layers=None if moe is None else sum(map(moe.is_mixture, range(model.num_layers))),
        moe_router_topk=1 if moe is None else moe.router_topk,
        moe_ffn_hidden_size=None if moe is None else moe.ffn_hidden_size,
        moe_shared_expert_size=0 if moe is None else moe.shared_expert_ffn_hidden_size or 0,
        tp_size=tp_size,
    )


def architecture_pack_times(
    model: ArchitectureConfig, *, tp_size: int = 1, pp_size: int = 1, cluster: Cluster | None = None
) -> PackTimes:
    """Predicted times of packs by context-parallel size; equals `modeling.cost.model_pack_times`."""
    return PackTimes.of_model(
        architecture_cost(model, tp_size=tp_size),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        tp_size=tp_size,
        pp_size=pp_size,
        cluster=cluster,
    )
