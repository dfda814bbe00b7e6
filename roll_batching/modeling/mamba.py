"""Mamba-2 layers over packs, as in Nemotron-H.

Megatron-Core's own mixer (0.16) needs CUDA and the packages mamba_ssm and causal_conv1d, and a cache of Megatron's
inference for generation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from roll_batching.modeling.recurrences import Chunks, state_space, state_space_step
from roll_batching.modeling.recurrent_layer import RecurrentLayer, Weights

_TIME_STEPS = (0.001, 0.1)
"""Range of the initial time steps (Dao, Gu 2024)."""


class _Inputs(NamedTuple):
    """Inputs of the state space, scaled and unscaled by the time steps [tokens, parts, heads of a part, channels]."""

    scaled: torch.Tensor
    decay: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    plain: torch.Tensor


class PackedMamba(RecurrentLayer):
    """A Mamba-2 mixer whose state and convolution start anew in each sequence; takes the place of `self_attention`.

    Its units are groups of heads that share B and C: rows of `in_proj` are gates and inputs of the heads, B, C and time
    steps. More context-parallel ranks than groups divide the heads of a group, and each gets its B and C. The gated
    norm is over the channels of a whole group, and so behind the exchange.
    """

    sharded = ("conv_weight", "conv_bias", "A_log", "D", "dt_bias", "norm_weight")

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **unused: Any) -> None:
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.heads = config.mamba_num_heads // config.mamba_num_groups
        """Heads of a group."""
        self.inner = self.heads * self.head_dim
        self.mixed = self.inner + 2 * self.state_dim
        """Convolved channels of a group."""
        super().__init__(
            config, layer_number, pg_collection, units=config.mamba_num_groups,
            width=self.inner + self.mixed + self.heads, out=self.inner,
        )  # fmt: skip
        self.conv_weight = self._shard(self.units * self.mixed, 1, config.mamba_conv_kernel_dim)
        self.conv_bias: torch.nn.Parameter = self._shard(self.units * self.mixed)
        self.A_log, self.D, self.dt_bias = (self._shard(self.units * self.heads) for _ in range(3))
        self.norm_weight = self._shard(self.units * self.inner)
        if config.perform_initialization:
            with torch.no_grad():
                bound = config.mamba_conv_kernel_dim**-0.5
                self._draw(self.conv_weight, -bound, bound)
                self._draw(self.conv_bias, -bound, bound)
                self._draw(self.A_log, 1, 16)
                self.A_log.log_()
                self._draw(self.dt_bias, *map(math.log, _TIME_STEPS))
                step = self.dt_bias.exp()
                self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
                self.D.fill_(1.0)
                self.norm_weight.fill_(1.0)

    def _repeats(self, ranks: int) -> int:
        """Context-parallel ranks that share a group."""
        return max(1, ranks // self.units)

    def parts(self, projected: torch.Tensor, ranks: int = 1) -> torch.Tensor:
        """Inputs of heads, B, C and time steps [..., parts, channels]; a part is a group, or some heads of one."""
        groups, count = projected.unflatten(-1, (-1, self.width))[..., self.inner :], self._repeats(ranks)
        if count == 1:
            return groups
        x, shared, steps = groups.split([self.inner, 2 * self.state_dim, self.heads], -1)
        x, steps = (values.unflatten(-1, (count, -1)) for values in (x, steps))
        shared = shared.unsqueeze(-2).expand(*x.shape[:-1], -1)
        return torch.cat([x, shared, steps], -1).flatten(-3, -2)

    def split(self, parts: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Convolved channels; time steps [tokens, parts, heads of a part]."""
        heads = (parts.shape[-1] - 2 * self.state_dim) // (self.head_dim + 1)
        mixed, steps = parts.split([parts.shape[-1] - heads, heads], -1)
        return mixed.flatten(-2), (steps,)

    def weights(self, rank: int = 0, ranks: int = 1) -> Weights:
        """Rows of the parameters for one context-parallel rank."""
        if (count := self._repeats(ranks)) == 1:
            return super().weights(rank, ranks)
        group, part = divmod(rank, count)
        parameters = {name: getattr(self, name).chunk(self.units)[group] for name in self.sharded}
        for name, rows in parameters.items():
            x, shared = rows.split([self.inner, 2 * self.state_dim]) if name.startswith("conv") else (rows, rows[:0])
            parameters[name] = torch.cat([x.chunk(count)[part], shared])
        return parameters

    def scan(
        self, mixed: torch.Tensor, controls: tuple[torch.Tensor, ...], weights: Weights, chunks: Chunks,
        real: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Outputs of the chunked state space and its states."""
        (steps,) = controls
        inputs = self._inputs(mixed, steps, weights, real)
        out, state = state_space(*inputs[:4], chunks=chunks)
        return self._output(out, inputs.plain, weights).to(mixed.dtype), state

    def step(
        self, mixed: torch.Tensor, controls: tuple[torch.Tensor, ...], weights: Weights, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states of one token."""
        (steps,) = controls
        inputs = self._inputs(mixed, steps, weights)
        out, state = state_space_step(*inputs[:4], state=state)
        return self._output(out, inputs.plain, weights).to(mixed.dtype), state

    def _inputs(
        self, mixed: torch.Tensor, steps: torch.Tensor, weights: Weights, real: torch.Tensor | None = None
    ) -> _Inputs:
        """In fp32 or fp64."""
        dtype = torch.promote_types(mixed.dtype, torch.float32)
        heads = steps.shape[-1]
        per_part = mixed.to(dtype).unflatten(-1, (-1, heads * self.head_dim + 2 * self.state_dim))
        x, B, C = per_part.split([heads * self.head_dim, self.state_dim, self.state_dim], -1)
        x = x.unflatten(-1, (heads, self.head_dim))
        A_log, dt_bias = (weights[name].to(dtype).view(-1, heads) for name in ("A_log", "dt_bias"))
        steps = F.softplus(steps.to(dtype) + dt_bias)
        if real is not None:
            steps = steps * real.unsqueeze(-1)
        return _Inputs(x * steps.unsqueeze(-1), -A_log.exp() * steps, B, C, x)

    def _output(self, out: torch.Tensor, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The sum with inputs times D: [tokens, channels]."""
        return (out + weights["D"].to(out.dtype).view(*x.shape[1:3], 1) * x).flatten(1)

    def finish(self, out: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Outputs gated by SiLU, and RMSNorm over each group: [tokens, channels]."""
        gates = projected.unflatten(-1, (-1, self.width))[..., : self.inner]
        dtype = torch.promote_types(gates.dtype, torch.float32)
        gated = out.view(gates.shape).to(dtype) * F.silu(gates.to(dtype))
        normalised = F.rms_norm(gated, (self.inner,), None, self.config.layernorm_epsilon).to(gates.dtype)
        return self.norm_weight * normalised.flatten(1)
