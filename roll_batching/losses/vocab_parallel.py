"""Log-probabilities and entropies of labels under a vocabulary-parallel head, in chunks of tokens.

One entry point, `token_log_probs`, for logits that exist and for hidden states whose head was
deferred. Both walk over the rows in chunks, keep one fp32 buffer of a chunk, save two numbers per
row, and recompute the chunk in the backward, so that nothing of size `[tokens, vocabulary]` is ever
allocated beyond the gradient of given logits itself.

Per row, with x the logits after temperature, m a bound and z = sum exp(x - m):
log p(label) = x[label] - m - log z, entropy = log z - sum exp(x - m) (x - m) / z, and
d x = d_log_prob * (onehot - p) - d_entropy * p * (log p + entropy).
Vocabulary shards are joined by their (m, z, sum exp(x - m)(x - m), x[label]): two small all-reduces
over all rows. Columns beyond the real vocabulary never count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

LOGIT_CHUNK_BYTES = 4 << 20
"""fp32 buffer for logits that exist: small enough for a CPU's cache."""
HIDDEN_CHUNK_BYTES = 64 << 20
"""fp32 buffer for logits computed from hidden states: large enough for an efficient matrix product."""


@dataclass(frozen=True, kw_only=True)
class _Head:
    """What turns a chunk of rows into logits, and the label columns of this vocabulary shard."""

    rows: torch.Tensor
    """[n, columns] logits or [n, hidden] hidden states."""
    weight: torch.Tensor | None
    columns: int
    """Real vocabulary columns on this rank."""
    column: torch.Tensor
    """[n] label's column on this rank, clamped into range."""
    owned: torch.Tensor
    """[n] bool, whether the label lies on this rank."""
    temperature: float
    chunk: int

    def slices(self) -> Iterator[slice]:
        for start in range(0, self.rows.shape[0], self.chunk):
            yield slice(start, min(start + self.chunk, self.rows.shape[0]))

    def logits(self, at: slice, buffer: torch.Tensor) -> torch.Tensor:
        """Logits of a chunk after temperature, [chunk, columns], in the first rows of `buffer`."""
        out = buffer[: at.stop - at.start]
        if self.weight is None:
            out.copy_(self.rows[at, : self.columns])
        elif out.dtype == self.rows.dtype:
            torch.mm(self.rows[at], self.weight[: self.columns].t(), out=out)
        else:
            out.copy_(self.rows[at] @ self.weight[: self.columns].t())
        return out if self.temperature == 1.0 else out.div_(self.temperature)

    def buffer(self) -> torch.Tensor:
        rows = min(self.chunk, self.rows.shape[0])
        return torch.empty(rows, self.columns, dtype=_working_dtype(self.rows), device=self.rows.device)


def _working_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _statistics(head: _Head, want_entropy: bool, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log prob of the label, log-sum-exp, entropy), each [n]; entropy is zeros when not wanted."""
    count, like = head.rows.shape[0], {"dtype": _working_dtype(head.rows), "device": head.rows.device}
    # A shard without real columns bounds nothing and adds nothing.
    top = torch.full((count,), torch.finfo(torch.float32).min / 4, **like)
    total, moment, target = (torch.zeros(count, **like) for _ in range(3))
    if head.columns:
        x_buffer, e_buffer = head.buffer(), head.buffer()
        for at in head.slices():
            x = head.logits(at, x_buffer)
            torch.amax(x, -1, out=top[at])
            target[at] = x.gather(1, head.column[at, None])[:, 0]
            x.sub_(top[at, None])
            e = torch.exp(x, out=e_buffer[: x.shape[0]])
            torch.sum(e, -1, out=total[at])
            if want_entropy:
                torch.sum(e.mul_(x), -1, out=moment[at])
        target *= head.owned
    if group is not None and group.size() > 1:
        peak = top.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shift = top - peak
        scale = shift.exp()
        joined = torch.stack([total * scale, scale * (moment + shift * total), target])
        dist.all_reduce(joined, group=group)
        top, (total, moment, target) = peak, joined.unbind(0)
    log_total = total.log()
    lse = top + log_total
    return target - lse, lse, log_total - moment / total if want_entropy else torch.zeros_like(lse)


def _logit_gradients(
    head: _Head, lse: torch.Tensor, entropy: torch.Tensor, d_log_prob: torch.Tensor, d_entropy: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Gradients of the logits before temperature, chunk by chunk, in a buffer that the next chunk reuses."""
    if not head.columns:
        return
    x_buffer = head.buffer()
    p_buffer = head.buffer() if d_entropy is not None else None
    for at in head.slices():
        log_p = head.logits(at, x_buffer).sub_(lse[at, None])
        if d_entropy is None or p_buffer is None:
            gradient = log_p.exp_().mul_(-d_log_prob[at, None])
        else:
            p = torch.exp(log_p, out=p_buffer[: log_p.shape[0]])
            # -(d_log_prob + d_entropy * (log p + entropy)) * p
            gradient = log_p.add_(entropy[at, None]).mul_(d_entropy[at, None]).add_(d_log_prob[at, None])
            gradient = gradient.neg_().mul_(p)
        gradient.scatter_add_(1, head.column[at, None], (d_log_prob[at] * head.owned[at])[:, None])
        yield at, gradient if head.temperature == 1.0 else gradient.div_(head.temperature)


class _TokenLogProbs(torch.autograd.Function):
    """(log prob, entropy) per row from logits, or from hidden states and the head's weight."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor | None,
        labels: torch.Tensor,
        vocab_size: int,
        temperature: float,
        want_entropy: bool,
        group: Any,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shard = rows.shape[-1] if weight is None else weight.shape[0]
        first = shard * (group.rank() if group is not None else 0)
        columns = min(max(vocab_size - first, 0), shard)
        column = labels - first
        owned = (column >= 0) & (column < columns)
        ctx.head = (columns, temperature, chunk, want_entropy)
        column = column.clamp(0, max(columns - 1, 0))
        head = _Head(
            rows=rows,
            weight=weight,
            columns=columns,
            column=column,
            owned=owned,
            temperature=temperature,
            chunk=chunk,
        )
        log_prob, lse, entropy = _statistics(head, want_entropy, group)
        ctx.save_for_backward(rows, weight, column, owned, lse, entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        rows, weight, column, owned, lse, entropy = ctx.saved_tensors
        columns, temperature, chunk, want_entropy = ctx.head
        head = _Head(
            rows=rows,
            weight=weight,
            columns=columns,
            column=column,
            owned=owned,
            temperature=temperature,
            chunk=chunk,
        )
        chunks = _logit_gradients(head, lse, entropy, grads[0], grads[1] if want_entropy else None)
        if weight is None:
            d_rows = torch.empty_like(rows)
            d_rows[:, columns:] = 0
            for at, gradient in chunks:
                d_rows[at, :columns] = gradient
            return d_rows, None, None, None, None, None, None, None
        d_rows = torch.zeros_like(rows)
        d_weight = torch.zeros(weight.shape, dtype=_working_dtype(rows), device=weight.device)
        for at, gradient in chunks:
            gradient = gradient.to(rows.dtype)
            torch.mm(gradient, weight[:columns], out=d_rows[at])
            if d_weight.dtype == rows.dtype:
                d_weight[:columns].addmm_(gradient.t(), rows[at])
            else:
                d_weight[:columns] += gradient.t() @ rows[at]
        return d_rows, d_weight.to(weight.dtype), None, None, None, None, None, None


def token_log_probs(
    source: torch.Tensor,
    labels: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    tp_group: Any = None,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each row's label, and on request the entropy of its distribution.

    Args:
        source: logits [n, vocabulary / tp], or with `weight` hidden states [n, hidden] (whole rows on every
            tensor-parallel rank; see `modeling.head.head_input` for the mapping that sums their gradients).
        labels: [n] int64 token ids.
        weight: [vocabulary / tp, hidden] of the head, when `source` holds hidden states.
        rows: int64 indices of the rows to compute; the others read 0 and have no gradient. An empty one
            still runs the head on one row, with a gradient of zero, so that every parameter takes part.
        vocab_size: real vocabulary; padded columns beyond it never count.
        temperature: logits are divided by it.
        entropy: also return entropies.
        tp_group: process group over which the vocabulary is split.
        chunk_rows: rows per chunk; by default as many as a fixed buffer holds.

    Returns:
        log-probs [n] and entropies [n] or None, in fp32 (fp64 for fp64 sources).
    """
    size = tp_group.size() if tp_group is not None else 1
    shard = source.shape[-1] if weight is None else weight.shape[0]
    real = shard * size if vocab_size is None else vocab_size
    count, idle = source.shape[0], False
    if rows is not None:
        idle = rows.numel() == 0
        rows = rows.new_zeros(1) if idle else rows
        source, labels = source.index_select(0, rows), labels.index_select(0, rows)
    if chunk_rows is None:
        budget = LOGIT_CHUNK_BYTES if weight is None else HIDDEN_CHUNK_BYTES
        chunk_rows = max(8, budget // (4 * shard))
    log_probs, entropies = _TokenLogProbs.apply(
        source, weight, labels, real, temperature, entropy, tp_group, chunk_rows
    )
    if idle:
        log_probs, entropies = (torch.nan_to_num(x, 0.0, 0.0, 0.0) * 0 for x in (log_probs, entropies))
    if rows is not None:
        log_probs = log_probs.new_zeros(count).index_put((rows,), log_probs)
        entropies = entropies.new_zeros(count).index_put((rows,), entropies) if entropy else entropies
    return log_probs, entropies if entropy else None
