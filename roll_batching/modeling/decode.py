"""The key-value cache of generation, with a position per row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from roll_batching.modeling.rotary import Tables


class KeyValueCache:
    """Rotated keys and values per layer, each [rows, heads, length, head dim of keys or values].

    Replaces Megatron's inference context, which differs between versions and needs left padding for rows of different
    lengths.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def buffers(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of `layer`; allocated on first use, for keys and values [positions, rows, heads, head_dim]."""
        if layer not in self._layers:
            rows, heads = keys.shape[1:3]
            self._layers[layer] = (
                keys.new_zeros(rows, heads, self.length, keys.shape[3]),
                values.new_zeros(rows, heads, self.length, values.shape[3]),
            )
        return self._layers[layer]

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(last inputs of the convolution, state) of a gated delta net, each [rows, ...]."""
        return self._layers[layer]

    def set_states(self, layer: int, inputs: torch.Tensor, state: torch.Tensor) -> None:
        """Replaces the inputs and the state that `states` returns for `layer`."""
        self._layers[layer] = inputs, state

    def select(self, rows: torch.Tensor) -> None:
        """Keeps (and repeats) the given rows, in order. Layer by layer, so that only one layer is in memory twice."""
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys[rows], values[rows]


@dataclass
class DecodeParams(PackedSeqParams):
    """Parameters of a forward pass with a cache, for cores whose backend decodes.

    Queries, keys and values are [positions, rows, ...]. A prefill has many positions per row, right-padded; the entries
    of padding are overwritten before a query can see them. A decode step has one position per row.
    """

    cache: KeyValueCache = field(default=None)  # type: ignore[assignment]
    positions: torch.Tensor = field(default=None)  # type: ignore[assignment]
    """[positions, rows] int64."""
    axes: torch.Tensor | None = None
    """[3, positions, rows] int64: positions for RoPE on the axes of images; None: `positions` on all axes."""
    images: Any = None
    """`packing.extra_inputs.ImageInputs` of a prefill with images."""
    deepstack: Any = None
    """`modeling.vision.DeepStack` of these images, set by the model."""
    lengths: torch.Tensor | None = None
    """[rows] int64: tokens of each row, in a prefill."""
    visible: torch.Tensor | None = None
    """[rows, 1, 1, width] bool: keys that a decode step's query attends to; None in a prefill (causal)."""
    rotary: dict[Any, Tables] | None = None
