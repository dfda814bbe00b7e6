"""The value head of a critic: an output layer with one number per token in place of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel


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
