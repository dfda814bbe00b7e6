"""Gemma's additions to Megatron's layers: norms behind attention and feed-forward layers, and scaled embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from roll_batching.errors import LayoutError

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
        layer.self_attn_bda = _after_norm(self.post_attention_layernorm, layer.self_attn_bda)
        layer.mlp_bda = _after_norm(self.post_mlp_layernorm, layer.mlp_bda)


def _after_norm(norm: torch.nn.Module, add: Callable[[bool, bool], Any]) -> Callable[[bool, bool], Any]:
    """Megatron's addition to the residual stream, of normalised outputs."""

    def choose(training: bool, fused: bool) -> Callable[[Residual, torch.Tensor, float], torch.Tensor]:
        added = add(training, fused)

        def normalised(output: Residual, residual: torch.Tensor, dropout: float) -> torch.Tensor:
            result: torch.Tensor = added((norm(output[0]), None), residual, dropout)
            return result

        return normalised

    return choose


class ScaledEmbedding(LanguageModelEmbedding):
    """Megatron's embedding, multiplied by the square root of its width; a tied head has the weight as it is."""

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
