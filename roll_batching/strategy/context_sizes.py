"""Packs with context-parallel sizes of their own: which models take them, and the times by which plans choose."""

from __future__ import annotations

from roll_batching.errors import LayoutError
from roll_batching.modeling.cost import model_pack_times
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.layers import recurrent_layers
from roll_batching.planning.pack_times import PackTimes
from roll_batching.strategy.model_state import ModelState


def pack_times_of(state: ModelState) -> PackTimes | None:
    """Predicted times of packs of this model by size; None where all packs have the layout's size."""
    if state.settings.max_cp_size == 1:
        return None
    gpt = gpt_of(state.chunks[0])
    outputs = 1 if state.value_head else state.vocab_size or gpt.vocab_size
    return model_pack_times(gpt.config, outputs, state.layout, state.settings.cluster)


def require_context_sizes(state: ModelState) -> None:
    """Raises `LayoutError` where settings ask for a context-parallel size per pack and the model or layout has none."""
    largest, dp_size = state.settings.max_cp_size, state.layout.dp_size
    if largest & (largest - 1) or dp_size % largest:
        raise LayoutError(
            f"max_cp_size={largest} must be a power of two that divides the {dp_size} data-parallel ranks"
        )
    if state.layout.cp_size > 1:
        raise LayoutError(
            f"max_cp_size={largest} needs process groups and a model of context_parallel_size 1, which is "
            f"{state.layout.cp_size}: the ranks of a pack are data-parallel ranks"
        )
    if (obstacle := context_size_obstacle(state)) is not None:
        raise LayoutError(f"max_cp_size={largest} gives each pack its own context-parallel size, but {obstacle}")


def context_size_obstacle(state: ModelState) -> str | None:
    """Why packs of this model cannot have their own context-parallel sizes; None if they can."""
    if state.attention is None or not getattr(state.attention, "context_size_per_pack", False):
        name = "the model's own" if state.attention is None else state.attention.name
        return (
            f"the attention ({name}) exchanges keys over the layout's context-parallel group: choose dense, varlen or "
            "flash_attn, or one context_parallel_size"
        )
    embedding = gpt_of(state.chunks[0]).position_embedding_type
    if embedding not in ("none", "learned_absolute"):
        return (
            f"the model rotates positions itself ({embedding}), by the layout's context-parallel size: build it with "
            "packed_layer_spec(config, RotarySettings(...)) and position_embedding_type='none'"
        )
    if (layers := recurrent_layers(gpt_of(state.chunks[0]).config)) is not None:
        return f"{layers} divide their heads by the layout's size: set one context_parallel_size"
    if state.vision is not None:
        return "the model has a vision encoder, which is tested with one size: set one context_parallel_size"
    if state.settings.rows_form:
        return "rows_form passes rectangles without a context-parallel group: leave it out"
    return None
