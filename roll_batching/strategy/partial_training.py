"""Models of which a part is trained: LoRA adapters on a frozen model, or all modules but the frozen ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roll_batching.distributed import consensus, exchange
from roll_batching.errors import LayoutError
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.parameter_names import global_name, require_embedding_gradients
from roll_batching.settings.model import ModelArgs
from roll_batching.strategy.model_state import AdapterState, ModelState

_FREEZING = "freezing modules"
_EMBEDDING = "embedding.word_embeddings.weight"
_ENCODER = {"vision_model": "visual"}
"""ROLL's name of a vision encoder, and ours."""


def prepare_partial_training(state: ModelState, model: ModelArgs, seed: int, *, weights: bool) -> ModelState:
    """`state` with adapters or frozen modules, as `model` says; `weights`: whether it has its weights. Collective.

    Raises:
        RankError: on all ranks: adapters are not supported for a layer, or a prefix names no parameter.
    """
    if model.lora_target is None:
        freeze_modules(state, model.freeze_module_prefix or ())
        return state
    from roll_batching.modeling.adapters import attach_adapters  # few models have adapters

    with consensus(state.layout.host_group, "making adapters"):
        for chunk in state.chunks:
            attach_adapters(chunk, model, seed)
    adapters = AdapterState(
        targets=model.lora_target,
        rank=model.lora_rank,
        alpha=model.lora_scale * model.lora_rank,
        base=model.model_name_or_path,
        base_is_loaded=weights,
    )
    state = replace(state, adapters=adapters)
    if weights and model.adapter_name_or_path is not None:
        from roll_batching.strategy.peft_directory import load_adapters

        assert model.model_name_or_path is not None  # `AdapterArgs` checks it
        load_adapters(state, model.model_name_or_path, model.adapter_name_or_path)
    return state


def freeze_modules(state: ModelState, prefixes: Sequence[str]) -> None:
    """Freezes the parameters whose names in the whole model begin with one of `prefixes`. Collective."""
    matched: set[str] = set()
    trained = 0
    for gpt in map(gpt_of, state.chunks):
        for local, parameter in gpt.named_parameters():
            # Under a pipeline the last stage has a copy of tied embeddings as its head.
            is_tied_head = gpt.share_embeddings_and_output_weights and local == "output_layer.weight"
            name = _EMBEDDING if is_tied_head else global_name(gpt, local)
            if fitting := [prefix for prefix in prefixes if name.startswith(_ENCODER.get(prefix, prefix))]:
                matched.update(fitting)
                parameter.requires_grad_(False)
                if local == _EMBEDDING:
                    require_embedding_gradients(gpt)
            trained += parameter.requires_grad
    per_rank = exchange(state.layout.host_group, _FREEZING, lambda: (matched, trained))
    everywhere = {prefix for of_rank, _ in per_rank for prefix in of_rank}
    with consensus(state.layout.host_group, _FREEZING):
        if missing := [prefix for prefix in prefixes if prefix not in everywhere]:
            raise LayoutError(
                f"freeze_module_prefix: no parameter begins with {', '.join(map(repr, missing))}. Names begin with "
                "embedding, decoder.layers.N (N counts the layers of the whole model), decoder.final_layernorm, "
                "output_layer or, in models that take images, visual"
            )
        if not any(number for _, number in per_rank):
            raise LayoutError("freeze_module_prefix freezes every parameter, so that nothing is trained: name fewer")
