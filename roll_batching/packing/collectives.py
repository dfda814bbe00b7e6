"""Context-parallel gathers with explicit backward passes.

The backward depends on the use of the gathered tensor. Keys and values are used differently on each rank, so their
gradients are summed over ranks. A loss is computed identically on all ranks, so each rank already has the full gradient
and only takes the part of its tokens; a sum would multiply gradients by the context-parallel size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.packing.params import PackedParams

# torch 2.13 renames these functions and warns when the old names are used.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
KeysAndValues = tuple[torch.Tensor, torch.Tensor]


def _all_gather_tokens(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[tokens, ...] of all ranks of `group`, concatenated in rank order."""
    gathered = x.new_empty(group.size() * len(x), *x.shape[1:])
    _all_gather(gathered, x.contiguous(), group=group)
    return gathered


class _GatherKeys(torch.autograd.Function):
    """Tokens of all ranks, concatenated in rank order; the backward sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_gather_tokens(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        local = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:])
        _reduce_scatter(local, grad, group=ctx.group)
        return local, None


class _GatherResults(torch.autograd.Function):
    """Tokens of all ranks in pack order; the backward takes the gradients of this rank's tokens."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, local_tokens: torch.Tensor, restore: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(local_tokens)
        return _all_gather_tokens(x, group)[restore]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (local_tokens,) = ctx.saved_tensors
        return grads[0][local_tokens], None, None, None


def gather_keys(x: torch.Tensor, params: PackedParams, group: dist.ProcessGroup) -> torch.Tensor:
    """Local [tokens / cp, ...] -> [tokens, ...] in pack order; the backward sums gradients over CP ranks.

    Autograd keeps the gathered tensor for the backward. `GatheredKeys` keeps only this rank's tokens.
    """
    if params.restore is None:
        return x
    gathered: torch.Tensor = _GatherKeys.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered.index_select(0, params.restore)


def gather_results(x: torch.Tensor, params: PackedParams, group: dist.ProcessGroup) -> torch.Tensor:
    """Local [tokens / cp, ...] -> [tokens, ...] in pack order; the backward takes this rank's gradients."""
    if params.local_tokens is None:
        return x
    arguments = x, params.local_tokens, params.restore, group
    gathered: torch.Tensor = _GatherResults.apply(*arguments)  # type: ignore[no-untyped-call]
    return gathered


class LocalKeys:
    """Keys and values of a pack without context parallelism, each [tokens, heads, head_dim]."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self._key_and_value, self.heads = (key, value), key.shape[1]

    def take(self, tokens: torch.Tensor | None, copies: int = 1) -> KeysAndValues:
        """Keys and values of `tokens` [...], each [..., heads * copies, head_dim]; None: of all tokens.

        The copies of a head are adjacent, for kernels without grouped queries.
        """
        key, value = (x if tokens is None else x[tokens] for x in self._key_and_value)
        return (key, value) if copies == 1 else (key.repeat_interleave(copies, -2), value.repeat_interleave(copies, -2))

    def attention_scope(self) -> contextlib.AbstractContextManager[None]:
        """Context for the attention that uses them."""
        return contextlib.nullcontext()


class GatheredKeys:
    """Keys and values of all context-parallel ranks, of which only this rank's are kept for the backward.

    Without a group they are this rank's alone: for packs whose samples share prefixes, where `take` repeats keys.

    Attention kernels save their keys and values for the backward. Inside `attention_scope` they save only which tokens
    these were; the backward gathers the keys of the layer again. A rank then keeps 1/cp of the keys of a layer, for one
    more all-gather per layer and micro-batch.

    Args:
        key: keys of this rank, [tokens / cp, heads, head_dim].
        value: values of this rank, [tokens / cp, heads, head_dim of values].
        group: the context-parallel ranks; None without context parallelism.
        keep: keep the gathered tensors, for layers that are recomputed just before their backward.
    """

    def __init__(self, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup | None, *, keep: bool) -> None:
        local = torch.cat([key, value], -1)
        self._gathered = local
        if group is not None:
            self._gathered = _GatherKeys.apply(local, group)  # type: ignore[no-untyped-call]
        self._key_dim, self.heads = key.shape[-1], key.shape[1]
        self._hooks = None if keep or not torch.is_grad_enabled() else _RegatherHooks(local.detach(), group)

    def take(self, tokens: torch.Tensor | None, copies: int = 1) -> KeysAndValues:
        """Like `LocalKeys.take`; `tokens` are indices into the concatenation over ranks (`PackLayout.restore`).

        Both results are views of one tensor.
        """
        assert tokens is not None  # under context parallelism the metadata of a pack always has them
        selected = _select_tokens(self._gathered, tokens, copies)
        if self._hooks is not None:
            self._hooks.track(selected, tokens, copies)
        return selected[..., : self._key_dim], selected[..., self._key_dim :]

    @contextlib.contextmanager
    def attention_scope(self) -> Iterator[None]:
        """Context for the attention that uses the results of `take`."""
        if self._hooks is None:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._hooks.pack, self._hooks.unpack):
            yield
        self._hooks.stop_tracking()


def _select_tokens(gathered: torch.Tensor, tokens: torch.Tensor, copies: int) -> torch.Tensor:
    selected = gathered.index_select(0, tokens.reshape(-1)).view(*tokens.shape, *gathered.shape[1:])
    return selected if copies == 1 else selected.repeat_interleave(copies, -2)


class _Selection:
    """Result of one `take` for the backward: its tokens, and the tensor while it exists again."""

    def __init__(self, tokens: torch.Tensor, copies: int) -> None:
        self.tokens, self.copies = tokens, copies
        self.saved = self.pending = 0
        """Saved tensors of this selection, and those that the current backward has not yet used."""
        self.selected: torch.Tensor | None = None


class _RegatherHooks:
    """Saved-tensor hooks that keep this rank's tokens and gather those of other ranks again."""

    def __init__(self, local: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        self._local, self._group = local, group
        self._tracked: dict[int, tuple[torch.Tensor, _Selection]] = {}
        """Selections by storage. The tensors are kept, so that no other tensor gets the same storage meanwhile."""
        self._gathered: torch.Tensor | None = None
        self._saved = self._pending = 0

    def track(self, selected: torch.Tensor, tokens: torch.Tensor, copies: int) -> None:
        self._tracked[_storage(selected)] = selected, _Selection(tokens, copies)

    def stop_tracking(self) -> None:
        self._tracked.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        _, selection = self._tracked.get(_storage(tensor), (None, None))
        if selection is None:
            return tensor.detach()  # an output saved with its graph would never be freed if no backward runs
        selection.saved, selection.pending = selection.saved + 1, selection.pending + 1
        self._saved, self._pending = self._saved + 1, self._pending + 1
        return selection, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        selection, *view = packed
        if selection.selected is None:
            if self._gathered is None:
                group = self._group
                self._gathered = self._local if group is None else _all_gather_tokens(self._local, group)
            selection.selected = _select_tokens(self._gathered, selection.tokens, selection.copies)
        tensor: torch.Tensor = selection.selected.as_strided(*view)
        selection.pending, self._pending = selection.pending - 1, self._pending - 1
        # After the last use the memory is freed; another backward through the same graph gathers again.
        if not selection.pending:
            selection.selected, selection.pending = None, selection.saved
        if not self._pending:
            self._gathered, self._pending = None, self._saved
        return tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
