"""The key-value cache of generation: rotated keys and values of every layer, rows at their own positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from roll_batching.modeling.rotary import Tables


class KeyValueCache:
    """Keys (already rotated) and values per layer, each [rows, heads, length, head_dim].

    Kept in our own cores, so that it depends on no Megatron version's inference context, and so that
    rows of different lengths need no left padding.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def room(self, layer: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cache of `layer`, made on first use from keys [positions, rows, heads, head_dim]."""
        if layer not in self._layers:
            shape = (keys.shape[1], keys.shape[2], self.length, keys.shape[3])
            self._layers[layer] = (keys.new_zeros(shape), keys.new_zeros(shape))
        return self._layers[layer]

    def select(self, rows: torch.Tensor) -> None:
        """Keeps (and repeats) the given rows, in their order. One layer after the other: never is all of it twice."""
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys[rows], values[rows]


@dataclass
class DecodeParams(PackedSeqParams):
    """What a forward pass with a cache carries to cores whose backend decodes; tensors are [positions, rows, ...].

    A prefill has many positions per row, right-padded; what is stored for padding is overwritten
    before a query can see it. A decode step has one position per row.
    """

    cache: KeyValueCache = field(default=None)  # type: ignore[assignment]
    positions: torch.Tensor = field(default=None)  # type: ignore[assignment]
    """[positions, rows] int64."""
    visible: torch.Tensor | None = None
    """[rows, 1, 1, width] bool, keys that a decode step's query sees; None in a prefill (causal)."""
    rotary: Tables | None = None
