"""Keys and values that the slices of a pack keep for later slices, and their gradients.

Per layer one buffer holds the keys of the whole pack, and each slice attends to a view of it: nothing is copied that a
kernel saves for its backward pass. The gradients that later slices leave in a buffer beside it are added to a slice's
own before they go on to its queries and keys.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from roll_batching.packing.pack_layout import SlicePlace

KeyAndValue = tuple[torch.Tensor, torch.Tensor]


class KeptKeys:
    """Keys and values of one pack on one pipeline stage, by layer; they live until the pack's first slice is backward.

    Gradients are summed in the dtype of the keys, slice after slice.
    """

    def __init__(self) -> None:
        self._kept: dict[int, KeyAndValue] = {}
        self._gradients: dict[int, KeyAndValue] = {}
        self._expected: defaultdict[int, int | None] = defaultdict(lambda: None)
        """By layer, the end of the slice whose backward pass is next; None: the last one's."""

    def extend(self, layer: int, place: SlicePlace, key: torch.Tensor, value: torch.Tensor) -> KeyAndValue:
        """Keeps a slice's `key` and `value` [tokens of the slice, heads, dim]; returns those visible to its queries.

        A forward pass that is recomputed writes the same values again.
        """
        visible: KeyAndValue = _Extend.apply(key, value, self, layer, place)  # type: ignore[no-untyped-call]
        return visible

    def write(self, layer: int, place: SlicePlace, tensors: KeyAndValue) -> KeyAndValue:
        """Views of the visible keys and values, after this slice's are written."""
        if layer not in self._kept:
            key, value = (x.new_empty(place.tokens, *x.shape[1:]) for x in tensors)
            self._kept[layer] = key, value
        views = []
        for buffer, own in zip(self._kept[layer], tensors, strict=True):
            # `data` has a version of its own: autograd would take a later slice's rows for a change of this one's.
            buffer.data[place.first : place.last] = own
            views.append(buffer.data[place.visible_from : place.last])
        return views[0], views[1]

    def add_gradients(self, layer: int, place: SlicePlace, gradients: KeyAndValue) -> KeyAndValue:
        """Gradients of the slice's own keys and values, given those of the visible ones; the last slice comes first."""
        expected = self._expected[layer]
        assert place.last == (place.tokens if expected is None else expected), "a later slice is not backward yet"
        if expected is None:
            key, value = (x.new_zeros(place.tokens, *x.shape[1:]) for x in gradients)
            self._gradients[layer] = key, value
        self._expected[layer] = place.first
        buffers = self._gradients[layer]
        for buffer, gradient in zip(buffers, gradients, strict=True):
            buffer[place.visible_from : place.last] += gradient
        if place.first == 0:
            del self._kept[layer], self._gradients[layer]
        key, value = (buffer[place.first : place.last] for buffer in buffers)
        return key, value


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: torch.Tensor, value: torch.Tensor, kept: KeptKeys, layer: int, place: SlicePlace
    ) -> KeyAndValue:
        ctx.kept, ctx.layer, ctx.place = kept, layer, place
        return kept.write(layer, place, (key, value))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        key, value = ctx.kept.add_gradients(ctx.layer, ctx.place, (gradients[0], gradients[1]))
        return key, value, None, None, None
