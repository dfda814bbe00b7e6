"""Models whose layers have one part each: a Mamba-2 mixer, attention without RoPE, an MLP or experts, as in Nemotron-H.

One Megatron layer per letter of the pattern, so that pipelines are divided by layers as for other models. Megatron's
own MambaModel (0.16) needs CUDA and TransformerEngine, and so do its experts with a latent narrower than the model
(Nemotron 3 Super).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from roll_batching.modeling.layer_modules import ReplicatedKVAttention
from roll_batching.modeling.layers import has_replicated_kv_heads, submodules_of
from roll_batching.modeling.recurrences import Chunks, state_space, state_space_step
from roll_batching.modeling.recurrent_layer import RecurrentLayer, Weights
from roll_batching.settings import ArchitectureConfig


@dataclass
class HybridTransformerConfig(TransformerConfig):
    """Megatron's config with the kinds of the layers and the sizes that it has no names for."""

    layer_kinds: str = ""
    """M, *, - or E for each layer of the whole model."""
    mamba_conv_kernel_dim: int = 4


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of ReLU. Megatron's own is compiled, anew for numbers of tokens of experts."""
    return F.relu(x).square()


def hybrid_options(architecture: ArchitectureConfig) -> dict[str, Any]:
    """Options of `HybridTransformerConfig` that other models do not have."""
    hybrid = architecture.hybrid
    assert hybrid is not None
    return {
        "is_hybrid_model": True,
        "layer_kinds": hybrid.pattern,
        "mamba_num_heads": hybrid.mamba_num_heads,
        "mamba_head_dim": hybrid.mamba_head_dim,
        "mamba_num_groups": hybrid.mamba_num_groups,
        "mamba_state_dim": hybrid.mamba_state_dim,
        "mamba_conv_kernel_dim": hybrid.mamba_conv_kernel_dim,
        "gated_linear_unit": False,
        "activation_func": squared_relu,
        "no_rope_freq": [1] * architecture.num_layers,
        "moe_layer_freq": [int(kind == "E") for kind in hybrid.pattern],  # a list also separates layers in checkpoints
        "moe_latent_size": hybrid.moe_latent_size,
    }


def hybrid_block_spec(config: Any, layers: range, norm: type[torch.nn.Module], core: Any) -> TransformerBlockSubmodules:
    """The spec of a pipeline chunk with these layers of the whole model; `core` is the core attention."""
    kinds = {kind: _layer_spec(config, kind, norm, core) for kind in set(config.layer_kinds)}
    return TransformerBlockSubmodules(layer_specs=[kinds[config.layer_kinds[n]] for n in layers], layer_norm=norm)


def _layer_spec(config: Any, kind: str, norm: type[torch.nn.Module], core: Any) -> ModuleSpec:
    """The spec of a layer of one `kind`; the part that it lacks, attention or feed-forward layer, is an identity."""
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if kind == "E" else None, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    if kind in "M*":
        parts.pre_mlp_layernorm = parts.mlp = IdentityOp
        parts.mlp_bda = IdentityFuncOp
    else:
        parts.input_layernorm = parts.self_attention = IdentityOp
        parts.self_attn_bda = IdentityFuncOp
    if kind == "M":
        parts.self_attention = ModuleSpec(module=PackedMamba)
    elif kind == "*":
        parts.self_attention.submodules.core_attention = core
        if has_replicated_kv_heads(config):
            parts.self_attention.module = ReplicatedKVAttention
    elif kind == "E" and config.moe_latent_size is not None:
        layer.module = LatentMixtureLayer
    return layer


# ---- experts in a latent


class _Projection(torch.nn.Linear):
    """A linear layer that every tensor-parallel rank holds whole; it is called like Megatron's layers."""

    def __init__(self, config: Any, inputs: int, outputs: int, init: Any) -> None:
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(inputs, outputs, bias=False, device=device, dtype=config.params_dtype)
        # Each rank projects its part of the tokens, so Megatron adds the weight's gradients over them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if config.perform_initialization:
            init(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """The output, and no bias."""
        return super().forward(x), None


class LatentMixture(MoELayer):
    """Megatron's mixture with a projection to the latent before the experts, and a projection back after them."""

    def __init__(self, config: Any, submodules: Any, pg_collection: Any) -> None:
        # With moe_latent_size in its config, Megatron's constructor wants TransformerEngine; its passes do not.
        without = copy.copy(config)
        without.moe_latent_size = None
        super().__init__(without, dataclasses.replace(submodules, experts=IdentityOp), pg_collection=pg_collection)
        self.config = config
        experts = submodules.experts  # a partial since Megatron-Core 0.19
        build = experts if isinstance(experts, functools.partial) else functools.partial(build_module, experts)
        self.experts = build(self.num_local_experts, config, pg_collection=pg_collection)
        latent, hidden = config.moe_latent_size, config.hidden_size
        self.fc1_latent_proj = _Projection(config, hidden, latent, config.init_method)
        self.fc2_latent_proj = _Projection(config, latent, hidden, config.output_layer_init_method)


class LatentMixtureLayer(TransformerLayer):
    """Megatron's layer with a `LatentMixture`, whose process groups it gives to Megatron's own classes only."""

    def __init__(self, config: Any, submodules: Any, *arguments: Any, **keywords: Any) -> None:
        super().__init__(config, dataclasses.replace(submodules, mlp=IdentityOp), *arguments, **keywords)
        self.mlp = LatentMixture(config, submodules_of(submodules.mlp), self.pg_collection)
        self.mlp.set_layer_number(self.layer_number)
        self.is_moe_layer, self.recompute_mlp = True, False


# ---- Mamba-2


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

    Megatron-Core's own mixer (0.16) needs CUDA and the packages mamba_ssm and causal_conv1d, and a cache of Megatron's
    inference for generation.

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
        # Channels of a part: B and C (state_dim each), and per head head_dim inputs and one time step.
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
        """Makes the inputs of the state space, in fp32 (fp64 for fp64). Tokens that are not `real` have no effect."""
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
        """Adds the inputs `x` times D to the outputs: [tokens, channels]."""
        return (out + weights["D"].to(out.dtype).view(*x.shape[1:3], 1) * x).flatten(1)

    def finish(self, out: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        """Outputs gated by SiLU, and RMSNorm over each group: [tokens, channels]."""
        gates = projected.unflatten(-1, (-1, self.width))[..., : self.inner]
        dtype = torch.promote_types(gates.dtype, torch.float32)
        gated = out.view(gates.shape).to(dtype) * F.silu(gates.to(dtype))
        normalised = F.rms_norm(gated, (self.inner,), None, self.config.layernorm_epsilon).to(gates.dtype)
        return self.norm_weight * normalised.flatten(1)
