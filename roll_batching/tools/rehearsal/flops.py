"""FLOPs of operators: matrix products and attention; other operators count nothing.

A product of [m, k] and [k, n] is 2mkn. Attention over p pairs of a query and a key that it sees, with h heads of d
channels, is 4phd forward (scores, and values weighted by them) and 10phd backward, where the kernel computes the scores
again: five products instead of two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_PAIRS: dict[int, int] = {}
"""Query-key pairs of a pack, by the storage of its cumulative query lengths."""


def set_attention_pairs(cumulative: torch.Tensor, pairs: int) -> None:
    """Set the number of query-key pairs of the pack whose cumulative query lengths are `cumulative`.

    A fake tensor has no lengths to count them from.
    """
    _PAIRS[cumulative.untyped_storage()._cdata] = pairs


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs of one call of an operator."""
    packet = func._overloadpacket
    if packet in _COUNTED:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet is torch.ops.aten.addmm_:
        (m, k), n = args[1].shape, args[2].shape[1]
        return int(2 * m * k * n)
    name = str(packet)
    if name.startswith("aten._scaled_dot_product_"):
        return _dense_attention(func, args, kwargs)
    if name == "torch_attn._varlen_attn":
        query, cumulative = args[0], args[3]
        return 4 * _pairs_of(cumulative) * query.shape[1] * query.shape[2]
    if name == "torch_attn._varlen_attn_backward":
        query, cumulative = args[1], args[6]
        return 10 * _pairs_of(cumulative) * query.shape[1] * query.shape[2]
    return 0


def workspace_of(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes of a kernel's workspace, which fake tensors do not allocate.

    Flash attention's backward (`mha_varlen_bwd` in PyTorch's `flash_attn/flash_api.cpp`): an fp32 sum of the queries'
    gradients, a number per row, and with fewer key heads than query heads, gradients of keys and values per query head.
    """
    if str(func._overloadpacket) != "torch_attn._varlen_attn_backward":
        return 0
    query, key, cumulative = args[1], args[2], args[6]
    rows, heads, dim = len(query) + 128 * len(cumulative), query.shape[1], query.shape[2]
    expanded = 0 if key.shape[1] == heads else 2 * len(key) * heads * dim * key.element_size()
    return 4 * rows * heads * (dim + 1) + expanded


def _dense_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """FLOPs of a kernel of torch's scaled_dot_product_attention.

    Not from torch's registry: it has no CPU kernels, and counts the pairs above the diagonal, which kernels skip.
    """
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    batch, heads, queries, dim = named["query"].shape
    keys, value_dim = named["key"].shape[2], named["value"].shape[3]
    square = min(queries, keys)
    pairs = square * (square + 1) // 2 + (queries - square) * keys if named.get("is_causal") else queries * keys
    channels = 3 * dim + 2 * value_dim if "backward" in str(func) else dim + value_dim
    return int(2 * batch * heads * pairs * channels)


def _pairs_of(cumulative: torch.Tensor) -> int:
    return _PAIRS.get(cumulative.untyped_storage()._cdata, 0)


_ATEN = torch.ops.aten
_COUNTED = frozenset({_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm})
