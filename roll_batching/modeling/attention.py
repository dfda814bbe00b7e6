"""The attention core that every built model uses: packed, context-parallel, with a decoding cache.

It replaces Megatron's core attention through the layer spec, on every device. On CUDA it calls
torch's variable-length flash kernel, on the CPU dense attention over buckets of similar spans; there
is never a mask of the whole pack. Rotation happens here (see `rotary`).
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from roll_batching.errors import LayoutError
from roll_batching.modeling.decode import DecodeParams
from roll_batching.modeling.rotary import RotarySettings, Tables, rotate
from roll_batching.packing.collectives import gather_keys
from roll_batching.packing.params import PackedParams
from roll_batching.packing.spans import BucketSpans, VarlenSpans


class PackedAttention(torch.nn.Module):
    """Causal self-attention inside each sequence of a pack; a Megatron `core_attention`.

    `rotary` None leaves queries and keys as Megatron rotated them. Raises `LayoutError` for what it
    cannot honour: dropout, sliding windows, learnable softmax offsets, layer-wise scaling.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        rotary: RotarySettings | None = None,
    ) -> None:
        super().__init__()
        _refuse_unsupported(config)
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        self.head_dim = config.kv_channels
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(self.head_dim)
        self.rotary = rotary
        # A plain attribute: a buffer would add a state-dict key and be cast by Float16Module.
        self.inverse_frequencies = rotary.inverse_frequencies(self.head_dim) if rotary else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Packed: query [tokens/cp, heads, dim] -> [tokens/cp, heads * dim]; decoding: [positions, rows, ...]."""
        if isinstance(packed_seq_params, DecodeParams):
            return self._decode(query, key, value, packed_seq_params)
        if not isinstance(packed_seq_params, PackedParams):
            raise LayoutError(
                "PackedAttention was called without PackedParams: pass packed_seq_params=packed_params(layout, ...) "
                "to the model, or run it through MegatronTrainStrategy or run_schedule"
            )
        params = packed_seq_params
        query, key = self._rotate(query, key, params)
        if params.rows is not None:
            both = gather_keys(torch.cat([key, value], -1), params, self.cp_group)
            key, value = both[..., : self.head_dim], both[..., self.head_dim :]
        if isinstance(params.spans, VarlenSpans):
            return self._varlen(query, key, value, params.spans)
        return self._buckets(query, key, value, params.spans)

    def _rotate(
        self, query: torch.Tensor, key: torch.Tensor, params: PackedParams | DecodeParams
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rotary is None or self.inverse_frequencies is None:
            return query, key
        if params.rotary is None:
            if self.inverse_frequencies.device != query.device:
                self.inverse_frequencies = self.inverse_frequencies.to(query.device)
            cos, sin = self.rotary.tables(params.positions, self.inverse_frequencies)
            params.rotary = cos.to(query.dtype), sin.to(query.dtype)  # once: every layer keeps them for its backward
        tables: Tables = params.rotary
        return rotate(query, tables), rotate(key, tables)

    def _buckets(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: BucketSpans) -> torch.Tensor:
        outputs = []
        for bucket in spans.buckets:
            out = self._dense(
                query[bucket.queries].transpose(1, 2),
                key[bucket.keys].transpose(1, 2),
                value[bucket.keys].transpose(1, 2),
                bucket.mask,
            )
            outputs.append(out.transpose(1, 2).reshape(bucket.queries.numel(), -1))
        return torch.cat(outputs)[spans.inverse]

    def _varlen(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spans: VarlenSpans) -> torch.Tensor:
        if spans.key_rows is not None:
            key, value = key[spans.key_rows], value[spans.key_rows]
        out = _varlen_attention(
            query, key, value, spans.cu_queries, spans.cu_keys, spans.max_queries, spans.max_keys, self.scale
        )
        return out.reshape(out.shape[0], -1)

    def _decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: DecodeParams
    ) -> torch.Tensor:
        positions, rows = query.shape[:2]
        query, key = self._rotate(query, key, params)
        keys, values = params.cache.room(self.layer_number, key)
        if params.visible is None:
            keys[:, :, :positions], values[:, :, :positions] = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
            width = positions
        else:
            every = torch.arange(rows, device=query.device)
            keys[every, :, params.positions[0]], values[every, :, params.positions[0]] = key[0], value[0]
            width = params.visible.shape[-1]
        out = self._dense(query.permute(1, 2, 0, 3), keys[:, :, :width], values[:, :, :width], params.visible)
        return out.permute(2, 0, 1, 3).reshape(positions, rows, -1)

    def _dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )


def _refuse_unsupported(config: TransformerConfig) -> None:
    refused = {
        "attention_dropout": config.attention_dropout not in (0, 0.0),
        "window_size": getattr(config, "window_size", None) is not None,
        "softmax_type": getattr(config, "softmax_type", "vanilla") != "vanilla",
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        "rotary_interleaved": config.rotary_interleaved,
        "qk_clip": getattr(config, "qk_clip", False),
        "multi_latent_attention": config.multi_latent_attention,
    }
    for name, is_set in refused.items():
        if is_set:
            raise LayoutError(
                f"PackedAttention does not support TransformerConfig.{name}={getattr(config, name)!r}: "
                "unset it, or keep your own core attention"
            )


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    scale: float,
) -> torch.Tensor:
    """Causal (bottom-right) attention through torch's varlen kernel, whose signature changed over versions."""
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    if "scale" in accepted:
        options["scale"] = scale
    else:
        query = query * (scale * math.sqrt(query.shape[-1]))
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in accepted:
            options["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    out: Any = varlen_attn(query, key, value, cu_queries, cu_keys, max_queries, max_keys, **options)
    return out
