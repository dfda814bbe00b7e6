"""Predicted times of packs of a model, from its settings: without torch, for planning beside a training process."""

from __future__ import annotations

import dataclasses
from typing import Any

from roll_batching.planning import FlopsCost, ParallelDims
from roll_batching.planning.cost_model import FLOPS_PER_WEIGHT
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.planning.recurrent_exchange import Divided, RecurrentExchange
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
    """Replaces the cost of standard attention (all of q, k, v with the key width) by that of multi-latent attention.

    `latent` is a `LatentAttentionConfig`, or Megatron's config with the same names; `ranks` share the cost.
    """
    keys = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    q_rank = latent.q_lora_rank
    queries = heads * keys * (q_rank or hidden_size) + hidden_size * (q_rank or 0)
    down = hidden_size * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    up = latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
    output = heads * latent.v_head_dim * hidden_size
    standard = 4 * hidden_size * heads * keys  # projections of queries, keys, values and output
    extra_weights = queries + down + up + output - standard
    per_pair = num_layers * heads * (keys + latent.v_head_dim)  # scores, and weighted values
    return _with_flops(
        cost,
        linear=cost.linear + FLOPS_PER_WEIGHT * num_layers * extra_weights // ranks,
        quadratic=FLOPS_PER_WEIGHT * per_pair // 2 // ranks,  # half of the pairs: attention is causal
    )


def _with_flops(cost: FlopsCost, *, linear: int, quadratic: int) -> FlopsCost:
    """`cost` with other FLOPs by length; the fixed cost of a micro-batch stays that of as many tokens."""
    fixed_tokens = cost.fixed // max(cost.linear, 1)
    return dataclasses.replace(cost, linear=linear, quadratic=quadratic, fixed=linear * fixed_tokens)


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
        """The sizes of Megatron's TransformerConfig."""
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
    """Replaces attention in `delta_layers` layers by gated delta nets, and adds output gates to the others' attention.

    `delta` is a `DeltaNetConfig` or its `DeltaNetSizes`; `queries` and `keys` are heads x channels of attention, whose
    projections and pairs of tokens the cost has for every layer. A delta net multiplies the state of each value head
    three times per token: to read what the key finds there, to change it, and to read the output.
    """
    gates = hidden_size * queries if output_gate else 0
    extra_weights = (num_layers - delta_layers) * gates
    if delta is not None:
        values = delta.num_value_heads * delta.value_head_dim
        key_dim, both = delta.key_head_dim, 2 * delta.num_key_heads * delta.key_head_dim + values
        projections = hidden_size * (both + 2 * values + 2 * delta.num_value_heads)
        # 2 * hidden * (queries + keys): attention's projections (q and output; k and v), which the cost has already.
        of_layer = projections + both * delta.conv_kernel_dim + 3 * values * key_dim
        extra_weights += delta_layers * (of_layer - 2 * hidden_size * (queries + keys))
    return _with_flops(
        cost,
        linear=cost.linear + FLOPS_PER_WEIGHT * extra_weights // ranks,
        quadratic=cost.quadratic * (num_layers - delta_layers) // num_layers,
    )


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
    layers = _delta_layers(config)
    return with_delta_nets(
        cost,
        DeltaNetSizes.of(config) if layers else None,
        delta_layers=layers,
        output_gate=config.attention_output_gate,
        num_layers=all_layers,
        hidden_size=config.hidden_size,
        queries=config.num_attention_heads * config.kv_channels,
        keys=config.num_query_groups * config.kv_channels,
        ranks=ranks,
    )


def delta_exchange(delta: Any, *, layers: int, tp_size: int, divide: Divided) -> RecurrentExchange:
    """What ranks send in `layers` gated delta nets; `delta` is a `DeltaNetConfig` or its `DeltaNetSizes`."""
    units, values = delta.num_key_heads // tp_size, delta.num_value_heads * delta.value_head_dim // tp_size
    states = delta.num_value_heads // tp_size * delta.key_head_dim
    return RecurrentExchange(
        layers=layers,
        units=units,
        # Queries and keys; values, gates and outputs; rates and decays.
        channels=2 * units * delta.key_head_dim + 3 * values + 2 * delta.num_value_heads // tp_size,
        map_elements=states * (delta.key_head_dim + delta.value_head_dim),
        divide=divide,
    )


def with_exchange(model: ArchitectureConfig, *, tp_size: int, divide: Divided) -> dict[str, Any]:
    """Arguments of `PackTimes.of_model` for a model with recurrent layers; empty for others."""
    if (delta := model.gated_delta_net) is not None:
        layers = sum(delta.layers)
        recurrent = delta_exchange(delta, layers=layers, tp_size=tp_size, divide=divide)
        return {"attention_layers": model.num_layers - layers, "recurrent": recurrent}
    if model.hybrid is not None:
        from roll_batching.settings.hybrid_cost import HybridSizes  # few models need it

        sizes = HybridSizes.of_settings(model)
        return {"attention_layers": sizes.pattern.count("*"), "recurrent": sizes.exchange(tp_size, divide)}
    return {}


def _delta_layers(config: Any) -> int:
    """Number of gated delta nets. Megatron's TransformerConfig has a list of them, or N: all but every N-th layer."""
    freq = getattr(config, "linear_attention_freq", None)
    if isinstance(freq, int):
        return config.num_layers - config.num_layers // freq
    return sum(freq or ())


def config_exchange(config: Any, divide: Divided) -> dict[str, Any]:
    """As `with_exchange`, for Megatron's TransformerConfig."""
    tp_size = config.tensor_model_parallel_size
    if layers := _delta_layers(config):
        recurrent = delta_exchange(DeltaNetSizes.of(config), layers=layers, tp_size=tp_size, divide=divide)
        return {"attention_layers": config.num_layers - layers, "recurrent": recurrent}
    if getattr(config, "layer_kinds", None):
        from roll_batching.settings.hybrid_cost import HybridSizes  # few models need it

        sizes = HybridSizes.of_config(config, 0)
        return {"attention_layers": sizes.pattern.count("*"), "recurrent": sizes.exchange(tp_size, divide)}
    return {}


def architecture_pack_times(
    model: ArchitectureConfig, dims: ParallelDims, *, divide: Divided = "auto", cluster: Cluster | None = None
) -> PackTimes:
    """Predicted times of packs by context-parallel size; equals `modeling.cost.model_pack_times`."""
    return PackTimes.of_model(
        architecture_cost(model, tp_size=dims.tp_size),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        **with_exchange(model, tp_size=dims.tp_size, divide=divide),
        tp_size=dims.tp_size,
        pp_size=dims.pp_size,
        cluster=cluster,
    )
