"""Model FLOPs of sequences from a TransformerConfig, for the planner's cost and for MFU.

A sequence of L tokens takes 6 N L + 6 layers x heads x head dimension x L^2 FLOPs, forward and backward. N are the
parameters of the matrix products: those of the layers (in a mixture, of the experts that a token visits) and the head,
without the input embedding. The second term is causal attention. Padding, fillers and recompute do not count. Divided
by time, ranks and the device's peak rate this is MFU, model FLOPs utilisation (PaLM, arXiv 2204.02311).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.modeling.layers import has_uneven_stages, is_mixture, recurrent_layers
from roll_batching.planning import CostModel, FlopsCost, ParallelDims, Plan
from roll_batching.planning.pack_times import Cluster, PackTimes, weigh_cost
from roll_batching.planning.recurrent_exchange import Divided

DENSE_BF16 = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
}
"""Dense 16-bit peak rates in FLOP/s from the datasheets. The first key that a device's name contains applies."""


def model_cost(config: Any, vocab_size: int, layout: ParallelDims) -> FlopsCost:
    """Training FLOPs by length, per tensor- and context-parallel rank, of a GPTModel with this TransformerConfig.

    With a key for pipeline stages of unequal size, or heads of multi-token prediction, they are known by model chunk,
    too, with the output layer and these heads in the last one.
    """
    if getattr(config, "layer_kinds", None):
        from roll_batching.modeling.layer_layout import hybrid_model_cost

        return hybrid_model_cost(config, vocab_size, layout)
    experts, heads = config.num_moe_experts, getattr(config, "mtp_num_layers", None) or 0
    layers = range(config.num_layers)
    chunk_layers = None
    if layout.pp_size > 1 and (has_uneven_stages(config) or heads):
        from roll_batching.modeling.layer_layout import layers_of_all_chunks  # few models need it

        chunk_layers = [
            (len(held), sum(is_mixture(config.moe_layer_freq, layer) for layer in held) if experts else 0)
            for held in layers_of_all_chunks(config)
        ]
        (dense, mixtures), of_heads = chunk_layers[-1], heads if experts else 0
        chunk_layers[-1] = (dense + heads, mixtures + of_heads)
    cost = FlopsCost.from_model(
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_layers=config.num_layers + heads,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        # A head of multi-token prediction has a layer, the projection of two hidden states, and the output layer.
        vocab_size=vocab_size + heads * (vocab_size + 2 * config.hidden_size),
        gated_linear_unit=config.gated_linear_unit,
        num_experts=experts,
        num_moe_layers=sum(is_mixture(config.moe_layer_freq, layer) for layer in layers) + heads if experts else None,
        moe_router_topk=config.moe_router_topk if experts else 1,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size if experts else None,
        moe_shared_expert_size=(config.moe_shared_expert_intermediate_size or 0) if experts else 0,
        tp_size=layout.tp_size,
        cp_size=layout.cp_size,
        chunk_layers=chunk_layers,
    )
    if config.multi_latent_attention or recurrent_layers(config) or getattr(config, "attention_output_gate", False):
        from roll_batching.settings.model_cost import with_parts_of  # few models need it

        return with_parts_of(config, cost, ranks=layout.tp_size * layout.cp_size)
    return cost


def planning_cost(config: Any, vocab_size: int, layout: ParallelLayout, cluster: Cluster) -> FlopsCost:
    """`model_cost`, weighed by the rates of a cluster, with the exchange of keys and values that slices repeat."""
    cost = weigh_cost(model_cost(config, vocab_size, layout), cluster)
    if layout.cp_size == 1:
        return cost
    times = model_pack_times(config, vocab_size, layout, cluster)
    return replace(cost, exchange=times.exchange_cost(layout.cp_size))


def model_pack_times(
    config: Any, vocab_size: int, layout: ParallelLayout, cluster: Cluster, divide: Divided = "auto"
) -> PackTimes:
    """Predicted times of packs of a GPTModel with this TransformerConfig, on a cluster."""
    exchange = {}
    if recurrent_layers(config):
        from roll_batching.settings.model_cost import config_exchange  # few models need it

        exchange = config_exchange(config, divide)
    return PackTimes.of_model(
        model_cost(config, vocab_size, layout),
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_query_groups=config.num_query_groups or config.num_attention_heads,
        kv_channels=config.kv_channels,
        **exchange,
        tp_size=layout.tp_size,
        pp_size=layout.pp_size,
        cluster=cluster,
    )


def plan_flops(plan: Plan, cost: CostModel, layout: ParallelDims, *, sharing: bool = True) -> float | None:
    """Model FLOPs that a plan computes for samples on all ranks, forward and backward; None without a FlopsCost.

    Alignment and filler do not count. Shared prefixes count once; without `sharing`, for each sample.
    """
    if not isinstance(cost, FlopsCost):
        return None
    lengths, shared = plan.used[plan.samples].astype(float), plan.shared.astype(float) * sharing
    pairs = (lengths * lengths).sum() - (shared * shared).sum()
    per_pair = cost.quadratic if cost.pair_flops is None else cost.pair_flops
    per_rank = cost.linear * (lengths.sum() - shared.sum()) + per_pair * pairs
    return float(per_rank) * layout.tp_size * layout.cp_size


def device_rate(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak rate of `device` in `dtype` by its datasheet, in FLOP/s; None for an unknown device or dtype."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate for chip, rate in DENSE_BF16.items() if chip in name), None)
