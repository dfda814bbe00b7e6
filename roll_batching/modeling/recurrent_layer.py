"""Layers with a recurrent state per sequence over packs, which take the place of `self_attention`.

Their projections and convolutions are Megatron's linear layers and plain torch; subclasses compute the recurrence.
`PackedDeltaNet` is that of Qwen3-Next and Qwen3.5: Megatron-Core's own layer (0.16) needs CUDA and the package fla, and
refuses packs, context parallelism and generation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

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
from roll_batching.modeling.delta_kernels import rule_of
from roll_batching.modeling.recurrences import (
    Chunks,
    causal_convolution,
    delta_step,
    inputs_before,
    unit_length,
)
from roll_batching.packing.params import PackedParams

Weights = dict[str, torch.Tensor]
"""This rank's rows of the parameters `sharded`, by name."""


class RecurrentLayer(MegatronModule):
    """Projection, causal convolution, recurrence, output projection; every sequence of a pack starts anew.

    A sample with a shared prefix continues from the state and the last inputs of the convolution behind that prefix.
    Rows of `in_proj`, channels of the convolution and heads are grouped into units, which tensor parallelism divides.
    Context-parallel ranks divide the sequence, and exchange states, or divide the units: an all-to-all then brings all
    tokens of its units to each rank, and a second one brings the outputs back (`recurrent_packs`). Steps that read
    single tokens stay on the token's rank (`finish`).
    """

    sharded: ClassVar[tuple[str, ...]]
    """Parameters with rows of each unit."""
    replicated: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: TransformerConfig, layer_number: int, pg_collection: Any, *, units: int, width: int, out: int,
        column: Any = ColumnParallelLinear, row: Any = RowParallelLinear,
    ) -> None:  # fmt: skip
        """`units` of all ranks, each with `width` projected and `out` output channels; classes of projections."""
        super().__init__(config=config)
        self.layer_number, self.pg_collection = layer_number, pg_collection
        self.units = units // pg_collection.tp.size()
        """Units of this tensor-parallel rank."""
        self.width = width
        linear: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "skip_bias_add": True}
        linear["tp_group"] = pg_collection.tp
        self.in_proj: Any = column(
            config.hidden_size, units * width, init_method=config.init_method, gather_output=False, **linear
        )
        self.out_proj: Any = row(
            units * out, config.hidden_size, input_is_parallel=True, init_method=config.output_layer_init_method,
            **linear,
        )  # fmt: skip
        self.conv_weight: torch.Tensor
        self.conv_bias: torch.Tensor | None = None

    def parts(self, projected: torch.Tensor, ranks: int = 1) -> torch.Tensor:
        """Inputs of the recurrence [..., parts, channels], in the order of the `ranks` that compute them."""
        return projected.unflatten(-1, (-1, self.width))

    def split(self, parts: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Channels to convolve [..., channels], and controls of the recurrence (gates, rates, decays, time steps)."""
        raise NotImplementedError

    def weights(self, rank: int = 0, ranks: int = 1) -> Weights:
        """Rows of the parameters `sharded` for the parts of one context-parallel rank."""
        return {name: getattr(self, name).chunk(ranks)[rank] for name in self.sharded}

    def scan(
        self, mixed: torch.Tensor, controls: tuple[torch.Tensor, ...], weights: Weights, chunks: Chunks,
        real: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Outputs [tokens, channels] and the states after each sequence; tokens that are not `real` change no state."""
        raise NotImplementedError

    def step(
        self, mixed: torch.Tensor, controls: tuple[torch.Tensor, ...], weights: Weights, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [rows, channels] and states of one more token per row."""
        raise NotImplementedError

    def finish(self, out: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """The input of `out_proj` [tokens, channels], from outputs of the recurrence and the tokens' projection."""
        return out

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
            raise LayoutError("a recurrent layer takes packs only: pass packed_seq_params=packed_params(layout, ...)")
        output, _ = self.out_proj(out)
        return output, None

    def _pack(self, projected: torch.Tensor, params: PackedParams) -> torch.Tensor:
        """[tokens / cp, units * width] -> [tokens / cp, units * output channels]."""
        chunks: Chunks | None = params.chunks
        if chunks is None:
            raise LayoutError("packed_params(layout, ...) needs recurrent=recurrent_packs(config) here")
        group = None if params.local_tokens is None else params.context_group(self.pg_collection.cp)
        if chunks.exchange is not None:
            chunks = replace(chunks, exchange=replace(chunks.exchange, group=group))
        elif group is not None:
            return self._by_heads(projected, params, chunks, group)
        mixed, controls = self.split(self.parts(projected))
        mixed = causal_convolution(mixed, self.conv_weight, chunks, self.conv_bias)
        out, _ = self.scan(mixed, controls, self.weights(), chunks)
        return self.finish(out, projected)

    def _by_heads(self, projected: torch.Tensor, params: PackedParams, chunks: Chunks, group: Any) -> torch.Tensor:
        """As `_pack`, where the ranks of `group` divide the parts."""
        assert params.restore is not None
        parts, weights = self.parts(projected, group.size()), self.weights(group.rank(), group.size())
        exchanged = _gather_tokens_split_heads(parts.flatten(-2), group)[params.restore]
        mixed, controls = self.split(exchanged.unflatten(-1, (-1, parts.shape[-1])))
        mixed = causal_convolution(mixed, weights["conv_weight"], chunks, weights.get("conv_bias"))
        out, _ = self.scan(mixed, controls, weights, chunks)
        gathered = torch.empty_like(out).index_copy(0, params.restore, out)
        return self.finish(_split_tokens_gather_heads(gathered, group), projected)

    def _decode(self, projected: torch.Tensor, params: DecodeParams) -> torch.Tensor:
        """[positions, rows, units * width] -> [positions, rows, channels]; the state is in the cache."""
        weights, conv = self.weights(), self.conv_weight
        if params.visible is not None:  # one position per row, perhaps repeated
            mixed, controls = self.split(self.parts(projected[0]))
            inputs, state = params.cache.states(self.layer_number)
            window = torch.cat([inputs, mixed.unsqueeze(1)], 1)
            mixed = (window * conv[:, 0].t()).sum(1)
            mixed = F.silu(mixed if self.conv_bias is None else mixed + self.conv_bias)
            out, state = self.step(mixed, controls, weights, state)
            params.cache.set_states(self.layer_number, window[:, 1:], state)
            return self.finish(out, projected[0]).expand(len(projected), *out.shape)
        positions, rows = projected.shape[:2]
        assert params.lengths is not None
        flat = projected.transpose(0, 1).reshape(rows * positions, -1)
        mixed, controls = self.split(self.parts(flat))
        starts = torch.arange(rows + 1, device=projected.device) * positions
        chunks = Chunks.of(starts, rows * positions)
        inputs = inputs_before(mixed.view(rows, positions, -1), params.lengths, conv.shape[-1] - 1)
        mixed = causal_convolution(mixed, conv, chunks, self.conv_bias)
        # Padding behind a row leaves its state as it is.
        real = (chunks.positions < params.lengths.repeat_interleave(positions)).unsqueeze(-1)
        out, state = self.scan(mixed, controls, weights, chunks, real)
        params.cache.set_states(self.layer_number, inputs, state)
        return self.finish(out, flat).view(rows, positions, -1).transpose(0, 1)

    def _shard(self, *shape: int) -> torch.nn.Parameter:
        device = None if self.config.use_cpu_initialization else torch.cuda.current_device()
        parameter = torch.nn.Parameter(torch.empty(*shape, device=device, dtype=self.config.params_dtype))
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def _draw(self, shard: torch.Tensor, low: float, high: float) -> None:
        """Fills this rank's part of a parameter whose values do not depend on the number of ranks."""
        group = self.pg_collection.tp
        whole = shard.new_empty(len(shard) * group.size(), *shard.shape[1:]).uniform_(low, high)
        shard.copy_(whole.chunk(group.size())[group.rank()])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The parameters for Megatron's checkpoints; rows are grouped by unit, so that any size divides them."""
        parameters = {name: getattr(self, name) for name in (*self.sharded, *self.replicated)}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            parameters, prefix, dict.fromkeys(self.sharded, 0), sharded_offsets,
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


# ---- gated delta nets


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
        out, state = rule_of(mixed, chunks)(*inputs, chunks=chunks)
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
