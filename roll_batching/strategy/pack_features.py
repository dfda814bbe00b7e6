"""What packs of a model may do: share prefixes, be cut into slices, and have their own context-parallel size."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist

from roll_batching.errors import LayoutError
from roll_batching.losses.runner import has_router_losses
from roll_batching.modeling.cost import model_pack_times
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.layers import recurrent_layers
from roll_batching.planning import BatchingSpec, PlanConstraints
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.planner import SMALLEST_SAVING
from roll_batching.samples import LengthTable, SampleBatch, find_shared_prefixes, gather_lengths
from roll_batching.settings.batching import CP_SIZE_OBSTACLES, PREFIX_OBSTACLES, SLICE_OBSTACLES
from roll_batching.strategy.compatibility import random_settings
from roll_batching.strategy.model_state import ModelState

OWN_RECURRENT_LAYERS = (
    "the caller built the model, whose recurrent layers start every segment from a state of zeros: build it from a "
    "directory or an architecture"
)
_told = threading.Event()
"""Set once the saving has been logged in this process."""


def require_pack_features(state: ModelState) -> None:
    """Raises `LayoutError` where settings ask for what packs of this model may not do."""
    sharing_of(state)
    slices_of(state)
    if state.settings.max_cp_size > 1:
        require_context_sizes(state)


def constraints_of(state: ModelState, batching: BatchingSpec) -> PlanConstraints:
    """Constraints of plans for this model."""
    return replace(state.settings, pipeline_slices=slices_of(state)).constraints(state.layout, batching)


def sharing_obstacle(state: ModelState) -> str | None:
    """Why packs of this model cannot share prefixes, whoever plans them; None if they can."""
    if not getattr(state.attention, "shares_prefixes", False):
        name = "the model's own" if state.attention is None else state.attention.name
        return f"the attention ({name}) attends to one run of keys per sample: choose dense, varlen or flash_attn"
    if state.adoption_fault is not None:
        return state.adoption_fault
    gpt = gpt_of(state.chunks[0])
    if gpt.position_embedding_type not in ("none", "learned_absolute") and not state.rotates_rows:
        return (
            f"the model embeds positions itself ({gpt.position_embedding_type}), counted from the start of every "
            "segment: build it with packed_layer_spec(config, RotarySettings(...)) and position_embedding_type='none'"
        )
    if settings := random_settings(gpt.config):
        return f"samples with a common prefix would share its random numbers ({', '.join(settings)}): set these to 0"
    if state.heads:
        return PREFIX_OBSTACLES["mtp_num_layers"]
    if state.architecture is None and recurrent_layers(gpt.config) is not None:
        return OWN_RECURRENT_LAYERS
    return None


def sharing_of(state: ModelState) -> bool | Literal["auto"]:
    """`share_prefixes` of plans for this model, False where it cannot. Raises `LayoutError` if it must and cannot."""
    choice = state.batching.share_prefixes
    if choice is False:
        return False
    obstacle, modes = sharing_obstacle(state), {state.batching.train.mode, state.batching.infer.mode}
    if "packed" not in modes:
        obstacle = f"passes are {' and '.join(sorted(modes))}, and packs alone share prefixes: set use_sequence_packing"
    if choice is True and obstacle is not None:
        raise LayoutError(f"share_prefixes is true, but {obstacle}; or set share_prefixes to auto or false")
    return choice if obstacle is None else False


def gather_table(state: ModelState, local_batch: SampleBatch, group: Any = None) -> LengthTable:
    """Ids, lengths and, where plans of this model share them, common prefixes of all ranks' samples. Collective.

    `group`: the data-parallel ranks among which the samples lie; None: those of the model.
    """
    group = state.layout.dp_group if group is None else group
    table = gather_lengths(local_batch, group)
    if not sharing_of(state):
        return table
    table = find_shared_prefixes(local_batch, table, group)
    assert table.prefixes is not None
    saving = int(table.prefixes.shared.sum()) / max(int(table.lengths.sum()), 1)
    if saving >= SMALLEST_SAVING and dist.get_rank() == 0 and not _told.is_set():
        _told.set()
        from roll_batching.modeling.kernels import tell  # for the notice alone

        tell(f"common prefixes of samples are computed once: up to {saving:.0%} fewer tokens (share_prefixes)")
    return table


# ---- context-parallel sizes


def pack_times_of(state: ModelState) -> PackTimes | None:
    """Predicted times of packs of this model by size, or None if all packs have the layout's size."""
    return None if state.settings.max_cp_size == 1 else model_times(state)


def model_times(state: ModelState) -> PackTimes:
    """Predicted times of packs of this model."""
    gpt = gpt_of(state.chunks[0])
    outputs = 1 if state.value_head else state.vocab_size or gpt.vocab_size
    divide = state.settings.recurrent_context_parallel
    return model_pack_times(gpt.config, outputs, state.layout, state.settings.cluster, divide)


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


def slices_of(state: ModelState) -> int | Literal["auto"]:
    """`pipeline_slices` of plans for this model; "auto" is 1 where it cannot. Raises `LayoutError` if it must."""
    choice, passes = state.settings.pipeline_slices, (state.batching.train, state.batching.infer)
    cuts_long = any(each.oversize == "slice" for each in passes)
    if choice == 1 and not cuts_long:
        return 1
    obstacle, modes = slice_obstacle(state), {each.mode for each in passes}
    if "packed" not in modes:
        obstacle = f"passes are {' and '.join(sorted(modes))}, and packs alone are cut: set use_sequence_packing"
    if cuts_long and obstacle is None and state.training is not None:
        obstacle = _long_pack_obstacle(gpt_of(state.chunks[0]).config)
    must = "oversize is slice" if cuts_long else f"pipeline_slices={choice}" if choice != "auto" else None
    if must and obstacle is not None:
        raise LayoutError(f"{must}, but {obstacle}; or leave {'oversize' if cuts_long else 'pipeline_slices'} out")
    return choice if obstacle is None else 1


def _long_pack_obstacle(config: Any) -> str | None:
    """Why slices alone do not make room for a pack above the cap; None if they do."""
    if config.recompute_granularity == "full" and config.recompute_method == "uniform":
        return None
    return (
        "a pack is forward as a whole before its first backward pass, and without full recompute all its activations "
        "are kept until then: set recompute_granularity: full and recompute_method: uniform"
    )


def slice_obstacle(state: ModelState) -> str | None:
    """Why packs of this model cannot be cut into slices; None if they can."""
    config = gpt_of(state.chunks[0]).config
    if not getattr(state.attention, "slices", False) or state.rotates_rows:
        name = "the model's own" if state.attention is None else state.attention.name
        return f"the attention ({name}) keeps no keys for later slices: choose dense, varlen or flash_attn"
    if gpt_of(state.chunks[0]).position_embedding_type not in ("none", "learned_absolute"):
        return (
            "the model rotates positions itself, counted from the start of every input: choose a backend that rotates"
        )
    features = {
        "vision": state.vision is not None,
        "mtp_num_layers": state.heads > 0,
        "router losses": has_router_losses(config),
    }
    present = [name for name, is_on in features.items() if is_on] + list(filter(None, [recurrent_layers(config)]))
    if present:
        return f"the model has {present[0]}, {SLICE_OBSTACLES[present[0]]}: set pipeline_slices: 1"
    refused = {
        "virtual_pipeline_model_parallel_size above 1": state.layout.interleaved,
        "a context-parallel size per pack": state.settings.max_cp_size > 1,
        "rows_form": state.settings.rows_form,
        "fp8": bool(config.fp8),
        "defer_embedding_wgrad_compute": config.defer_embedding_wgrad_compute,
        "num_microbatches_with_partial_activation_checkpoints": (
            config.num_microbatches_with_partial_activation_checkpoints is not None
        ),
    }
    for name, is_on in refused.items():
        if is_on:
            return f"slices are not supported with {name} for now: leave one of them out"
    return None


def context_size_obstacle(state: ModelState) -> str | None:
    """Why packs of this model cannot have their own context-parallel sizes; None if they can."""
    if state.attention is None or not getattr(state.attention, "context_size_per_pack", False):
        name = "the model's own" if state.attention is None else state.attention.name
        return (
            f"the attention ({name}) exchanges keys over the layout's context-parallel group: choose dense, varlen or "
            "flash_attn, or one context_parallel_size"
        )
    if state.adoption_fault is not None:
        return state.adoption_fault
    embedding = gpt_of(state.chunks[0]).position_embedding_type
    if embedding not in ("none", "learned_absolute") and not state.rotates_rows:
        return (
            f"the model rotates positions itself ({embedding}), by the layout's context-parallel size: build it with "
            "packed_layer_spec(config, RotarySettings(...)) and position_embedding_type='none'"
        )
    if state.vision is not None:
        return f"{CP_SIZE_OBSTACLES['vision']}: set one context_parallel_size"
    if recurrent_layers(gpt_of(state.chunks[0]).config) is not None:
        if state.architecture is None:
            return OWN_RECURRENT_LAYERS
        from roll_batching.settings.contradictions import recurrent_misfit  # few models need it

        divide, sizes = state.settings.recurrent_context_parallel, (state.layout.tp_size, state.settings.max_cp_size)
        misfit = recurrent_misfit(state.architecture, tp_size=sizes[0], cp_size=sizes[1], divide=divide)
        if misfit is not None:
            return misfit[1]
    if state.settings.rows_form:
        return "rows_form passes rectangles without a context-parallel group: leave it out"
    return None
