"""The base class of attention cores: RoPE, context parallelism by gathering keys, decoding with a cache.

A core replaces Megatron's core attention through the layer spec. No mask of the whole pack is ever built. Under context
parallelism keys and values are all-gathered, and again for the backward pass.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel

from roll_batching.errors import LayoutError
from roll_batching.modeling.decode import DecodeParams
from roll_batching.modeling.layers import has_window
from roll_batching.packing.attention_backend import Rotation
from roll_batching.packing.collectives import GatheredKeys, LocalKeys
from roll_batching.packing.params import PackedParams

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Kernels of `scaled_dot_product_attention`. cuDNN's is left out: it builds a plan for every shape, and shapes rarely
repeat here (up to 16 s for the first pass over a pack on an H100, torch 2.11)."""

_ALIGNED = 8
"""Channels that attention sinks add to a head: kernels want a multiple of 8."""


class PackedCore(torch.nn.Module):
    """Causal self-attention inside each sequence of a pack; a Megatron `core_attention`.

    Raises `LayoutError` for unsupported settings: dropout, layer-wise scaling, softmax offsets of one.
    """

    applies_windows = False
    """Whether `attend` reads `window`. If not, layers with a sliding window are refused."""
    applies_sinks = False
    """Whether `attend` reads `softmax_offset`. If not, models with attention sinks are refused."""
    pads_values = True
    """Whether `attend` gets values padded to the channels of keys; if not, it takes fewer."""
    metadata_type: type
    """The type of `AttentionBackend.metadata`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any = None,
        attention_type: str = "self",
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        rotation: Rotation | None = None,
    ) -> None:
        super().__init__()
        _refuse_unsupported(config, rotates=rotation is not None)
        # Layer numbers start at 1. Megatron counts the tokens to the left.
        self.window = int(config.window_size[0]) + 1 if has_window(config, layer_number) else None
        """Tokens that a token attends to at most, itself included; None: all before it."""
        if self.window is not None and not self.applies_windows:
            raise LayoutError(
                f"{type(self).__name__} has no sliding windows (TransformerConfig.window_size={config.window_size!r}): "
                "unset it, or choose the backend dense, varlen, flash_attn or flash_attn_4"
            )
        self.layer_number = layer_number
        self.cp_group = pg_collection.cp
        if config.multi_latent_attention and rotation is not None:
            raise LayoutError("multi-latent attention rotates before its core: leave rotary out of core_attention")
        self.head_dim: int = k_channels or config.kv_channels
        self.value_dim: int = v_channels or self.head_dim
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(self.head_dim)
        self.rotation = rotation
        self.softmax_offset: torch.nn.Parameter | None = None
        """[heads / tp]: a learnt logit per head that takes its share of every softmax (attention sink)."""
        if getattr(config, "softmax_type", "vanilla") == "learnable":
            self._add_sinks(config, pg_collection)
        self.of_whole_sequences: torch.nn.Module | None = None
        """The core that this one stands for where the input is no pack; None: such input is an error."""
        self._recomputed = recomputed_before_backward(config)

    def _add_sinks(self, config: TransformerConfig, pg_collection: Any) -> None:
        """Adds `softmax_offset`, under Megatron's name."""
        if not self.applies_sinks:
            raise LayoutError(
                f"{type(self).__name__} has no attention sinks (TransformerConfig.softmax_type='learnable'): choose "
                "attention_backend: dense, or flash_attn_4"
            )
        self._tp_group = pg_collection.tp
        heads = config.num_attention_heads // self._tp_group.size()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.softmax_offset = torch.nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if config.perform_initialization:
            with torch.no_grad():
                config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """`softmax_offset`, sharded by heads, for Megatron's checkpoints; empty without attention sinks."""
        if self.softmax_offset is None:
            return {}
        values = {"softmax_offset": self.softmax_offset}
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            values,
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        return sharded

    @abstractmethod
    def attend(self, query: torch.Tensor, keys: LocalKeys | GatheredKeys, metadata: Any) -> torch.Tensor:
        """Attention output [tokens / cp, heads * value dim] of local queries [tokens / cp, heads, dim].

        With `pads_values`, values with fewer channels than keys have zeros in the channels after them.
        """

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
        params = packed_seq_params
        if isinstance(params, DecodeParams):
            return self._decode(query, key, value, params)
        if params is None and self.of_whole_sequences is not None:
            whole: torch.Tensor = self.of_whole_sequences(
                query, key, value, attention_mask, attn_mask_type=attn_mask_type, attention_bias=attention_bias
            )
            return whole
        if not isinstance(params, PackedParams):
            raise LayoutError(
                f"{type(self).__name__} was called without PackedParams: pass packed_seq_params=packed_params(layout, "
                "...) to the model, or run it through MegatronTrainStrategy or run_schedule"
            )
        if not isinstance(params.attention, self.metadata_type):
            raise LayoutError(
                f"{type(self).__name__} needs {self.metadata_type.__name__} of a pack and got "
                f"{type(params.attention).__name__}: give packed_params (or pack_step) and packed_layer_spec the same "
                "attention"
            )
        if self.rotation is not None:
            query, key = self.rotation(query, key, params)
        if params.place is not None:
            key, value = params.kept.extend(self.layer_number, params.place, key, value)
        if self.pads_values and value.shape[-1] < key.shape[-1]:  # most kernels want one head dimension
            value = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        keys: LocalKeys | GatheredKeys = LocalKeys(key, value)
        if params.local_tokens is not None or params.shares_prefixes:
            group = None if params.local_tokens is None else params.context_group(self.cp_group)
            keys = GatheredKeys(key, value, group, keep=self._recomputed)
        with keys.attention_scope():
            return self.attend(query, keys, params.attention)

    def _decode(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: DecodeParams
    ) -> torch.Tensor:
        """Adds keys and values to the cache and attends to it: a prefill of many positions, or one position per row."""
        positions, rows = query.shape[:2]
        if self.rotation is not None:
            query, key = self.rotation(query, key, params)
        keys, values = params.cache.buffers(self.layer_number, key, value)
        mask = params.visible
        if params.visible is None:
            keys[:, :, :positions], values[:, :, :positions] = key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)
            width = positions
            if self.window is not None and positions > self.window:
                every = torch.arange(positions, device=query.device)
                mask = ((every <= every[:, None]) & (every > every[:, None] - self.window))[None, None]
        else:  # one position per row, each row at its own
            every = torch.arange(rows, device=query.device)
            keys[every, :, params.positions[0]], values[every, :, params.positions[0]] = key[0], value[0]
            width = params.visible.shape[-1]
            if self.window is not None:
                oldest = (params.positions[0] - self.window)[:, None, None, None]
                mask = params.visible & (torch.arange(width, device=query.device) > oldest)
        out = self.dense(query.permute(1, 2, 0, 3), keys[:, :, :width], values[:, :, :width], mask)
        return out.permute(2, 0, 1, 3).reshape(positions, rows, -1)

    def dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of a dense batch [rows, heads, length, dim]; causal without a mask.

        With a mask [rows, 1, length or 1, keys] the query heads of a group are folded into the length: no masked kernel
        takes grouped queries, and torch would repeat the keys and materialise all scores in fp32.
        """
        if self.softmax_offset is not None:
            return self._dense_with_sinks(query, key, value, mask)
        return self._dense(query, key, value, mask)

    def _dense_with_sinks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """`dense` with one more key before the others, whose score is the head's sink and whose value is zero.

        The score is a product like any other: a further channel is the sink in queries, 1 in that key and 0 in others.
        Kernels then need no bias, and gradients reach the sink through the queries.
        """
        assert self.softmax_offset is not None
        channels = (*query.shape[:-1], _ALIGNED)
        sink = (self.softmax_offset / self.scale).to(query.dtype)[:, None, None] * _first_of(_ALIGNED, query)
        query = torch.cat([query, sink.expand(channels)], -1)
        key, value = F.pad(key, (0, _ALIGNED, 1, 0)), F.pad(value, (0, _ALIGNED, 1, 0))
        key = (
            key + F.pad(_first_of(_ALIGNED, key), (key.shape[-1] - _ALIGNED, 0)) * _first_of(key.shape[2], key)[:, None]
        )
        if mask is None:  # a query before the others keeps the causal mask square
            return self._dense(F.pad(query, (0, 0, 1, 0)), key, value, None)[:, :, 1:, :-_ALIGNED]
        sees_sink = mask.new_ones(*mask.shape[:-1], 1)
        return self._dense(query, key, value, torch.cat([sees_sink, mask], -1))[..., :-_ALIGNED]

    def _dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        shape, groups = query.shape, query.shape[1] // key.shape[1]
        if mask is not None and groups > 1:
            query = query.reshape(shape[0], key.shape[1], groups * shape[2], shape[3])
            mask = mask if mask.shape[2] == 1 else mask.repeat(1, 1, groups, 1)
        with sdpa_kernel(_KERNELS):
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=mask is None
            )
        return out.reshape(*shape[:-1], -1)


def _first_of(length: int, like: torch.Tensor) -> torch.Tensor:
    """[length] 1, 0, 0, ... in the dtype of `like`."""
    return F.pad(like.new_ones(1), (0, length - 1))


def recomputed_before_backward(config: TransformerConfig) -> bool:
    """Whether a layer's attention is recomputed right before its backward, so that nothing is kept until then."""
    if config.recompute_granularity == "full":
        return bool(config.recompute_method == "uniform" and config.recompute_num_layers == 1)
    return config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or [])


def _refuse_unsupported(config: TransformerConfig, *, rotates: bool) -> None:
    refused = {
        "attention_dropout": config.attention_dropout not in (0, 0.0),
        "softmax_type": getattr(config, "softmax_type", "vanilla") not in ("vanilla", "learnable"),
        "apply_query_key_layer_scaling": config.apply_query_key_layer_scaling,
        "rotary_interleaved": rotates and config.rotary_interleaved,
        "qk_clip": getattr(config, "qk_clip", False),
    }
    for name, is_set in refused.items():
        if is_set:
            raise LayoutError(
                f"PackedCore does not support TransformerConfig.{name}={getattr(config, name)!r}: unset it, or "
                "keep your own core attention"
            )
