"""Multi-token prediction: models with heads for the tokens after the next one (DeepSeek-V3, arXiv 2412.19437).

Head k joins the hidden state of token i with the embedding of token i + k, passes both through a layer, and predicts
token i + k + 1 with the model's output layer. Parameters, their names and their place in a pipeline are Megatron's
(`MultiTokenPredictionBlock`). The passes are not: Megatron (0.16 to 0.19) shifts tokens inside its layers, in a loop
over sequences with transfers between context-parallel ranks, and scales the losses by the number of micro-batches.
Here the shifted tokens come with the pack (`packing.extra_inputs`), and the losses from `losses.mtp`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from roll_batching.modeling.rotary import RotarySettings
from roll_batching.modeling.spec import packed_layer_spec
from roll_batching.packing.attention_backend import AttentionBackend


class PredictionLayer(MegatronModule):
    """One head: two norms, their joint projection, a transformer layer and the norm before the output layer.

    Args:
        config: the model's TransformerConfig.
        layer_number: number of the head, from 1 on.
        vp_stage: virtual stage of the chunk.
        groups: the model's ProcessGroupCollection.
        layer: spec of the transformer layer.
        norm: class of the norms.
        _: arguments of other versions of Megatron's block.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        vp_stage: int | None = None,
        *,
        groups: Any,
        layer: Any,
        norm: type[torch.nn.Module],
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number, self._tp_group = layer_number, groups.tp
        sizes = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm, self.hnorm = norm(**sizes), norm(**sizes)
        self.eh_proj = tensor_parallel.ColumnParallelLinear(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=groups.tp,
        )
        # A TransformerLayer adds the layers of the stages before its own to its number.
        before = get_transformer_layer_offset(config, vp_stage, groups.pp.rank())
        self.transformer_layer = build_module(
            layer,
            config=config,
            layer_number=config.num_layers + layer_number - before,
            vp_stage=vp_stage,
            pg_collection=groups,
        )
        self.final_layernorm = norm(**sizes)

    @property
    def mtp_model_layer(self) -> Any:
        """The transformer layer, by its name in Megatron-Core 0.19."""
        return self.transformer_layer

    def forward(
        self, hidden: torch.Tensor, embedded: torch.Tensor, params: Any, padding_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states of the head [s, 1, h]; with sequence parallelism s is this rank's shard on both sides."""
        is_sharded = self.config.sequence_parallel
        generator: Any = tensor_parallel.get_cuda_rng_tracker().fork() if is_sharded else contextlib.nullcontext()
        masked = {} if padding_mask is None else {"padding_mask": padding_mask}
        with generator:
            joined, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
            joined = tensor_parallel.gather_from_tensor_model_parallel_region(joined, group=self._tp_group)
            if is_sharded:
                joined = tensor_parallel.scatter_to_sequence_parallel_region(joined, group=self._tp_group)
            output, _ = self.transformer_layer(
                hidden_states=joined, attention_mask=None, packed_seq_params=params, **masked
            )
        result: torch.Tensor = self.final_layernorm(output)
        return result


class MultiTokenModel(GPTModel):
    """The last chunk of a model with heads.

    In passes with gradient its output is longer: behind the hidden states of the model come those of each head.

    Args:
        detach_heads: no gradient of the heads' losses reaches the rest of the model.
        arguments: those of GPTModel.
    """

    predicts_ahead = True
    """Marks this class: models with Megatron's own heads lack the attribute."""

    def __init__(self, *arguments: Any, detach_heads: bool, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.is_frozen = not self.config.mtp_loss_scaling_factor
        """Whether the heads are loaded and measured, and not trained."""
        self.detach_heads = detach_heads or self.is_frozen
        self._padding_mask: torch.Tensor | None = None
        if self.is_frozen:
            self.mtp.requires_grad_(False)

    def _preprocess(self, *arguments: Any, **keywords: Any) -> Any:
        prepared = super()._preprocess(*arguments, **keywords)
        self._padding_mask = prepared[5]  # cut to this rank's shard of the tokens; `_postprocess` does not get it
        return prepared

    def _postprocess(self, hidden_states: torch.Tensor, *, packed_seq_params: Any = None, **_: Any) -> torch.Tensor:
        """The model's output [1, s, ...], in passes with gradient [1, (1 + heads) s, ...]."""
        if self.training and torch.is_grad_enabled():
            hidden_states = torch.cat([hidden_states, *self._predict(hidden_states, packed_seq_params)])
        tied = self.share_embeddings_and_output_weights
        output, _ = self.output_layer(hidden_states, weight=self.shared_embedding_or_output_weight() if tied else None)
        transposed: torch.Tensor = output.transpose(0, 1).contiguous()
        return transposed

    def _predict(self, hidden: torch.Tensor, params: Any) -> list[torch.Tensor]:
        """Hidden states of each head [s, 1, h]."""
        mask, outputs = self._padding_mask, []
        if self.detach_heads:
            # A recomputed layer without an input that requires a gradient gives its weights none.
            hidden = hidden.detach().requires_grad_(not self.is_frozen)
        for tokens, layer in zip(params.mtp_inputs.tokens, self.mtp.layers, strict=False):
            embedded = self.embedding(input_ids=tokens[None], position_ids=None)
            used = embedded.detach() if self.detach_heads else embedded
            guard: Any = torch.no_grad() if self.is_frozen else contextlib.nullcontext()
            with guard:
                if self.config.recompute_granularity == "full" and not self.is_frozen:
                    hidden = tensor_parallel.checkpoint(
                        lambda states, tokens, layer=layer: layer(states, tokens, params, mask), False, hidden, used
                    )
                else:
                    hidden = layer(hidden, used, params, mask)
            # The last stage's copy of the embedding serves the heads alone. Without a gradient, if only of zeros,
            # overlapped gradient reduction would wait for it.
            outputs.append(hidden if used is embedded or self.pre_process else hidden + 0 * embedded)
        return outputs


def prediction_options(
    config: Any, groups: Any, rotary: RotarySettings | None, attention: AttentionBackend, *, detach_heads: bool
) -> dict[str, Any]:
    """Arguments of `MultiTokenModel` that GPTModel does not have, for the heads of a TransformerConfig.

    The layer of a head has attention and, in a model with experts, a mixture.
    """
    experts = config.num_moe_experts is not None
    layer = packed_layer_spec(config, rotary, experts=experts, attention=attention)
    head = ModuleSpec(
        module=PredictionLayer,
        params={"groups": groups, "layer": layer, "norm": layer.submodules.input_layernorm},
    )
    block = MultiTokenPredictionBlockSubmodules(layer_specs=[head] * config.mtp_num_layers)
    return {
        "mtp_block_spec": ModuleSpec(module=MultiTokenPredictionBlock, submodules=block),
        "detach_heads": detach_heads,
    }
