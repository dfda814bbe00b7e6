"""The arguments of `from_parts`: checked by type, before a model is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from roll_batching.errors import LayoutError
from roll_batching.modeling.head import gpt_of
from roll_batching.planning.plain_values import kind_of
from roll_batching.settings import BatchingConfig
from roll_batching.strategy.settings import StepSettings


def shape_of(gpt: Any) -> str:
    """What all ranks' parts of one model have in common, in words."""
    config = gpt.config
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    sizes = [f"{name} {getattr(config, name)}" for name in (*names, "num_moe_experts", "params_dtype")]
    return ", ".join([*sizes, f"vocab_size {gpt.vocab_size}", f"positions {gpt.position_embedding_type}"])


def list_of_chunks(chunks: Any) -> list[Any]:
    """The chunks as a list; raises `LayoutError` for what is none, such as a lone model."""
    if not isinstance(chunks, list | tuple | torch.nn.ModuleList):
        raise LayoutError(
            "model_chunks must be a list of model chunks, one per virtual stage, and is "
            f"{kind_of(chunks)}: pass [model]"
        )
    return list(chunks)


def check_arguments(chunks: Sequence[Any], batching: Any, settings: Any, pg_collection: Any) -> None:
    """Raises `LayoutError` for arguments of another type than `adopt_parts` takes."""
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise LayoutError(
            "model_chunks must be a list of model chunks, one per virtual stage, and is "
            f"{[type(chunk).__name__ for chunk in chunks]}"
        )
    if len({id(chunk) for chunk in chunks}) < len(chunks):
        raise LayoutError("model_chunks holds the same chunk twice: pass each virtual stage's chunk once")
    strange = [type(gpt_of(chunk)).__name__ for chunk in chunks if not _is_gpt(gpt_of(chunk))]
    if strange:
        raise LayoutError(f"{', '.join(strange)} is not a GPTModel: pass model_chunks of GPTModel")
    if not isinstance(batching, BatchingConfig) or not isinstance(settings, StepSettings):
        raise LayoutError(
            f"batching is a {type(batching).__name__} and settings a {type(settings).__name__}: pass a BatchingConfig "
            "and a StepSettings"
        )
    batching.load_algorithms()
    if pg_collection is not None and not isinstance(pg_collection, ProcessGroupCollection):
        raise LayoutError(f"pg_collection is a {type(pg_collection).__name__}: pass a ProcessGroupCollection, or None")


def _is_gpt(gpt: Any) -> bool:
    return all(hasattr(gpt, name) for name in ("config", "decoder", "post_process", "position_embedding_type"))
