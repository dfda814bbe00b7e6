"""Gated delta nets over packs: the layer in place of attention of Qwen3-Next and Qwen3.5.

Megatron-Core's own layer (0.16) needs CUDA and the package fla, and refuses packs, context parallelism and generation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from roll_batching.modeling.recurrences import Chunks, delta_step, gated_delta_rule, unit_length
from roll_batching.modeling.recurrent_layer import RecurrentLayer, Weights


class RuleInputs(NamedTuple):
    """Queries, keys and values [tokens, heads, channels], decays and rates [tokens, heads] of the gated delta rule."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


class PackedDeltaNet(RecurrentLayer):
    """A gated delta net whose state and convolution start anew in each sequence; takes the place of `self_attention`.

    Its units are key heads, each with query, key, values, gates, rates and decays of its value heads.
    """

    sharded = ("conv_weight", "A_log", "dt_bias")
    replicated = ("out_norm_weight",)

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: Any, *,
        column: Any = ColumnParallelLinear, row: Any = RowParallelLinear, **unused: Any,
    ) -> None:  # fmt: skip
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.values_per_key = config.linear_num_value_heads // config.linear_num_key_heads
        self.mixed = 2 * self.key_dim + self.values_per_key * self.value_dim
        """Convolved channels per key head."""
        super().__init__(
            config, layer_number, pg_collection,
            units=config.linear_num_key_heads,
            width=self.mixed + self.values_per_key * (self.value_dim + 2),
            out=self.values_per_key * self.value_dim,
            column=column,
            row=row,
        )  # fmt: skip
        value_heads = self.units * self.values_per_key
        self.conv_weight = self._shard(self.units * self.mixed, 1, config.linear_conv_kernel_dim)
        self.A_log, self.dt_bias = self._shard(value_heads), self._shard(value_heads)
        self.out_norm_weight = torch.nn.Parameter(self.A_log.new_ones(self.value_dim))
        if config.perform_initialization:
            with torch.no_grad():
                bound = config.linear_conv_kernel_dim**-0.5
                self._draw(self.conv_weight, -bound, bound)
                self._draw(self.A_log, 1, 16)
                self.A_log.log_()
                self.dt_bias.fill_(1.0)

    def split(self, parts: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Convolved channels; gates [tokens, value heads, channels], rates and decays [tokens, value heads]."""
        count = self.values_per_key
        mixed, gates, rate, decay = parts.split([self.mixed, count * self.value_dim, count, count], -1)
        gates = gates.reshape(*gates.shape[:-2], -1, self.value_dim)
        return mixed.flatten(-2), (gates, rate.flatten(-2), decay.flatten(-2))

    def scan(
        self, mixed: torch.Tensor, controls: tuple[torch.Tensor, ...], weights: Weights, chunks: Chunks,
        real: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Outputs of the chunked rule, normalised and gated, and its states."""
        gates, rate, decay = controls
        inputs = self._rule_inputs(mixed, rate, decay, weights)
        if real is not None:
            inputs = inputs._replace(decay=inputs.decay * real, rate=inputs.rate * real)
        out, state = gated_delta_rule(*inputs, chunks=chunks)
        return self._gated_norm(out.to(gates.dtype), gates).flatten(1), state

    def step(
        self, mixed: torch.Tensor, controls: tuple[torch.Tensor, ...], weights: Weights, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states of the rule for one token."""
        gates, rate, decay = controls
        out, state = delta_step(*self._rule_inputs(mixed, rate, decay, weights), state=state)
        return self._gated_norm(out.to(gates.dtype), gates).flatten(1), state

    def _rule_inputs(
        self, mixed: torch.Tensor, rate: torch.Tensor, decay: torch.Tensor, weights: Weights
    ) -> RuleInputs:
        """Queries, keys, values, decays and rates of the value heads, in fp32 or fp64."""
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        per_key = mixed.to(dtype).view(*mixed.shape[:-1], -1, self.mixed)
        count = self.values_per_key
        query, key, value = per_key.split([self.key_dim, self.key_dim, count * self.value_dim], -1)
        query, key = (unit_length(x).repeat_interleave(count, dim=-2) for x in (query, key))
        value = value.reshape(*value.shape[:-2], -1, self.value_dim)
        decay = -weights["A_log"].to(dtype).exp() * F.softplus(decay.to(dtype) + weights["dt_bias"].to(dtype))
        return RuleInputs(query * self.key_dim**-0.5, key, value, decay, rate.sigmoid().to(dtype))

    def _gated_norm(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each head, times SiLU of its gates."""
        # Each tensor-parallel rank's heads give a part of the weight's gradient.
        weight = copy_to_tensor_model_parallel_region(self.out_norm_weight, group=self.pg_collection.tp)
        dtype = torch.promote_types(x.dtype, torch.float32)
        normalised = F.rms_norm(x.to(dtype), (self.value_dim,), None, self.config.layernorm_epsilon).to(x.dtype)
        return (weight * normalised * F.silu(gates.to(dtype))).to(x.dtype)
