"""What travels with a pack through Megatron's layers: PackedSeqParams and what an attention core needs beyond it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from roll_batching.packing.attention_backend import AttentionBackend, attention_backend
from roll_batching.packing.layout import PackLayout

_BASE_FIELDS = frozenset(field.name for field in dataclasses.fields(PackedSeqParams))


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """PackedSeqParams of a pack plus positions, context-parallel rows and what its attention backend wants.

    A subclass, because Megatron's TransformerEngine wrapper forwards exactly the base class's fields,
    and because the object survives recompute, pipeline chunks and Float16Module as it is.
    """

    positions: torch.Tensor = None  # type: ignore[assignment]
    """[tokens / cp] int64, position of every local row inside its sequence."""
    rows: torch.Tensor | None = None
    """[tokens / cp] rows of the pack held here; None without context parallelism."""
    restore: torch.Tensor | None = None
    """[tokens] rows gathered over CP ranks back to pack order; None without context parallelism."""
    attention: Any = None
    """What the attention backend made of the pack (`AttentionBackend.metadata`)."""
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    """cos and sin tables of the local rows; the first layer of a forward pass fills them in."""

    def release(self) -> None:
        """Lets go of what layers filled in: they do so again when they need it."""
        self.rotary = None


def packed_params(
    layout: PackLayout, cp_rank: int, device: torch.device, *, attention: AttentionBackend | str | None = "auto"
) -> PackedParams:
    """PackedParams of `layout` for one context-parallel rank.

    `attention` is what the model's layers were built with: a backend, its name or dotted path, or "auto", which
    follows the device; None for a core that needs nothing beyond PackedSeqParams, such as TransformerEngine's.

    `cu_seqlens` holds whole slots and is one tensor object in all four fields: TransformerEngine
    takes its fast path for padding-free input by object identity, and slot padding at a causal
    sequence's end is harmless. `max_seqlen` is a Python int, so that nothing synchronises.
    """
    cu_seqlens = torch.from_numpy(layout.cu_seqlens).to(device=device, dtype=torch.int32)
    fields: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens,
        "cu_seqlens_kv_padded": cu_seqlens,
        "max_seqlen_q": layout.longest_segment,
        "max_seqlen_kv": layout.longest_segment,
        "pad_between_seqs": False,
    }
    backend = None if attention is None else attention_backend(attention, device.type)
    rows = layout.rows(cp_rank)
    sharded = layout.cp_size > 1
    return PackedParams(
        **{name: value for name, value in fields.items() if name in _BASE_FIELDS},
        positions=torch.from_numpy(layout.position_ids[rows]).to(device),
        rows=torch.from_numpy(rows).to(device) if sharded else None,
        restore=torch.from_numpy(layout.restore).to(device) if sharded else None,
        attention=None if backend is None else backend.metadata(layout, cp_rank, device),
    )
