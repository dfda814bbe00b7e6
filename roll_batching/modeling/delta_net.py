"""Gated delta nets over packs: the layer in place of attention of Qwen3-Next and Qwen3.5.

Megatron-Core's own layer (0.16) needs CUDA and the package fla, and refuses packs, context parallelism and generation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import all_to_all, copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default

from roll_batching.errors import LayoutError
from roll_batching.modeling.decode import DecodeParams
from roll_batching.modeling.delta_rule import (
    Chunks,
    causal_convolution,
    delta_step,
    gated_delta_rule,
    inputs_before,
    unit_length,
)
from roll_batching.packing.params import PackedParams


class RuleInputs(NamedTuple):
    """Queries, keys and values [tokens, heads, channels], decays and rates [tokens, heads] of the gated delta rule."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


class PackedDeltaNet(MegatronModule):
    """A gated delta net whose state and convolution start anew in each sequence; takes the place of `self_attention`.

    Rows of `in_proj` and channels of the convolution are grouped by key head: query, key, values, gates, rates and
    decays of its value heads. Tensor parallelism divides key heads. Under context parallelism each rank computes all
    tokens of its part of these heads, which an all-to-all before and one behind brings about.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        super().__init__(config=config)
        self.layer_number, self.pg_collection = layer_number, pg_collection
        tp = pg_collection.tp.size()
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.values_per_key = config.linear_num_value_heads // config.linear_num_key_heads
        self.heads = config.linear_num_key_heads // tp
        """Key heads of this tensor-parallel rank."""
        self.mixed = 2 * self.key_dim + self.values_per_key * self.value_dim
        """Convolved channels per key head."""
        self.width = self.mixed + self.values_per_key * (self.value_dim + 2)
        """Channels of `in_proj` per key head."""
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size, config.linear_num_key_heads * self.width, init_method=config.init_method,
            gather_output=False, **linear,
        )  # fmt: skip
        self.out_proj = RowParallelLinear(
            config.linear_num_value_heads * self.value_dim, config.hidden_size, input_is_parallel=True,
            skip_bias_add=True, init_method=config.output_layer_init_method, **linear,
        )  # fmt: skip
        value_heads = self.heads * self.values_per_key
        self.conv_weight = self._sharded(self.heads * self.mixed, 1, config.linear_conv_kernel_dim)
        self.A_log, self.dt_bias = self._sharded(value_heads), self._sharded(value_heads)
        self.out_norm_weight = torch.nn.Parameter(self.A_log.new_ones(self.value_dim))
        if config.perform_initialization:
            with torch.no_grad():
                bound = config.linear_conv_kernel_dim**-0.5
                self._draw(self.conv_weight, -bound, bound)
                self._draw(self.A_log, 1, 16)
                self.A_log.log_()
                self.dt_bias.fill_(1.0)

    def _sharded(self, *shape: int) -> torch.nn.Parameter:
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.empty(*shape, device=device, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def _draw(self, shard: torch.nn.Parameter, low: float, high: float) -> None:
        """Fills this rank's part of a parameter whose values do not depend on the number of ranks."""
        group = self.pg_collection.tp
        whole = shard.new_empty(len(shard) * group.size(), *shard.shape[1:]).uniform_(low, high)
        shard.copy_(whole.chunk(group.size())[group.rank()])

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **unused: Any
    ) -> tuple[torch.Tensor, None]:
        """The output [tokens / cp, 1, hidden] of a pack, or [positions, rows, hidden] of a pass with a cache."""
        params = packed_seq_params
        projected, _ = self.in_proj(hidden_states)
        if isinstance(params, DecodeParams):
            out = self._decode(projected, params)
        elif isinstance(params, PackedParams):
            out = self._pack(projected.squeeze(1), params).unsqueeze(1)
        else:
            raise LayoutError("a gated delta net takes packs only: pass packed_seq_params=packed_params(layout, ...)")
        output, _ = self.out_proj(out)
        return output, None

    def _pack(self, projected: torch.Tensor, params: PackedParams) -> torch.Tensor:
        """[tokens / cp, heads * width] -> [tokens / cp, value heads * value channels]."""
        group = None if params.local_tokens is None else params.context_group(self.pg_collection.cp)
        weights = self.conv_weight, self.A_log, self.dt_bias
        if group is not None:
            size, rank = group.size(), group.rank()
            projected = _gather_tokens_split_heads(projected, group)[params.restore]
            weights = tuple(weight.chunk(size)[rank] for weight in weights)
        if params.chunks is None:
            params.chunks = Chunks.of(params.cu_seqlens_q, len(projected))
        chunks: Chunks = params.chunks
        mixed, gates, rate, decay = self._split(projected)
        mixed = causal_convolution(mixed, weights[0], chunks.positions)
        inputs = self._rule_inputs(mixed, rate, decay, weights[1], weights[2])
        out, _ = gated_delta_rule(*inputs, chunks=chunks)
        out = self._gated_norm(out.to(gates.dtype), gates).flatten(1)
        if group is None:
            return out
        assert params.restore is not None
        gathered = torch.empty_like(out).index_copy(0, params.restore, out)
        return _split_tokens_gather_heads(gathered, group)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Convolved channels [tokens, channels], gates [tokens, value heads, channels], rates, decays [.., heads]."""
        per_key = projected.view(*projected.shape[:-1], -1, self.width)
        count = self.values_per_key
        mixed, gates, rate, decay = per_key.split([self.mixed, count * self.value_dim, count, count], -1)
        gates = gates.reshape(*gates.shape[:-2], -1, self.value_dim)
        return mixed.flatten(-2), gates, rate.flatten(-2), decay.flatten(-2)

    def _rule_inputs(
        self, mixed: torch.Tensor, rate: torch.Tensor, decay: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor
    ) -> RuleInputs:
        """Queries, keys, values, decays and rates of the value heads, in fp32 or fp64."""
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        per_key = mixed.to(dtype).view(*mixed.shape[:-1], -1, self.mixed)
        count = self.values_per_key
        query, key, value = per_key.split([self.key_dim, self.key_dim, count * self.value_dim], -1)
        query, key = (unit_length(x).repeat_interleave(count, dim=-2) for x in (query, key))
        value = value.reshape(*value.shape[:-2], -1, self.value_dim)
        decay = -A_log.to(dtype).exp() * F.softplus(decay.to(dtype) + dt_bias.to(dtype))
        return RuleInputs(query * self.key_dim**-0.5, key, value, decay, rate.sigmoid().to(dtype))

    def _gated_norm(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """RMSNorm of each head, times SiLU of its gates."""
        # Each tensor-parallel rank's heads give a part of the weight's gradient.
        weight = copy_to_tensor_model_parallel_region(self.out_norm_weight, group=self.pg_collection.tp)
        dtype = torch.promote_types(x.dtype, torch.float32)
        normalised = F.rms_norm(x.to(dtype), (self.value_dim,), None, self.config.layernorm_epsilon).to(x.dtype)
        return (weight * normalised * F.silu(gates.to(dtype))).to(x.dtype)

    def _decode(self, projected: torch.Tensor, params: DecodeParams) -> torch.Tensor:
        """[positions, rows, heads * width] -> [positions, rows, channels]; the state is in the cache."""
        before = self.config.linear_conv_kernel_dim - 1
        if params.visible is not None:  # one position per row, perhaps repeated
            mixed, gates, rate, decay = self._split(projected[0])
            inputs, state = params.cache.states(self.layer_number)
            window = torch.cat([inputs, mixed.unsqueeze(1)], 1)
            mixed = F.silu((window * self.conv_weight[:, 0].t()).sum(1))
            step = self._rule_inputs(mixed, rate, decay, self.A_log, self.dt_bias)
            out, state = delta_step(*step, state=state)
            params.cache.set_states(self.layer_number, window[:, 1:], state)
            out = self._gated_norm(out.to(gates.dtype), gates).flatten(1)
            return out.expand(len(projected), *out.shape)
        positions, rows = projected.shape[:2]
        assert params.lengths is not None
        mixed, gates, rate, decay = self._split(projected.transpose(0, 1).reshape(rows * positions, -1))
        starts = torch.arange(rows + 1, device=projected.device) * positions
        chunks = Chunks.of(starts, rows * positions)
        inputs = inputs_before(mixed.view(rows, positions, -1), params.lengths, before)
        mixed = causal_convolution(mixed, self.conv_weight, chunks.positions)
        step = self._rule_inputs(mixed, rate, decay, self.A_log, self.dt_bias)
        # Padding behind a row leaves its state as it is.
        real = (chunks.positions < params.lengths.repeat_interleave(positions)).unsqueeze(-1)
        step = step._replace(decay=step.decay * real, rate=step.rate * real)
        out, state = gated_delta_rule(*step, chunks=chunks)
        params.cache.set_states(self.layer_number, inputs, state)
        out = self._gated_norm(out.to(gates.dtype), gates).flatten(1)
        return out.view(rows, positions, -1).transpose(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The parameters for Megatron's checkpoints; rows are grouped by key head, so that any size divides them."""
        own = {name: getattr(self, name) for name in ("conv_weight", "A_log", "dt_bias", "out_norm_weight")}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, {"conv_weight": 0, "A_log": 0, "dt_bias": 0}, sharded_offsets,
            tp_group=self.pg_collection.tp, dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(
                module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.pg_collection.tp
            )
        return sharded


def _gather_tokens_split_heads(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[tokens / cp, heads * width] -> [tokens, heads / cp * width], tokens in the order of ranks."""
    size = group.size()
    parts = x.view(len(x), size, -1).transpose(0, 1).contiguous()
    return all_to_all(group, parts.view(size * len(x), -1)).view(size * len(x), -1)


def _split_tokens_gather_heads(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[tokens, heads / cp * width], tokens in the order of ranks -> [tokens / cp, heads * width]."""
    size = group.size()
    tokens = len(x) // size
    parts = all_to_all(group, x.contiguous()).view(size, tokens, -1)
    return parts.transpose(0, 1).reshape(tokens, -1)
