"""Normalisation of queries and keys over all heads together, on all tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention


class AllHeadsRMSNorm(torch.nn.Module):
    """RMSNorm of the channels of all heads of a layer, of which this tensor-parallel rank has some.

    Every rank holds the whole weight and uses its heads' part; Megatron sums gradients of `q_layernorm` and
    `k_layernorm` over tensor-parallel ranks. Key-value heads may lie on several ranks each. Computes in fp32.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, ranks: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(heads * head_dim))
        self.heads, self.eps, self.ranks = heads, eps, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised heads [..., heads of this rank, head dim], in the dtype of `x`."""
        values = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(-2)
        mean = values.square().mean(-1, keepdim=True)
        if self.ranks.size() > 1:  # the sum of ranks, in the backward pass, too
            mean = copy_to_tensor_model_parallel_region(mean, self.ranks)
            mean = reduce_from_tensor_model_parallel_region(mean, self.ranks) / self.ranks.size()
        first = self.ranks.rank() * self.heads // self.ranks.size() * x.shape[-1]
        weight = self.weight[first : first + values.shape[-1]]
        return ((values * torch.rsqrt(mean + self.eps)).to(x.dtype) * weight).view(x.shape)


def normalise_all_heads(model: torch.nn.Module, ranks: Any) -> None:
    """Replaces the norms of single heads in a new model's self-attention; `ranks` are its tensor-parallel ranks."""
    for layer in model.modules():
        if isinstance(layer, SelfAttention):
            config, head_dim = layer.config, layer.hidden_size_per_attention_head
            for name, heads in (("q", config.num_attention_heads), ("k", config.num_query_groups)):
                norm = AllHeadsRMSNorm(heads, head_dim, config.layernorm_epsilon, ranks)
                setattr(layer, f"{name}_layernorm", norm)
