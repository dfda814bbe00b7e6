"""`PackedParams`: Megatron's PackedSeqParams with further data for attention cores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from roll_batching.errors import LayoutError
from roll_batching.packing.attention_backend import AttentionBackend, attention_backend, attention_name
from roll_batching.packing.pack_layout import PackLayout, PackSlice, SlicePlace

_BASE_FIELDS = frozenset(field.name for field in dataclasses.fields(PackedSeqParams))


@dataclass(frozen=True)
class RowRun:
    """One run of rows, as which a model that rotates by Megatron's code sees a pack (`modeling.adoption`)."""

    table: int
    """Positions of the rotary table: a power of two above all positions, so that few tables are made."""
    cp_size: int
    """Context-parallel size of the layout, by which Megatron's rotation divides the run."""
    cp_rank: int


class RecurrentPacks(Protocol):
    """What the recurrent layers of a model need to know of a pack (`modeling.recurrent_packs`)."""

    def chunks(self, layout: PackLayout, cp_rank: int, device: torch.device) -> Any:
        """The chunks of the pack, which become `PackedParams.chunks`."""


@dataclass
class PackedParams(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """PackedSeqParams of a pack, with positions, context-parallel indices and metadata of the attention backend.

    A subclass, because Megatron's TransformerEngine wrapper passes on exactly the fields of the base class, and because
    recompute, pipeline chunks and Float16Module pass the object on unchanged.
    """

    positions: torch.Tensor = None  # type: ignore[assignment]
    """[tokens / cp] int64, position of each local token in its sequence."""
    local_tokens: torch.Tensor | None = None
    """[tokens / cp] int64, indices in the pack of the tokens on this rank; None without context parallelism."""
    restore: torch.Tensor | None = None
    """[tokens] int64, permutation from gathered to pack order; None without context parallelism."""
    shares_prefixes: bool = False
    """Whether keys of several samples are the same tokens of the pack."""
    attention: Any = None
    """Result of `AttentionBackend.metadata` for the pack."""
    cp_rank: int = 0
    """Context-parallel rank whose tokens these are. The group is `cp_group` where the pack has its own context-parallel
    size, else that of the layout."""
    rotary: dict[Any, tuple[torch.Tensor, torch.Tensor]] | None = None
    """cos and sin of the local tokens by settings of RoPE, added by the first layer of a forward pass with them."""
    axes: torch.Tensor | None = None
    """[3, tokens / cp] int64: positions for RoPE on the axes of images; None: `positions` on all axes."""
    images: Any = None
    """`packing.extra_inputs.ImageInputs` of this rank on the first stage of a model with a vision encoder."""
    deepstack: Any = None
    """`modeling.vision.DeepStack` of the images, set by the model when it encodes them."""
    mtp_inputs: Any = None
    """`packing.extra_inputs.MTPInputs` of the pack on the last stage of a model with heads; None elsewhere."""
    chunks: Any = None
    """For recurrent layers, the chunks of the runs that this rank computes (`modeling.recurrences.Chunks`)."""
    run: RowRun | None = None
    """The run that `cu_seqlens` describe in place of the pack's segments, in an adopted model; None: segments."""
    segments: PackedSeqParams | None = None
    """With `run`, the params of the segments, for cores that read these."""
    place: SlicePlace | None = None
    """Of a slice, where it lies in its pack; None: a whole pack."""
    kept: Any = None
    """Of a slice, the keys of its pack (`modeling.attention.kept.KeptKeys`), which the schedule sets."""
    repeats: torch.Tensor | None = None
    """[tokens / cp of a host's pack] int64: the row in pack order for each of its rows (`integrations.prefixes`)."""

    def set_context_group(self, group: Any) -> None:
        """Set the ranks that share the pack, where it has its own context-parallel size; None: this rank alone."""
        size = 1 if group is None else group.size()
        self.cp_group = group
        if self.segments is None:
            self.local_cp_size = size
        else:  # Megatron's multi-latent attention refuses a size per pack in its own params
            self.segments.cp_group, self.segments.local_cp_size = group, size

    def context_group(self, of_layout: Any) -> Any:
        """The ranks that share the pack, given the context-parallel group of the layout."""
        return of_layout if self.cp_group is None else self.cp_group

    def release(self) -> None:
        """Free tensors that layers have set; they are computed again when needed."""
        self.rotary = self.deepstack = None


def packed_params(
    pack_layout: PackLayout,
    cp_rank: int,
    device: torch.device,
    *,
    attention: AttentionBackend | str | None = "auto",
    rotation_cp: tuple[int, int] | None = None,
    recurrent: RecurrentPacks | None = None,
) -> PackedParams:
    """PackedParams of a pack for one context-parallel rank.

    `attention` is the backend of the model's layers: a backend, its name or dotted path, or "auto", which depends on
    the device; None for a core that needs only PackedSeqParams, such as TransformerEngine's.

    `rotation_cp` is (size, rank) of the layout's context-parallel group for a model adopted by `adopt_model`, whose
    params describe one run of rows. None for other models.

    `recurrent`: of a model with recurrent layers on this stage (`modeling.recurrent_packs.recurrent_packs`).

    `cu_seqlens` counts whole slots and is one tensor object in all four fields: TransformerEngine recognises input
    without padding by object identity, and slot padding at the end of a causal sequence changes no other token.
    A pack that is cut into slices has metadata of the backend in those of its slices (`slice_params`).
    `max_seqlen` is a Python int, so that no layer waits for the device.
    """
    cu_seqlens = torch.from_numpy(pack_layout.cu_seqlens).to(device=device, dtype=torch.int32)
    fields = _segment_fields(cu_seqlens, pack_layout.longest_segment)
    backend = None if attention is None else attention_backend(attention, device.type)
    if pack_layout.prefix_lengths is not None and not getattr(backend, "shares_prefixes", False):
        raise LayoutError(
            f"{attention_name(backend)} attends to one run of keys per sample, and samples of this pack share "
            "prefixes: choose the backend dense, varlen or flash_attn, or plan without prefixes (share_prefixes: false)"
        )
    local_tokens = pack_layout.local_tokens(cp_rank)
    sharded = pack_layout.cp_size > 1
    run = segments = None
    if rotation_cp is not None:
        run = RowRun(1 << int(pack_layout.longest_sequence).bit_length(), *rotation_cp)
        rows = len(local_tokens) * run.cp_size
        segments = PackedSeqParams(**fields)
        fields = _segment_fields(torch.tensor([0, rows], dtype=torch.int32, device=device), rows)
    metadata = None
    if backend is not None and pack_layout.cuts is None:
        metadata = backend.metadata(pack_layout, cp_rank, device)
    return PackedParams(
        **fields,
        positions=torch.from_numpy(pack_layout.sequence_positions[local_tokens]).to(device),
        local_tokens=torch.from_numpy(local_tokens).to(device) if sharded else None,
        restore=torch.from_numpy(pack_layout.restore).to(device) if sharded else None,
        shares_prefixes=pack_layout.prefix_lengths is not None,
        chunks=None if recurrent is None else recurrent.chunks(pack_layout, cp_rank, device),
        attention=metadata,
        cp_rank=cp_rank,
        run=run,
        segments=segments,
    )


def slice_params(whole: PackedParams, part: PackSlice, device: torch.device, backend: AttentionBackend) -> PackedParams:
    """PackedParams of a slice of the pack that has the params `whole`; its `cu_seqlens` are those of its pieces."""
    place, cp_rank = part.place, whole.cp_rank
    rows, lengths = slice(place.first, place.last), part.pieces.lengths
    cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(device=device, dtype=torch.int32)
    return PackedParams(
        **_segment_fields(cu_seqlens, part.longest_segment),
        positions=whole.positions[rows],
        local_tokens=None if whole.local_tokens is None else whole.local_tokens[rows],
        shares_prefixes=whole.shares_prefixes,
        attention=backend.metadata(part, cp_rank, device),
        cp_rank=cp_rank,
        place=place,
    )


def _segment_fields(cu_seqlens: torch.Tensor, longest: int) -> dict[str, Any]:
    """Fields of PackedSeqParams for segments, of those that the installed Megatron has."""
    fields: dict[str, Any] = {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "cu_seqlens_q_padded": cu_seqlens,
        "cu_seqlens_kv_padded": cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
        "pad_between_seqs": False,
    }
    return {name: value for name, value in fields.items() if name in _BASE_FIELDS}
