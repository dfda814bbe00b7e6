"""TransformerEngine's own modules with products of plain torch, so that models of its layers compute on the CPU.

Parameters, sharding, modes of parallelism and Megatron's wrappers are the real ones. Kernels are replaced by torch's,
and TransformerEngine's communication by Megatron's. Nothing is computed in FP8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Inside, TransformerEngine's linear layers, norms and optimizer are made and compute by torch."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.optimizer import optimizer as base
    from megatron.core.transformer.moe import moe_utils
    from transformer_engine.pytorch import DotProductAttention, GroupedLinear, LayerNormLinear, Linear
    from transformer_engine.pytorch.ops.basic.rmsnorm import RMSNorm

    parts = ((Linear, _linear), (LayerNormLinear, _norm_linear), (GroupedLinear, _grouped), (RMSNorm, _norm))
    parts += ((DotProductAttention, _attention),)
    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (moe_utils, "te_general_gemm", None),  # Megatron then takes torch's product
            (optimizer, "USING_PYTORCH_OPTIMIZER", True),
            (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
            *((module, "multi_tensor_applier", utils.local_multi_tensor_applier) for module in (base, clip_grads)),
            (clip_grads, "multi_tensor_scale_tensor_impl", utils.local_multi_tensor_scale),
            *((module, "multi_tensor_scale_impl", utils.local_multi_tensor_scale) for module in (base, clip_grads)),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        for owner, forward in parts:
            stack.enter_context(mock.patch.object(owner, "forward", forward))
        yield


def _linear(self: Any, inp: Any, **unused: Any) -> Any:
    import torch.nn.functional as F
    from megatron.core.tensor_parallel import mappings

    assert not self.use_bias
    group, weight = self.tp_group, self.weight
    if self.parallel_mode == "column" and self.tp_size > 1:
        if self.sequence_parallel:
            inp = mappings.gather_from_sequence_parallel_region(inp, group=group)
        else:
            inp = mappings.copy_to_tensor_model_parallel_region(inp, group)
    out = F.linear(inp, weight)
    if self.parallel_mode == "row" and self.tp_size > 1:
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=group)
        return mappings.reduce_from_tensor_model_parallel_region(out, group)
    return out


def _rms_norm(x: Any, weight: Any, eps: float, is_zero_centred: bool) -> Any:
    import torch.nn.functional as F

    return F.rms_norm(x, weight.shape, 1 + weight if is_zero_centred else weight, eps)


def _norm_linear(self: Any, inp: Any, **unused: Any) -> Any:
    assert not self.return_layernorm_output and self.normalization == "RMSNorm"
    return _linear(self, _rms_norm(inp, self.layer_norm_weight, self.eps, self.zero_centered_gamma))


def _grouped(self: Any, inp: Any, m_splits: Any, **unused: Any) -> Any:
    import torch
    import torch.nn.functional as F

    assert not self.use_bias
    parts = inp.split([int(count) for count in m_splits])
    return torch.cat([F.linear(part, getattr(self, f"weight{n}")) for n, part in enumerate(parts)])


def _norm(self: Any, x: Any) -> Any:
    return _rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)


def _attention(
    self: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *, attn_mask_type: str, **arguments: Any
) -> Any:
    """Causal attention as TransformerEngine's argument names say it, with what its kernels refuse refused.

    Source of the refusals: transformer_engine/pytorch/attention/dot_product_attention of 2.20.2.
    """
    import numpy as np
    import torch

    from roll_batching.modeling.attention.varlen import varlen_spans
    from roll_batching.packing.collectives import GatheredKeys
    from roll_batching.packing.pack_layout import PackLayout

    def given(name: str) -> Any:
        return arguments.pop(name, None)

    layout, scale = given("qkv_format"), self.softmax_scale
    queries, keys = given("cu_seqlens_q"), given("cu_seqlens_kv")
    padded, padded_keys = given("cu_seqlens_q_padded"), given("cu_seqlens_kv_padded")
    longest, longest_keys = given("max_seqlen_q"), given("max_seqlen_kv")
    has_gaps = given("pad_between_seqs")
    assert not any(arguments.values()), arguments
    if layout != "thd":
        assert attn_mask_type == "causal" and attention_mask is None
        ends = torch.tensor([0, len(query)])
        rows = [_causal(*(x[:, row] for x in (query, key, value)), ends, ends, scale) for row in range(query.shape[1])]
        return torch.stack(rows, 1)
    assert "padding" in attn_mask_type and query.dim() == 3
    cp_size = 1 if self.cp_group is None else self.cp_group.size()
    if cp_size == 1:
        assert longest >= int(queries.diff().max()) and longest_keys >= int(keys.diff().max())
        # Masks are aligned to the first key elsewhere, which is the same for equal lengths only.
        assert attn_mask_type == "padding_causal_bottom_right" or torch.equal(queries, keys)
        if has_gaps:
            return _causal_between_gaps(query, key, value, queries, padded, scale)
        return _causal(query, key, value, queries, keys, scale)
    assert (
        attn_mask_type == "padding_causal" and not has_gaps and padded is padded_keys
    )  # its ring takes packs without gaps
    lengths = padded.diff().numpy().astype(np.int64)
    pack = PackLayout(lengths=lengths, segments=lengths, cp_size=cp_size)
    spans = varlen_spans(pack, self.cp_group.rank(), torch.device("cpu"))
    key, value = GatheredKeys(key, value, self.cp_group, keep=True).take(spans.key_rows)
    return _causal(query, key, value, spans.cu_queries, spans.cu_keys, scale)


def _causal_between_gaps(query: Any, key: Any, value: Any, ends: Any, padded: Any, scale: float) -> Any:
    """Like `_causal`, where the samples that `ends` counts begin at `padded`; rows between them are zero."""
    import torch

    rows = torch.cat([start + torch.arange(n) for start, n in zip(padded.tolist(), ends.diff().tolist(), strict=False)])
    found = _causal(query[rows], key[rows], value[rows], ends, ends, scale)
    return found.new_zeros(len(query), found.shape[1]).index_copy(0, rows, found)


def _causal(query: Any, key: Any, value: Any, queries: Any, keys: Any, scale: float) -> Any:
    """[tokens, heads x channels] of runs of queries, each of which ends with the last of its keys."""
    import itertools

    import torch

    outputs, copies = [], query.shape[1] // key.shape[1]
    runs = zip(itertools.pairwise(queries.tolist()), itertools.pairwise(keys.tolist()), strict=True)
    for (first, end), (first_key, end_key) in runs:
        k, v = (x[first_key:end_key].repeat_interleave(copies, 1).transpose(0, 1) for x in (key, value))
        scores = (query[first:end].transpose(0, 1) @ k.transpose(1, 2)) * scale
        count, behind = end - first, (end_key - first_key) - (end - first)
        hidden = torch.ones(count, count + behind, dtype=torch.bool).triu(behind + 1)
        outputs.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).flatten(1)
