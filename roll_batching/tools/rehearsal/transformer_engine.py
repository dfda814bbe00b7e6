"""Rehearsal of TransformerEngine's layers: local layers in their place, and the memory of FP8 copies of weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roll_batching.jobs.config import JobConfig
from roll_batching.modeling.head import gpt_of
from roll_batching.settings import MegatronConfig
from roll_batching.settings.fp8 import fp8_layers
from roll_batching.settings.pipeline_split import ChunkLayers
from roll_batching.tools.rehearsal.variants import with_value

ROLES = ("actor_train", "actor_infer", "reference", "critic", "teacher")
COPIES_PER_WEIGHT = {"tensorwise": 2.0, "blockwise": 2.0, "mxfp8": 2.0 + 2 / 32}
"""Bytes of the copies of a weight by recipe: one value by rows and one by columns, and mxfp8's scales.

TransformerEngine keeps them from the first micro-batch of a step to the last (`_fp8_workspaces`), and until the next
step. A tensorwise copy has no second part on Blackwell.
"""
_LOCAL: dict[str, Any] = {"transformer_impl": "local", "fp8": None, "fp8_recipe": None, "first_last_layers_bf16": False}


def uses_transformer_engine(config: JobConfig) -> bool:
    """Whether the policy has layers of TransformerEngine."""
    return config.actor_train.strategy_args.strategy_config.transformer_impl == "transformer_engine"


def with_local_layers(config: JobConfig) -> JobConfig:
    """Copy of `config` with Megatron's local layers, without FP8, in place of TransformerEngine's."""
    for role in ROLES:
        settings = getattr(config, role)
        layout = None if settings is None else settings.strategy_args.strategy_config
        if layout is None or layout.transformer_impl != "transformer_engine":
            continue
        attention = "auto" if layout.attention_backend == "transformer_engine" else layout.attention_backend
        local = layout.model_copy(update={**_LOCAL, "attention_backend": attention})
        config = with_value(config, f"{role}.strategy_args.strategy_config", local)
    return config


def transformer_engine_notes(config: JobConfig) -> tuple[str, ...]:
    """Assumptions of a rehearsal of TransformerEngine's layers, for its report."""
    if not uses_transformer_engine(config):
        return ()
    notes = ["TransformerEngine's layers are rehearsed as Megatron's local ones, whose kernels are counted"]
    if config.actor_train.strategy_args.strategy_config.fp8 is not None:
        notes.append(
            "FP8: activations are counted in bf16, which is more than TransformerEngine keeps of the inputs of linear "
            "layers; FLOPs are those of bf16, and no time is predicted from them"
        )
    return tuple(notes)


def layer_weights(chunks: Sequence[Any]) -> int:
    """Number of weights in the linear layers of all decoder layers, without routers."""
    return sum(
        parameter.numel()
        for chunk in chunks
        for name, parameter in gpt_of(chunk).decoder.layers.named_parameters()
        if parameter.dim() == 2 and ".router." not in name  # not convolutions
    )


def copies_in_fp8(megatron: MegatronConfig, split: ChunkLayers, stage: int, weights: float) -> float:
    """Bytes of the FP8 copies of a pipeline stage's `weights`, which are counted over all its layers."""
    if megatron.fp8_recipe is None:
        return 0.0
    held = list(_layers_of_stage(split, stage))
    count, num_layers = sum(map(len, held)), sum(map(sum, split))
    in_fp8 = sum(fp8_layers(megatron, layers, num_layers) for layers in held)
    return COPIES_PER_WEIGHT[megatron.fp8_recipe] * weights * in_fp8 / max(count, 1)


def _layers_of_stage(split: ChunkLayers, stage: int) -> Iterator[range]:
    first = 0
    for chunk in range(len(split[0])):
        for number, counts in enumerate(split):
            if number == stage:
                yield range(first, first + counts[chunk])
            first += counts[chunk]
