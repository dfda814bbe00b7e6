"""Cached generation for models whose attention backend has no cache, through dense cores."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from roll_batching.modeling.attention.dense import DenseCore
from roll_batching.modeling.rotary import PackRotation, RotarySettings


@contextlib.contextmanager
def dense_decoding(gpt: Any, rotary: RotarySettings) -> Iterator[None]:
    """Replaces the core attention of every layer of a GPTModel by a dense core that rotates by `rotary`.

    Layers without attention stay, and cores without RoPE (`no_rope_freq`) get none.
    Core attention has no parameters, so only modules are swapped; they are restored at the end.
    """
    every = [layer.self_attention for layer in gpt.decoder.layers]
    attentions = [attention for attention in every if hasattr(attention, "core_attention")]
    before = [attention.core_attention for attention in attentions], gpt.position_embedding_type
    rotation, without = PackRotation(rotary, gpt.config.kv_channels), gpt.config.no_rope_freq
    for attention in attentions:
        attention.core_attention = DenseCore(
            gpt.config,
            layer_number=attention.layer_number,
            pg_collection=attention.pg_collection,
            rotation=None if without and without[attention.layer_number - 1] else rotation,
            softmax_scale=gpt.config.softmax_scale,
        )
    gpt.position_embedding_type = "none"  # read at each forward
    try:
        yield
    finally:
        cores, gpt.position_embedding_type = before
        for attention, core in zip(attentions, cores, strict=True):
            attention.core_attention = core
