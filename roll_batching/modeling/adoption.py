"""Models that others built, made ready for packs: Megatron's rotation by rows, TransformerEngine's attention by spans.

`adopt_model` changes the class of two kinds of modules in place, to subclasses of their own classes. No parameter, no
buffer and no key of a state dict changes. Both fall back to the original for other input, such as whole sequences.

- Rotary embeddings. Megatron counts the positions of a pack from `cu_seqlens` and the context-parallel group of the
  layout. `PackedParams.run` describes the pack as one run of rows instead, and the embedding returns the angles of
  these rows, in order, from the model's own table. Megatron's arithmetic is an identity then, in its fused kernel as
  well, for any position of a row and any ranks that share the pack. Scalings (YaRN, Llama 3) stay the model's.
- `TEDotProductAttention`. A pack whose samples share prefixes has fewer queries than keys: the keys are gathered, and
  the original forward gets both lengths, a causal mask aligned to the last key, and no context parallelism. Other packs
  keep TransformerEngine's own context parallelism.

The seams are the same in Megatron-Core 0.16 to 0.19.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams

from roll_batching.errors import LayoutError
from roll_batching.modeling.attention.core import recomputed_before_backward
from roll_batching.modeling.attention.varlen import VarlenSpans, varlen_spans
from roll_batching.modeling.head import gpt_of
from roll_batching.modeling.spec import replace_local_cores
from roll_batching.packing.attention_backend import AttentionBackend, Rotation
from roll_batching.packing.collectives import GatheredKeys
from roll_batching.packing.pack_layout import PackLayout, PackSlice
from roll_batching.packing.params import PackedParams

_ENGINE_CORE = "megatron.core.extensions.transformer_engine", "TEDotProductAttention"
_BOTTOM_RIGHT = SimpleNamespace(name="padding_causal_bottom_right")
"""Megatron's enum of masks lacks this one of TransformerEngine's; its wrapper passes on the name only."""


class AdoptedEngine(AttentionBackend):
    """TransformerEngine's attention in a model that the caller built."""

    name = "TransformerEngine's, of the caller's model"
    windows = True
    shares_prefixes = True
    context_size_per_pack = True

    def build_core(self, rotation: Rotation | None, **arguments: Any) -> torch.nn.Module:
        """Raises `LayoutError`: the caller builds the cores."""
        raise LayoutError(f"{self.name} builds no core: set attention_backend")

    def metadata(self, layout: PackLayout | PackSlice, cp_rank: int, device: torch.device) -> VarlenSpans:
        """The pack's spans as cumulative lengths."""
        return varlen_spans(layout, cp_rank, device)


ADOPTED_ENGINE = AdoptedEngine()


def adopt_model(chunks: Sequence[Any]) -> bool:
    """Let the rotary embeddings and TransformerEngine's cores of built chunks take packs by rows and spans.

    Megatron's local cores, which refuse packs, become those of the default attention backend (`replace_local_cores`).
    Returns whether the model rotates by rows now, as `PackedParams.run` needs: False for a model without rotary
    embeddings. A second call changes nothing. Raises `LayoutError` for an attention core that computes more than
    Megatron's local one or its wrapper of TransformerEngine.
    """
    replace_local_cores(chunks)
    rotates = False
    for gpt in map(gpt_of, chunks):
        for module in gpt.modules():
            if isinstance(module, RotaryEmbedding):
                module.__class__ = _rotary_by_rows(type(module))  # type: ignore[arg-type]
                rotates = True
        for attention in _attentions(gpt):
            core = attention.core_attention
            if is_engine_core(core):
                _require_original_forward(type(core))
                core.__class__ = _core_by_spans(type(core))  # type: ignore[arg-type]
                core.pack_backend, core.pack_rotates = ADOPTED_ENGINE, False
                core.layout_cp_group = attention.pg_collection.cp
    return rotates


def _attentions(gpt: Any) -> Iterator[Any]:
    """The self-attention modules of a GPTModel's decoder layers."""
    for layer in gpt.decoder.layers:
        attention = getattr(layer, "self_attention", None)
        if hasattr(attention, "core_attention"):
            yield attention


def is_engine_core(core: Any) -> bool:
    """Whether a core attention is Megatron's wrapper of TransformerEngine, or derives from it."""
    return any((cls.__module__, cls.__name__) == _ENGINE_CORE for cls in type(core).__mro__)


def _require_original_forward(core: Any) -> None:
    if core.forward.__module__ not in (_ENGINE_CORE[0], __name__):
        raise LayoutError(
            f"{core.__module__}.{core.__name__} has a forward of its own, which may count positions by the rows of a "
            "pack: build the model with Megatron's TEDotProductAttention, or pass rows_form=True"
        )


class _PackLength(int):
    """A sequence length that brings the params of its pack to the embedding, which Megatron asks next."""

    params: PackedParams
    table: int
    """Positions of the table that is asked for."""


@functools.cache
def _rotary_by_rows(base: Any) -> type:
    """The subclass of a rotary embedding that returns the angles of a pack's rows."""
    if getattr(base, "rotates_rows", False):
        return base

    class RowRotary(base):  # type: ignore[misc]  # Megatron has no types
        rotates_rows = True

        def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
            length = super().get_rotary_seq_len(*args, **kwargs)
            given = (kwargs.get("packed_seq_params"), *args)
            params = next((one for one in given if isinstance(one, PackedParams) and one.run is not None), None)
            if params is None:
                return int(length)
            length = _PackLength(length)
            assert params.run is not None
            length.params, length.table = params, params.run.table
            return length

        def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(max_seq_len, _PackLength):
                return super().forward(max_seq_len, *args, **kwargs)
            # As for a pack: the whole table, which Megatron divides over context-parallel ranks only later.
            return _rows_of(super().forward(max_seq_len.table, packed_seq=True), max_seq_len.params)

        def get_cached_cos_sin(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(max_seq_len, _PackLength):
                return super().get_cached_cos_sin(max_seq_len, *args, **kwargs)
            tables = super().get_cached_cos_sin(max_seq_len.table, *args, **kwargs)
            return _rows_of(tables, max_seq_len.params)

    RowRotary.__name__ = RowRotary.__qualname__ = base.__name__
    return RowRotary


def _rows_of(tables: Any, params: PackedParams) -> Any:
    """The rows' entries of a table [positions, ...]; of each in a tuple, or in a stack of tables of several layers."""
    if isinstance(tables, tuple):
        return tuple(_rows_of(table, params) for table in tables)
    if not isinstance(tables, torch.Tensor):
        return tables  # YaRN's factor of magnitudes
    run = params.run
    assert run is not None
    if tables.shape[0] != run.table:
        return torch.stack([_rows_of(table, params) for table in tables])
    rows = tables.index_select(0, params.positions)
    if run.cp_size == 1:
        return rows
    # Megatron takes the chunks `cp_rank` and `2 cp_size - 1 - cp_rank` of the run, and never the others.
    half = len(rows) // 2
    whole = rows.new_zeros(run.cp_size * len(rows), *rows.shape[1:])
    for chunk, part in ((run.cp_rank, rows[:half]), (2 * run.cp_size - 1 - run.cp_rank, rows[half:])):
        whole[chunk * half : (chunk + 1) * half] = part
    return whole


@functools.cache
def _core_by_spans(base: Any) -> type:
    """The subclass of a TransformerEngine core that attends to the spans of packs that share prefixes."""
    if getattr(base, "attends_to_spans", False):
        return base

    class SpanCore(base):  # type: ignore[misc]  # Megatron has no types
        attends_to_spans = True

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            attn_mask_type: Any = None,
            attention_bias: torch.Tensor | None = None,
            packed_seq_params: Any = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            attend, params = super().forward, packed_seq_params
            if not isinstance(params, PackedParams) or params.run is None:
                return attend(query, key, value, attention_mask, attn_mask_type, attention_bias, params, **kwargs)
            if not params.shares_prefixes:
                return attend(query, key, value, None, attn_mask_type, attention_bias, params.segments, **kwargs)
            spans = params.attention
            group = None if params.local_tokens is None else params.context_group(self.layout_cp_group)
            keys = GatheredKeys(key, value, group, keep=recomputed_before_backward(self.config))
            with keys.attention_scope():
                key, value = keys.take(spans.key_rows)
                return attend(query, key, value, None, _BOTTOM_RIGHT, None, _unequal_lengths(spans), **kwargs)

    SpanCore.__name__ = SpanCore.__qualname__ = base.__name__
    return SpanCore


def _unequal_lengths(spans: VarlenSpans) -> PackedSeqParams:
    """Lengths of queries and keys; a size of 1 without a group turns TransformerEngine's context parallelism off."""
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=spans.cu_queries,
        cu_seqlens_kv=spans.cu_keys,
        max_seqlen_q=spans.max_queries,
        max_seqlen_kv=spans.max_keys,
        local_cp_size=1,
    )
