"""Megatron's self-attention with output gates, and with more tensor-parallel ranks than key-value heads."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention

from roll_batching.errors import LayoutError


class GatedSelfAttention(SelfAttention):
    """Self-attention with output gates that are not compiled: Megatron compiles them for every number of tokens."""

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (x * torch.sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


class ReplicatedKVAttention(GatedSelfAttention):
    """Attention with each key-value head on TP / `num_query_groups` tensor-parallel ranks.

    Weights are sharded as in Megatron, evenly by rows: a rank may hold a group's last queries and its key. Projections
    are gathered over the tensor-parallel ranks, and each rank takes its query heads and their key and value. Megatron's
    own method (0.16 to 0.19) reads ranks from the parallel state, which are another model's where a role has a second
    layout; that of 0.16 does not divide gates.
    """

    def __init__(self, config: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, *arguments, **keywords)
        if getattr(config, "fused_single_qkv_rope", False):
            raise LayoutError("fused_single_qkv_rope needs num_query_groups of at least the tensor-parallel size")

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, key_value_states: Any = None, output_gate: bool = False, **unused: Any
    ) -> tuple[torch.Tensor, ...]:
        """Query, key and value [tokens, rows, heads, head dim] of this rank, and with `output_gate` the gates."""
        projected, _ = self.linear_qkv(hidden_states)
        ranks = self.pg_collection.tp
        projected = all_gather_last_dim_from_tensor_parallel_region(projected, group=ranks)
        groups = self.config.num_query_groups
        group, part = divmod(ranks.rank(), ranks.size() // groups)
        heads = projected.unflatten(-1, (groups, -1, self.hidden_size_per_attention_head))[:, :, group]
        *parts, key, value = heads.split([self.config.num_attention_heads // groups] * (1 + output_gate) + [1, 1], 2)
        own = self.config.num_attention_heads // ranks.size()
        query, *gates = (heads[:, :, part * own : (part + 1) * own] for heads in parts)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value, *gates
