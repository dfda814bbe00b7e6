"""Sums, maxima and gathers over a vocabulary that tensor-parallel ranks share, with the right gradients.

Every tensor-parallel rank computes the same loss (Megatron's convention), so a reduced value already has its whole
gradient on each rank: backward hands it to this rank's columns and sums nothing. `torch.distributed.nn`'s all-reduce
sums it, which multiplies the gradient by the tensor-parallel size and leaves the loss right. A reduced value that is
combined with columns again gets a part of its gradient on each rank: `expand` sums these parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import LossError
from roll_batching.losses.vocab_parallel import TiledLogits, shaped, tile_shape, token_log_probs
from roll_batching.packing.batch import PackedBatch


class _Reduce(torch.autograd.Function):
    """The sum over the ranks of a group; the backward passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Copy(torch.autograd.Function):
    """The value itself; the backward sums the gradients of the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _AllGather(torch.autograd.Function):
    """The columns of all ranks of a group side by side; the backward takes those of this rank."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0].chunk(ctx.group.size(), -1)[ctx.group.rank()], None


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The vocabulary behind the logits of a view: reductions over all its columns, on whichever ranks they are.

    Arguments `x` are [positions, vocabulary / tp]: the view's logits, or values computed from them column by column.
    Padded columns never count. Results are fp32 (fp64 for fp64) and equal on all tensor-parallel ranks. All methods are
    collective over the tensor-parallel ranks, in forward or backward.
    """

    size: int
    """Real tokens; the columns after them are padding."""
    shard: int
    """Columns of each tensor-parallel rank, padding included."""
    group: Any
    """The tensor-parallel process group, or None."""

    @property
    def first(self) -> int:
        """Token id of this rank's first column."""
        return 0 if self.group is None else self.shard * int(self.group.rank())

    @property
    def columns(self) -> int:
        """Real columns of this rank."""
        return min(max(self.size - self.first, 0), self.shard)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """[positions] sum over the vocabulary."""
        real = self._real(x)
        return self._reduce(real.sum(-1, dtype=_wide(x)))

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """[positions] maximum over the vocabulary; equal columns share its gradient."""
        real = self._real(x)
        peak = x.new_full((len(x),), -torch.inf, dtype=_wide(x))
        if self.columns:
            peak = real.detach().amax(-1).to(peak.dtype)
        if self._is_sharded:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
        largest = real == peak[:, None]
        # Zeros, with the gradient of the largest columns.
        above = torch.where(largest, real - peak[:, None], 0.0).sum(-1)
        return peak + self._reduce(above) / self._reduce(largest.sum(-1, dtype=peak.dtype))

    def logsumexp(self, x: torch.Tensor) -> torch.Tensor:
        """[positions] log of the sum of exponentials over the vocabulary. Allocates no copy of `x`."""
        self._real(x)
        none = torch.full((len(x),), -1, dtype=torch.int64, device=x.device)  # no column: its logit counts as 0
        return -token_log_probs(x, none, vocab_size=self.size, tp_group=self.group)[0]

    def gather(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The values of `x` at token ids, [positions] or [positions, k]; NaN where an id is no token."""
        self._real(x)
        column = (ids[:, None] if ids.dim() == 1 else ids).long() - self.first
        inside = (column >= 0) & (column < self.columns)
        values = torch.where(inside, x.gather(1, column.clamp(0, self.shard - 1)).to(_wide(x)), 0.0)
        values = self._reduce(values[:, 0] if ids.dim() == 1 else values)
        return torch.where((ids >= 0) & (ids < self.size), values, torch.nan)

    def expand(self, per_position: torch.Tensor) -> torch.Tensor:
        """[positions] -> [positions, 1], to combine a reduced value with the columns of `x`.

        Without it, under tensor parallelism, the value's gradient lacks the parts of other ranks' columns.
        """
        column = per_position[:, None]
        return _Copy.apply(column, self.group) if self._is_sharded else column  # type: ignore[no-untyped-call]

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """[positions, vocabulary]: whole rows, in the dtype of `x`.

        Costs positions x vocabulary values on every tensor-parallel rank, once more for their gradient, and an
        all-gather of them.
        """
        self._real(x)
        whole = _AllGather.apply(x, self.group) if self._is_sharded else x  # type: ignore[no-untyped-call]
        return whole[:, : self.size]

    @property
    def _is_sharded(self) -> bool:
        return self.group is not None and self.group.size() > 1

    def _real(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 2 or x.shape[1] != self.shard:
            raise LossError(
                f"an operation over the vocabulary got a tensor of shape {tuple(x.shape)}: give the view's logits, or "
                f"values of their shape [positions, {self.shard}], with a column for each of this rank's tokens"
            )
        return x[:, : self.columns]

    def _reduce(self, x: torch.Tensor) -> torch.Tensor:
        return _Reduce.apply(x, self.group) if self._is_sharded else x  # type: ignore[no-untyped-call]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


# ---- candidate tokens


def labels_with_candidates(pack: PackedBatch, field: str) -> torch.Tensor:
    """[tokens / cp, 1 + k] int64: the label of each local position, then its tokens in the next_token field `field`.

    Raises `LossError` where samples of the pack share positions, or the batch has no such field.
    """
    if pack.computed_tokens is not None:
        raise LossError(
            f"{field!r} gives each position of a sample its own tokens, and samples of this pack share positions: plan "
            "without prefixes (share_prefixes: false)"
        )
    if field not in pack.fields or pack.kinds[field] != "next_token":
        raise LossError(f"the loss needs log-probs of the tokens in {field!r}: add this next_token field to the batch")
    candidates = pack.fields[field]
    if pack.params.local_tokens is not None:
        candidates = candidates[pack.params.local_tokens]
    return torch.cat([pack.labels[:, None], candidates.to(pack.labels.dtype)], 1)


@torch.no_grad()
def top_log_probs(
    source: torch.Tensor,
    k: int,
    *,
    weight: torch.Tensor | None,
    rows: torch.Tensor,
    vocab_size: int,
    temperature: float = 1.0,
    tp_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` most likely tokens of each row in `rows`, descending; zeros in the other rows.

    Args:
        source: logits [n, vocabulary / tp], or with `weight` hidden states [n, hidden], as `token_log_probs` takes.
        k: at most `vocab_size`.
        weight: [vocabulary / tp, hidden] of the head, when `source` holds hidden states.
        rows: int64 indices of the rows to compute.
        vocab_size: real vocabulary size; padded columns never count.
        temperature: logits are divided by it.
        tp_group: process group that shards the vocabulary.

    Returns:
        log-probs [n, k] over the whole vocabulary, fp32 (fp64 for fp64 sources), and token ids [n, k] int64.
    """
    shard = source.shape[-1] if weight is None else weight.shape[0]
    first = shard * (tp_group.rank() if tp_group is not None else 0)
    index, selected = (rows, source) if weight is None else (None, source.index_select(0, rows))
    logits = TiledLogits(
        source=selected,
        weight=weight,
        index=index,
        columns=min(max(vocab_size - first, 0), shard),
        column=rows[:, None],  # read for its length alone
        temperature=temperature,
        tile=tile_shape(len(rows), shard, selected, deferred=weight is not None, chunk=None),
        kernels=None,
    )
    lowest = torch.finfo(logits.dtype).min
    values = torch.full((len(rows), k), lowest, dtype=logits.dtype, device=source.device)
    ids = torch.zeros((len(rows), k), dtype=torch.int64, device=source.device)
    lse = torch.full((len(rows),), lowest, dtype=logits.dtype, device=source.device)
    buffer = logits.buffer()
    for row, column in logits.tiles():
        x = logits.load(row, column, shaped(buffer, row, column))
        top, place = x.topk(min(k, x.shape[1]), dim=1)
        values[row], ids[row] = _largest(values[row], ids[row], top, place + (first + column.start))
        lse[row] = torch.logaddexp(lse[row], x.logsumexp(1))
    if tp_group is not None and tp_group.size() > 1:
        everyone = torch.cat([values, ids.to(values.dtype), lse[:, None]], 1)
        parts = [torch.empty_like(everyone) for _ in range(tp_group.size())]
        dist.all_gather(parts, everyone, group=tp_group)
        values, ids = parts[0][:, :k], parts[0][:, k:-1].long()
        for part in parts[1:]:
            values, ids = _largest(values, ids, part[:, :k], part[:, k:-1].long())
        lse = torch.stack([part[:, -1] for part in parts]).logsumexp(0)
    log_probs = values.new_zeros(source.shape[0], k).index_put((rows,), values - lse[:, None])
    return log_probs, ids.new_zeros(source.shape[0], k).index_put((rows,), ids)


def _largest(
    values: torch.Tensor, ids: torch.Tensor, more: torch.Tensor, more_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of `values` and `more` by row, as many as `values` has, with their ids."""
    joined = torch.cat([values, more], 1)
    largest, place = joined.topk(values.shape[1], dim=1)
    return largest, torch.cat([ids, more_ids], 1).gather(1, place)
