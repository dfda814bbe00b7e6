"""Modules beyond Megatron's: attention with output gates or more tensor-parallel ranks than key-value heads, a norm
over all heads, Gemma's norms behind layers and scaled embeddings, and the value head of a critic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

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
        local_heads = self.config.num_attention_heads // ranks.size()
        query, *gates = (heads[:, :, part * local_heads : (part + 1) * local_heads] for heads in parts)
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value, *gates


# ---- a norm over all heads


class AllHeadsRMSNorm(torch.nn.Module):
    """RMSNorm over the channels of all heads of a layer, which tensor-parallel ranks share.

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


# ---- Gemma


Residual = tuple[torch.Tensor, torch.Tensor | None]
"""Output of a linear layer, and its bias."""


class SandwichLayer(TransformerLayer):
    """Megatron's layer with a norm behind attention and one behind the feed-forward layer, before they are added."""

    def __init__(
        self, config: TransformerConfig, *arguments: Any, norm: type[torch.nn.Module], **keywords: Any
    ) -> None:
        super().__init__(config, *arguments, **keywords)
        if config.add_bias_linear:
            raise LayoutError("sandwich_norms and add_bias_linear exclude each other: unset one")
        self.post_attention_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = norm(config, config.hidden_size, config.layernorm_epsilon)
        layer: Any = self  # Megatron's attributes have no types
        layer.self_attn_bda = _add_after_norm(self.post_attention_layernorm, layer.self_attn_bda)
        layer.mlp_bda = _add_after_norm(self.post_mlp_layernorm, layer.mlp_bda)


def _add_after_norm(norm: torch.nn.Module, get_add: Callable[[bool, bool], Any]) -> Callable[[bool, bool], Any]:
    """Wraps Megatron's `get_bias_dropout_add`: its functions normalise an output before they add the residual."""

    def get_add_normalised(training: bool, fused: bool) -> Callable[[Residual, torch.Tensor, float], torch.Tensor]:
        add = get_add(training, fused)

        def add_normalised(output: Residual, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            # The bias would belong inside the norm. It is None: SandwichLayer refuses add_bias_linear.
            result: torch.Tensor = add((norm(output[0]), None), residual, dropout)
            return result

        return add_normalised

    return get_add_normalised


class ScaledEmbedding(LanguageModelEmbedding):
    """Megatron's embedding, multiplied by the square root of its width; a tied head uses the weight without it."""

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """The scaled embeddings [s, b, h]. The factor is rounded to their dtype, as when Gemma was trained."""
        embeddings = super().forward(*arguments, **keywords)
        return embeddings * torch.tensor(self.config.hidden_size**0.5, dtype=embeddings.dtype)


def scale_embedding(gpt: Any) -> None:
    """Makes the embedding of a GPTModel a `ScaledEmbedding`; does nothing on stages without one."""
    if gpt.pre_process:
        gpt.embedding.__class__ = ScaledEmbedding


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by tanh, which Megatron computes in fused kernels only."""
    return F.gelu(x, approximate="tanh")


# ---- the value head


class ValueHead(torch.nn.Module):
    """A linear layer from hidden states to one value per token, whole on every tensor-parallel rank.

    It starts at 0, or at random numbers of a seed with the standard deviation `std`: alike in every parallel layout.
    """

    def __init__(self, config: Any, group: Any, std: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        weight = torch.zeros(1, config.hidden_size)
        if std:
            weight.normal_(std=std, generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))
        # Under sequence parallelism a rank sees its shard of the tokens: Megatron then adds up gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias = None
        self._shard_group = group if config.sequence_parallel else None

    def forward(
        self, input_: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Values [s, b, 1] of hidden states [s (/ tp with sequence parallelism), b, hidden], at least in fp32."""
        wide = torch.promote_types(input_.dtype, torch.float32)
        values = F.linear(input_.to(wide), self.weight.to(wide))
        if self._shard_group is not None:
            # The loss is computed on every rank alike, so each takes its own shard of the gradient, without a sum.
            values = tensor_parallel.gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._shard_group
            )
        return values, None


def set_value_head(gpt: Any, std: float, seed: int) -> None:
    """Replaces the output layer of `gpt`, if this stage has it, by a value head."""
    if gpt.post_process:
        gpt.output_layer = ValueHead(gpt.config, gpt.pg_collection.tp, std, seed)
        gpt.output_layer.weight.is_embedding_or_output_parameter = True  # as Megatron marks the head that it replaces
