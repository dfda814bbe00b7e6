"""Mixtures of experts whose experts compute in a latent narrower than the model, as in Nemotron 3 Super.

Megatron-Core (0.16) has them with TransformerEngine's linear layers only.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer

from roll_batching.modeling.layers import submodules_of


class _Projection(torch.nn.Linear):
    """A linear layer that all tensor-parallel ranks hold whole, called as Megatron's."""

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
    """Megatron's mixture with a projection to the latent before tokens go to experts, and one back behind them."""

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
