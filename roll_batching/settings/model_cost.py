"""Predicted times of packs of a model, from its settings: without torch, for planning beside a training process."""

from __future__ import annotations

import dataclasses
from typing import Any

from roll_batching.planning import FlopsCost
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.settings.model import ArchitectureConfig


def architecture_cost(model: ArchitectureConfig, *, tp_size: int = 1, cp_size: int = 1) -> FlopsCost:
    """Training FLOPs by length, per tensor- and context-parallel rank; equals `modeling.cost.model_cost`."""
    if model.hybrid is not None:
        from roll_batching.settings.hybrid_cost import HybridSizes, hybrid_cost  # few models need it

        return hybrid_cost(HybridSizes.of_settings(model), ranks=tp_size * cp_size)
    moe, heads = model.moe, model.mtp_num_layers or 0
    cost = FlopsCost.from_model(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_width,
        num_layers=model.num_layers + heads,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        vocab_size=model.vocab_size + heads * (model.vocab_size + 2 * model.hidden_size),
        num_experts=None if moe is None else moe.num_experts,
        num_moe_layers=None if moe is None else heads + sum(map(moe.is_mixture, range(model.num_layers))),
        moe_router_topk=1 if moe is None else moe.router_topk,
        moe_ffn_hidden_size=None if moe is None else moe.ffn_hidden_size,
        moe_shared_expert_size=0 if moe is None else moe.shared_expert_ffn_hidden_size or 0,
        tp_size=tp_size,
        cp_size=cp_size,
    )
    if model.attention_output_gate or model.gated_delta_net is not None:
        return with_delta_nets(
            cost,
            model.gated_delta_net,
            delta_layers=0 if model.gated_delta_net is None else sum(model.gated_delta_net.layers),
            output_gate=model.attention_output_gate,
            num_layers=model.num_layers + heads,
            hidden_size=model.hidden_size,
            queries=model.num_attention_heads * model.head_dim,
            keys=model.kv_heads * model.head_dim,
            ranks=tp_size * cp_size,
        )
    if model.multi_latent_attention is None:
        return cost
    return with_latent_attention(
        cost,
        num_layers=model.num_layers + heads,
        heads=model.num_attention_heads,
        hidden_size=model.hidden_size,
        latent=model.multi_latent_attention,
        ranks=tp_size * cp_size,
    )


def with_latent_attention(
    cost: FlopsCost, *, num_layers: int, heads: int, hidden_size: int, latent: Any, ranks: int
) -> FlopsCost:
    """The cost with multi-latent attention in place of attention whose heads all have the channels of its keys.

    `latent` is a `LatentAttentionConfig`, or Megatron's config with the same names; `ranks` share the cost.
    """
    keys = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    width = latent.q_lora_rank
    queries = heads * keys * (width or hidden_size) + hidden_size * (width or 0)
    down = hidden_size * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    up = latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
    more = queries + down + up + heads * latent.v_head_dim * hidden_size - 4 * hidden_size * heads * keys
    linear = cost.linear + 6 * num_layers * more // ranks
    quadratic = 3 * num_layers * heads * (keys + latent.v_head_dim) // ranks
    fixed = linear * (cost.fixed // max(cost.linear, 1))
    return dataclasses.replace(cost, linear=linear, quadratic=quadratic, fixed=fixed)


@dataclasses.dataclass(frozen=True)
class DeltaNetSizes:
    """Sizes of gated delta nets, by the names of `DeltaNetConfig`."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    @classmethod
    def of(cls, config: Any) -> DeltaNetSizes:
        """Those of Megatron's TransformerConfig."""
        return cls(**{field.name: getattr(config, f"linear_{field.name}") for field in dataclasses.fields(cls)})


def with_delta_nets(
    cost: FlopsCost,
    delta: Any,
    *,
    delta_layers: int,
    output_gate: bool,
    num_layers: int,
    hidden_size: int,
    queries: int,
    keys: int,
    ranks: int,
) -> FlopsCost:
    """The cost with gated delta nets in place of attention in `delta_layers` layers, and gates of the others' output.

    `delta` is a `DeltaNetConfig` or its `DeltaNetSizes`; `queries` and `keys` are heads x channels of attention, whose
    projections and pairs of tokens the cost has for every layer. A delta net multiplies the state of each value head
    three times per token: to read what the key finds there, to change it, and to read the output.
    """
    gates = hidden_size * queries if output_gate else 0
    more = (num_layers - delta_layers) * gates
    if delta is not None:
        values = delta.num_value_heads * delta.value_head_dim
        key_dim, both = delta.key_head_dim, 2 * delta.num_key_heads * delta.key_head_dim + values
        projections = hidden_size * (both + 2 * values + 2 * delta.num_value_heads)
        of_layer = projections + both * delta.conv_kernel_dim + 3 * values * key_dim
        more += delta_layers * (of_layer - 2 * hidden_size * (queries + keys))
    linear = cost.linear + 6 * more // ranks
    quadratic = cost.quadratic * (num_layers - delta_layers) // num_layers
    fixed = linear * (cost.fixed // max(cost.linear, 1))
    return dataclasses.replace(cost, linear=linear, quadratic=quadratic, fixed=fixed)


def with_parts_of(config: Any, cost: FlopsCost, *, ranks: int) -> FlopsCost:
    """`with_latent_attention` or `with_delta_nets`, for Megatron's TransformerConfig."""
    all_layers = config.num_layers + (getattr(config, "mtp_num_layers", None) or 0)
    if config.multi_latent_attention:
        return with_latent_attention(
            cost,
            num_layers=all_layers,
            heads=config.num_attention_heads,
            hidden_size=config.hidden_size,
            latent=config,
            ranks=ranks,
        )
    layers = config.linear_attention_freq
    return with_delta_nets(
        cost,
        DeltaNetSizes.of(config) if layers else None,
        delta_layers=sum(layers or ()),
        output_gate=config.attention_output_gate,
        num_layers=all_layers,
        hidden_size=config.hidden_size,
        queries=config.num_attention_heads * config.kv_channels,
        keys=config.num_query_groups * config.kv_channels,
        ranks=ranks,
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
