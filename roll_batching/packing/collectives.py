"""Context-parallel gathers whose backward passes we define.

They differ in who uses the result. Keys and values are used differently by every rank, so their
gradients are summed over ranks. A loss is computed alike on every rank, so each already holds the
whole gradient and only takes its own rows; summing there would multiply gradients by the
context-parallel size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.packing.params import PackedParams

# torch 2.13 has new names for them, and warns of the old.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def _gathered(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[rows, ...] of every rank of `group`, one rank after the other."""
    whole = x.new_empty(group.size() * len(x), *x.shape[1:])
    _all_gather(whole, x.contiguous(), group=group)
    return whole


class _Shared(torch.autograd.Function):
    """Every rank's rows, one rank after the other; the backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = grads[0].contiguous()
        mine = whole.new_empty(len(whole) // ctx.group.size(), *whole.shape[1:])
        _reduce_scatter(mine, whole, group=ctx.group)
        return mine, None


class _GatherResults(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, rows: torch.Tensor, restore: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _gathered(x, group)[restore]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return grads[0][rows], None, None, None


def gather_keys(x: torch.Tensor, params: PackedParams, group: dist.ProcessGroup) -> torch.Tensor:
    """Local rows [tokens / cp, ...] -> [tokens, ...] in pack order; the backward sums over CP ranks.

    The plain way: what uses the result keeps it for its backward. `GatheredKeys` keeps this rank's rows alone.
    """
    if params.restore is None:
        return x
    whole: torch.Tensor = _Shared.apply(x, group)  # type: ignore[no-untyped-call]
    return whole.index_select(0, params.restore)


def gather_results(x: torch.Tensor, params: PackedParams, group: dist.ProcessGroup) -> torch.Tensor:
    """Local rows [tokens / cp, ...] -> [tokens, ...] in pack order; the backward takes this rank's rows."""
    if params.rows is None:
        return x
    gathered: torch.Tensor = _GatherResults.apply(x, params.rows, params.restore, group)  # type: ignore[no-untyped-call]
    return gathered


class OwnKeys:
    """Keys and values of a pack that this rank holds whole, each [tokens, heads, head_dim]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self._both, self.heads = (key, value), key.shape[1]

    def take(self, rows: torch.Tensor | None, copies: int = 1) -> KeysAndValues:
        """Those of `rows` [...], each [..., heads * copies, head_dim]; all of them for None.

        `copies` of every head stand next to each other, for kernels that know no grouped queries.
        """
        key, value = (x if rows is None else x[rows] for x in self._both)
        return (key, value) if copies == 1 else (key.repeat_interleave(copies, -2), value.repeat_interleave(copies, -2))

    def attended(self) -> contextlib.AbstractContextManager[None]:
        """Around the attention that uses them."""
        return contextlib.nullcontext()


class GatheredKeys:
    """Keys and values of all context-parallel ranks, of which only this rank's rows live until the backward pass.

    Attention kernels keep their keys and values for their backward. Inside `attended` what they keep of them is a note
    of which rows it was; the backward gathers the layer's keys once more and makes it again. So a rank keeps its share
    of a layer, and not the pack, for one all-gather more per layer and micro-batch.

    Args:
        key: this rank's, [tokens / cp, heads, head_dim].
        value: likewise; its head_dim may be another.
        group: the context-parallel ranks.
        keep: keep what was gathered: for layers that are recomputed just before their backward.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup, *, keep: bool) -> None:
        both = torch.cat([key, value], -1)
        self._whole: torch.Tensor = _Shared.apply(both, group)  # type: ignore[no-untyped-call]
        self._key_dim, self.heads = key.shape[-1], key.shape[1]
        self._again = None if keep or not torch.is_grad_enabled() else _Again(both.detach(), group)

    def take(self, rows: torch.Tensor | None, copies: int = 1) -> KeysAndValues:
        """As `OwnKeys.take`; `rows` count over ranks (`PackLayout.restore` gives them). Two views of one tensor."""
        assert rows is not None  # a pack's metadata names them where there are other ranks
        picked = _picked(self._whole, rows, copies)
        if self._again is not None:
            self._again.watch(picked, rows, copies)
        return picked[..., : self._key_dim], picked[..., self._key_dim :]

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """Around the attention that uses what `take` returns."""
        if self._again is None:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._again.pack, self._again.unpack):
            yield
        self._again.forget()


def _picked(whole: torch.Tensor, rows: torch.Tensor, copies: int) -> torch.Tensor:
    picked = whole.index_select(0, rows.reshape(-1)).view(*rows.shape, *whole.shape[1:])
    return picked if copies == 1 else picked.repeat_interleave(copies, -2)


class _Kept:
    """What the backward of one `take` needs: its rows, how many tensors were kept of it, and it again, meanwhile."""

    def __init__(self, rows: torch.Tensor, copies: int) -> None:
        self.rows, self.copies = rows, copies
        self.notes = self.left = 0
        self.picked: torch.Tensor | None = None


class _Again:
    """Saved-tensor hooks that keep this rank's rows and gather the others' again."""

    def __init__(self, local: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._local, self._group = local, group
        self._watched: dict[int, tuple[torch.Tensor, _Kept]] = {}
        """By storage; holding the tensors, so that no other gets the storage's place."""
        self._whole: torch.Tensor | None = None
        self._notes = self._left = 0

    def watch(self, picked: torch.Tensor, rows: torch.Tensor, copies: int) -> None:
        self._watched[_storage(picked)] = picked, _Kept(rows, copies)

    def forget(self) -> None:
        self._watched.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        _, kept = self._watched.get(_storage(tensor), (None, None))
        if kept is None:
            return tensor.detach()  # an output that held itself would live for ever where no backward pass comes
        kept.notes, kept.left = kept.notes + 1, kept.left + 1
        self._notes, self._left = self._notes + 1, self._left + 1
        return kept, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        kept, *place = saved
        if kept.picked is None:
            if self._whole is None:
                self._whole = _gathered(self._local, self._group)
            kept.picked = _picked(self._whole, kept.rows, kept.copies)
        found: torch.Tensor = kept.picked.as_strided(*place)
        kept.left, self._left = kept.left - 1, self._left - 1
        if not kept.left:  # nobody else asks; another backward pass would start anew
            kept.picked, kept.left = None, kept.notes
        if not self._left:
            self._whole, self._left = None, self._notes
        return found


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
