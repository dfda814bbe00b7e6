"""Log-probabilities and entropies of labels under a vocabulary-parallel head, in tiles.

`token_log_probs` takes logits, or hidden states and the weight of a deferred head. Both walk over the
`[rows, vocabulary]` matrix in tiles with one or two tile buffers, save two numbers per row, and recompute each tile in
backward, so that no tensor of the matrix's size is allocated, except the gradient of given logits. Logits are tiled by
rows, sized for the cache. Hidden states are tiled by vocabulary columns with all rows: the head's weight is read once,
and each block of its gradient is one matrix product, written in place.

Per row, with x the logits after temperature, m a bound and z = sum exp(x - m):
log p(label) = x[label] - m - log z, entropy = log z - sum exp(x - m) (x - m) / z, and
d x = d_log_prob * (onehot - p) - d_entropy * p * (log p + entropy).
Tiles, and then vocabulary shards, are joined by their (m, z, sum exp(x - m)(x - m), x[label]), over shards with two
small all-reduces. Padded vocabulary columns never count. A row may have several labels, each with its log-prob.

On CUDA everything after a tile's matrix product is one kernel (`tile_kernels`) where rows have one label, and given
logits are a single tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from roll_batching.registry import module_with

TILE_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Bytes of a tile's fp32 buffer: on a CPU about its cache, on CUDA enough to keep the device busy."""
TILE_COLUMNS = 128
"""Columns of a deferred head's tile are a multiple of this: for unaligned rows cuBLAS selects kernels of a third of the
speed (measured on an H100 with 1,795 columns, cuBLAS 13.0)."""


@dataclass(frozen=True, kw_only=True)
class TiledLogits:
    """The matrix of logits by tiles, and the label columns of this vocabulary shard."""

    source: torch.Tensor
    """[any, shard] logits, whose rows `index` selects, or [rows, hidden] hidden states."""
    weight: torch.Tensor | None
    index: torch.Tensor | None
    columns: int
    """Real vocabulary columns on this rank."""
    column: torch.Tensor
    """[rows, labels] the labels' columns relative to this rank's first one; may be out of range."""
    temperature: float
    tile: tuple[int, int]
    """Rows and columns of a tile."""
    kernels: Any
    """The module `tile_kernels`, or None for plain torch operators."""

    def computed(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(a tile's logits before temperature, selected rows or None), as the kernels take them."""
        if self.weight is not None:
            return self.source[rows] @ self.weight[columns].t(), None
        if self.index is not None:
            return self.source[:, columns], self.index[rows]
        return self.source[rows, columns], None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the computation: fp32, or fp64 for fp64 sources."""
        return torch.float64 if self.source.dtype is torch.float64 else torch.float32

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of each tile."""
        count = len(self.column)
        for row in range(0, count, self.tile[0]):
            for column in range(0, self.columns, self.tile[1]):
                yield (
                    slice(row, min(row + self.tile[0], count)),
                    slice(column, min(column + self.tile[1], self.columns)),
                )

    def buffer(self) -> torch.Tensor:
        """A buffer for any tile."""
        size = min(self.tile[0], len(self.column)) * min(self.tile[1], self.columns)
        return torch.empty(size, dtype=self.dtype, device=self.source.device)

    def load(self, rows: slice, columns: slice, out: torch.Tensor) -> torch.Tensor:
        """A tile's logits after temperature, written to `out`."""
        if self.weight is None:
            if self.index is None:
                out.copy_(self.source[rows, columns])
            elif out.dtype == self.source.dtype and columns.stop == self.source.shape[1]:
                torch.index_select(self.source, 0, self.index[rows], out=out)
            else:
                out.copy_(self.source.index_select(0, self.index[rows])[:, columns])
        elif out.dtype == self.source.dtype:
            torch.mm(self.source[rows], self.weight[columns].t(), out=out)
        else:
            out.copy_(self.source[rows] @ self.weight[columns].t())
        return out if self.temperature == 1.0 else out.div_(self.temperature)

    def labels_in(self, rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """([n, labels] the labels' columns in the tile, clamped; [n, labels] whether they are in the tile)."""
        place = self.column[rows] - columns.start
        width = columns.stop - columns.start
        return place.clamp(0, width - 1), (place >= 0) & (place < width)


def shaped(buffer: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    """The part of `buffer` that holds a tile of this size."""
    shape = rows.stop - rows.start, columns.stop - columns.start
    return buffer[: shape[0] * shape[1]].view(shape)


def _statistics(logits: TiledLogits, want_entropy: bool, group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(log-probs of the labels [rows, labels], log-sum-exp, entropy [rows]); entropy is 0 unless `want_entropy`."""
    total, moment = logits.source.new_zeros(2, len(logits.column), dtype=logits.dtype).unbind(0)
    target = logits.source.new_zeros(logits.column.shape, dtype=logits.dtype)
    # The lowest bound, so that a shard without real columns contributes nothing.
    top = torch.full_like(total, torch.finfo(torch.float32).min / 4)
    kernels = logits.kernels
    x_buffer, e_buffer = (logits.buffer(), logits.buffer()) if kernels is None else (top, top)  # kernels use none
    for rows, columns in logits.tiles():
        if kernels is not None:
            tile, index = logits.computed(rows, columns)
            running = top[rows], total[rows], moment[rows], target[rows, 0]
            kernels.accumulate_tile(tile, index, logits.column[rows, 0] - columns.start, *running, logits.temperature)
            continue
        x = logits.load(rows, columns, shaped(x_buffer, rows, columns))
        place, inside = logits.labels_in(rows, columns)
        target[rows] += torch.where(inside, x.gather(1, place), 0.0)  # a clamped column may hold -inf
        bound = torch.maximum(top[rows], x.amax(-1))
        x.sub_(bound[:, None])
        e = torch.exp(x, out=shaped(e_buffer, rows, columns))
        # Sums so far are relative to the old bound m. For the new one, m', each term exp(x - m) grows by exp(m - m'),
        # and (x - m) by m - m'. The moment needs the total before it is rescaled.
        shift = top[rows] - bound
        scale = shift.exp()
        if want_entropy:
            moment[rows] = scale * (moment[rows] + shift * total[rows])
        total[rows] = scale * total[rows] + e.sum(-1)
        if want_entropy:
            moment[rows] += e.mul_(x).sum(-1)
        top[rows] = bound
    if group is not None and group.size() > 1:
        # The common bound first: sums of shards add up only relative to one bound.
        peak = top.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        shift = top - peak
        scale = shift.exp()
        parts = torch.stack([total * scale, scale * (moment + shift * total)], 1)
        joined = torch.cat([parts, target], 1)
        dist.all_reduce(joined, group=group)
        top, total, moment, target = peak, joined[:, 0], joined[:, 1], joined[:, 2:]
    log_total = total.log()  # at least 0: the largest logit contributes exp(0)
    lse = top + log_total
    return target - lse[:, None], lse, log_total - moment / total if want_entropy else torch.zeros_like(lse)


def _gradient(
    logits: TiledLogits,
    rows: slice,
    columns: slice,
    x: torch.Tensor,
    p_buffer: torch.Tensor | None,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> torch.Tensor:
    """The gradient of a tile of logits before temperature, computed in `x`."""
    lse, entropy, d_log_prob, d_entropy = saved
    log_p = logits.load(rows, columns, x).sub_(lse[rows, None])
    upstream = d_log_prob[rows].sum(1)
    if d_entropy is None or p_buffer is None:
        gradient = log_p.exp_().mul_(-upstream[:, None])
    else:
        p = torch.exp(log_p, out=shaped(p_buffer, rows, columns))
        # -p * (d_log_prob + d_entropy * (log p + entropy)) = p * (scale * log p + offset)
        scale = -d_entropy[rows]
        offset = scale * entropy[rows] - upstream
        gradient = torch.addcmul(offset[:, None], log_p, scale[:, None], out=log_p).mul_(p)
    # A label of another tile or shard has a clamped column here, and adds 0 to it.
    place, inside = logits.labels_in(rows, columns)
    gradient.scatter_add_(1, place, d_log_prob[rows] * inside)
    return gradient if logits.temperature == 1.0 else gradient.div_(logits.temperature)


class _TokenLogProbs(torch.autograd.Function):
    """(log-probs of labels, entropy) per row from logits, or from hidden states and the head's weight."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        weight: torch.Tensor | None,
        index: torch.Tensor | None,
        labels: torch.Tensor,
        vocab_size: int,
        temperature: float,
        want_entropy: bool,
        group: Any,
        tile: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shard = source.shape[-1] if weight is None else weight.shape[0]
        first = shard * (group.rank() if group is not None else 0)
        columns = min(max(vocab_size - first, 0), shard)
        column = labels - first
        ctx.options = {"columns": columns, "temperature": temperature, "tile": tile}
        ctx.options["kernels"] = _kernels(source) if labels.shape[1] == 1 else None
        logits = TiledLogits(source=source, weight=weight, index=index, column=column, **ctx.options)
        log_prob, lse, entropy = _statistics(logits, want_entropy, group)
        ctx.save_for_backward(source, weight, index, column, lse, entropy)
        ctx.set_materialize_grads(False)  # without a gradient of entropies, their terms are left out
        if not want_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        source, weight, index, column, lse, entropy = ctx.saved_tensors
        logits = TiledLogits(source=source, weight=weight, index=index, column=column, **ctx.options)
        d_log_prob, d_entropy = grads
        d_log_prob = lse.new_zeros(column.shape) if d_log_prob is None else d_log_prob.contiguous()
        d_entropy = None if d_entropy is None else d_entropy.contiguous()
        saved = lse, entropy, d_log_prob, d_entropy
        if weight is None:
            return _backward_logits(logits, saved), *[None] * 8
        return *_backward_hidden(logits, saved, weight, ctx.needs_input_grad[1]), *[None] * 7


def _backward_logits(logits: TiledLogits, saved: Any) -> torch.Tensor:
    """The gradient of given logits, tile by tile; `saved` as for `_gradient`."""
    every_row = logits.index is None
    # Tiles write every row that they compute; rows outside `index` have no gradient, and nor have padded columns.
    d_source = torch.empty_like(logits.source) if every_row else torch.zeros_like(logits.source)
    d_source[:, logits.columns :] = 0
    if logits.kernels is not None:
        for rows, columns in logits.tiles():
            tile, index = logits.computed(rows, columns)
            _kernel_gradient(
                logits, rows, columns, tile, index, d_source[rows if every_row else slice(None), columns], saved
            )
        return d_source
    in_place = every_row and d_source.dtype == logits.dtype
    x_buffer = logits.buffer()
    p_buffer = None if saved[3] is None else logits.buffer()
    for rows, columns in logits.tiles():
        x = d_source[rows, columns] if in_place else shaped(x_buffer, rows, columns)
        gradient = _gradient(logits, rows, columns, x, p_buffer, saved)
        if logits.index is not None:
            d_source[:, columns].index_copy_(0, logits.index[rows], gradient.to(d_source.dtype))
        elif not in_place:
            d_source[rows, columns] = gradient
    return d_source


def _backward_hidden(
    logits: TiledLogits, saved: Any, weight: torch.Tensor, trains_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of hidden states and of the head's weight (None unless it is trained), tile by tile."""
    source = logits.source
    # In fp32: the tiles of the vocabulary add up here, and in bf16 each sum would round.
    d_rows = torch.zeros(source.shape, dtype=logits.dtype, device=source.device)
    d_weight = torch.empty_like(weight) if trains_weight else None  # as large as the head: a third of the time
    if d_weight is not None:
        d_weight[logits.columns :] = 0
    kernels = logits.kernels
    x_buffer = logits.buffer() if kernels is None else d_rows  # kernels use none
    p_buffer = None if saved[3] is None or kernels is not None else logits.buffer()
    for rows, columns in logits.tiles():
        if kernels is not None:
            gradient, _ = logits.computed(rows, columns)
            _kernel_gradient(logits, rows, columns, gradient, None, gradient, saved)
        else:
            gradient = _gradient(logits, rows, columns, shaped(x_buffer, rows, columns), p_buffer, saved)
            gradient = gradient.to(source.dtype)
        if d_weight is not None:
            torch.mm(gradient.t(), source, out=d_weight[columns])
        if d_rows.dtype == source.dtype:
            d_rows.addmm_(gradient, weight[columns])
        else:
            d_rows += gradient @ weight[columns]
    return d_rows.to(source.dtype), d_weight


def _kernel_gradient(
    logits: TiledLogits,
    rows: slice,
    columns: slice,
    tile: torch.Tensor,
    index: torch.Tensor | None,
    out: torch.Tensor,
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
) -> None:
    """`_gradient` by a Triton kernel, from a computed tile into `out`."""
    lse, entropy, d_log_prob, d_entropy = saved
    of_entropy = None if d_entropy is None else d_entropy[rows]
    place = logits.column[rows, 0] - columns.start
    logits.kernels.tile_gradient(
        tile, out, index, place, lse[rows], entropy[rows], d_log_prob[rows, 0], of_entropy, logits.temperature
    )


def _kernels(source: torch.Tensor) -> Any:
    """`tile_kernels` if it supports `source`: on CUDA, at most fp32, with column stride 1."""
    fits = source.device.type == "cuda" and source.dtype is not torch.float64 and source.stride(-1) == 1
    return module_with("triton", "roll_batching.losses.tile_kernels") if fits else None


def tile_shape(count: int, columns: int, source: torch.Tensor, *, deferred: bool, chunk: int | None) -> tuple[int, int]:
    """Rows and columns of a tile: all columns for given logits, all rows for a deferred head."""
    numbers = TILE_BYTES.get(source.device.type, TILE_BYTES["cuda"]) // 4  # of fp32
    if deferred:
        wide = numbers // max(count, 1) // TILE_COLUMNS * TILE_COLUMNS
        return max(count, 1), chunk or max(wide, TILE_COLUMNS)
    if chunk is None and _kernels(source) is not None:
        return max(count, 1), max(columns, 1)
    return max(chunk or numbers // max(columns, 1), 1), max(columns, 1)


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
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability of each row's label or labels, and on request the entropy of its distribution.

    Args:
        source: logits [n, vocabulary / tp], or with `weight` hidden states [n, hidden] (not sharded; see
            `modeling.head.head_input` for the mapping that sums their gradients over TP).
        labels: [n] int64 token ids, or [n, labels].
        weight: [vocabulary / tp, hidden] of the head, when `source` holds hidden states.
        rows: int64 indices of the rows to compute; the others are 0 without gradient. If empty, the head still runs on
            one row with a gradient of 0, so that every parameter gets a gradient.
        vocab_size: real vocabulary size; padded columns never count.
        temperature: logits are divided by it.
        entropy: whether to return entropies.
        tp_group: process group that shards the vocabulary.
        chunk: rows (given logits) or vocabulary columns (deferred head) of a tile; by default as many as fit
            `TILE_BYTES`.

    Returns:
        log-probs, of the shape of `labels`, and entropies [n] or None, in fp32 (fp64 for fp64 sources).
    """
    size = tp_group.size() if tp_group is not None else 1
    shard = source.shape[-1] if weight is None else weight.shape[0]
    real = shard * size if vocab_size is None else vocab_size
    count, idle, index, single = source.shape[0], False, None, labels.dim() == 1
    labels = labels[:, None] if single else labels
    if rows is not None:
        idle = rows.numel() == 0
        rows = rows.new_zeros(1) if idle else rows
        labels = labels.index_select(0, rows)
        if weight is None:
            index = rows  # selected per tile: a copy of all rows would be as large as the logits
        else:
            source = source.index_select(0, rows)
    tile = tile_shape(len(labels), shard, source, deferred=weight is not None, chunk=chunk)
    log_probs, entropies = _TokenLogProbs.apply(
        source, weight, index, labels, real, temperature, entropy, tp_group, tile
    )
    if idle:  # 0 * NaN is NaN: a filler's states may hold anything
        log_probs, entropies = (torch.nan_to_num(x, 0.0, 0.0, 0.0) * 0 for x in (log_probs, entropies))
    if rows is not None:
        log_probs = log_probs.new_zeros(count, labels.shape[1]).index_put((rows,), log_probs)
        entropies = entropies.new_zeros(count).index_put((rows,), entropies) if entropy else entropies
    return log_probs[:, 0] if single else log_probs, entropies if entropy else None
