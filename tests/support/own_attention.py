"""Attention cores as somebody else writes them: one class each, no line of the package's own cores."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import torch

from roll_batching.modeling.attention.packages import FlashBackend, FlashCore, FlashFourBackend, FlashFourCore
from roll_batching.packing import AttentionBackend, AttentionRequirements, PackLayout
from roll_batching.packing.collectives import gather_keys


class _MaskedSoftmax(torch.nn.Module):
    def __init__(self, rotation: Any, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.rotation, self.cp_group = rotation, pg_collection.cp
        self.scale = 1 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, packed_seq_params: Any, **_: Any
    ) -> torch.Tensor:
        params = packed_seq_params
        if self.rotation is not None:
            query, key = self.rotation(query, key, params)
        key, value = (gather_keys(x, params, self.cp_group) for x in (key, value))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        weights = scores.masked_fill(~params.attention, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).reshape(len(query), -1)


class MaskedSoftmax(AttentionBackend):
    """One mask over the whole pack, [local rows, tokens]: what nobody would run, and everybody can read."""

    name = "masked softmax"
    rotates = True

    def build_core(self, rotation: Any, **arguments: Any) -> torch.nn.Module:
        return _MaskedSoftmax(rotation, **arguments)

    def metadata(self, layout: PackLayout, cp_rank: int, device: torch.device) -> torch.Tensor:
        rows = layout.local_tokens(cp_rank)
        segments = torch.from_numpy(layout.segment_ids)
        order = torch.arange(layout.tokens)
        return ((segments[rows, None] == segments) & (order[rows, None] >= order)).to(device)


class RotatedByTheModel(MaskedSoftmax):
    """The same behind Megatron's own rotation, as TransformerEngine's attention has it."""

    name = "masked softmax behind rotation"
    rotates = False


class DecodedDensely(RotatedByTheModel):
    """And without a cache of its own, as TransformerEngine's: generation may attend with the dense cores instead."""

    dense_decodes = True


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **others: Any,
) -> Any:
    """What flash-attn 2.3 and later say that this function computes, sequence by sequence, on any device."""
    assert not others and dropout_p == 0.0 and v.shape[-1] == k.shape[-1]
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    left = window_size[0] if window_size[0] >= 0 else None
    return _by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, left)


def _by_sequence(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    scale: float | None,
    causal: bool,
    left: int | None,
    sinks: Any = None,
) -> Any:
    """Attention aligned to the last key; `left`: keys before a query's own that it sees, `sinks`: a logit per head."""
    assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32 and scale is not None
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    outs = []
    for queries, keys, values in zip(
        q.split(cu_seqlens_q.diff().tolist()),
        k.split(cu_seqlens_k.diff().tolist()),
        v.split(cu_seqlens_k.diff().tolist()),
        strict=True,
    ):
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        hidden = torch.ones(len(queries), len(keys), dtype=torch.bool).triu(1 + len(keys) - len(queries))
        if left is not None:  # keys to the left of a query's own, which is the last for the last query
            hidden |= torch.ones_like(hidden).tril(len(keys) - len(queries) - left - 1)
        scores = scores.masked_fill(hidden & causal, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, len(queries), 1)], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outs)


class _FlashOnTheCpu(FlashCore):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        sys.modules["flash_attn"] = sys.modules[__name__]
        super().__init__(*arguments, **keywords)


class FlashOnTheCpu(FlashBackend):
    """The backend of flash-attn with a stand-in for its function: what the function is called with is put to proof."""

    name = "flash_attn on the CPU"
    requirements = AttentionRequirements()

    def build_core(self, rotation: Any, **arguments: Any) -> torch.nn.Module:
        return _FlashOnTheCpu(rotation=rotation, **arguments)


def cute_flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    gather_kv_indices: Any = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    **others: Any,
) -> tuple[Any, Any]:
    """What flash-attn-4 4.0.0b36 says that its function computes; parameters in its order, and it returns a pair."""
    assert not others and qv is min_seqlen_k is seqused_q is seqused_k is gather_kv_indices is page_table is None
    assert causal and softcap == 0.0 and num_splits == 1 and pack_gqa is None and not deterministic
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    left, right = window_size
    assert (left is None and right is None) or (left is not None and left >= 0 and right == 0)
    if learnable_sink is not None:
        assert learnable_sink.shape == (q.shape[1],)
    return _by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, left, learnable_sink), None


class _FlashFourOnTheCpu(FlashFourCore):
    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        module: Any = types.ModuleType("flash_attn.cute")
        module.flash_attn_varlen_func = cute_flash_attn_varlen_func
        sys.modules.setdefault("flash_attn", types.ModuleType("flash_attn"))
        sys.modules["flash_attn.cute"] = module
        super().__init__(*arguments, **keywords)


class FlashFourOnTheCpu(FlashFourBackend):
    """The backend of flash-attn-4 with a stand-in for its function."""

    name = "flash_attn_4 on the CPU"
    requirements = AttentionRequirements()

    def build_core(self, rotation: Any, **arguments: Any) -> torch.nn.Module:
        return _FlashFourOnTheCpu(rotation=rotation, **arguments)


class OnlyHalf(MaskedSoftmax):
    """A backend whose kernels want what the CPU does not have."""

    name = "half"
    requirements = AttentionRequirements(dtypes=(torch.float16,), libraries=(("no-such-kernel", "2.0"),))
