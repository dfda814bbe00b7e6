"""Log-probs of several tokens per position: the most likely ones of a model, and those of given tokens.

A teacher gives the log-probs of its k most likely tokens (`top_log_probs`); a student computes its own log-probs of
these tokens (`labels_with_candidates`), beside that of the sampled token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from roll_batching.errors import LossError
from roll_batching.losses.vocab_parallel import TiledLogits, shaped, tile_shape
from roll_batching.packing.batch import PackedBatch


def labels_with_candidates(pack: PackedBatch, field: str) -> torch.Tensor:
    """[tokens / cp, 1 + k] int64: the label of each local position, then its tokens in the next_token field `field`.

    Raises:
        LossError: where samples of the pack share positions, or the batch has no such field.
    """
    if pack.computed_tokens is not None:
        raise LossError(
            f"{field!r} gives each position of a sample its own tokens, and samples of this pack share positions: plan "
            "without prefixes (share_prefixes: false)"
        )
    if field not in pack.fields or pack.kinds[field] != "next_token":
        raise LossError(f"the loss needs log-probs of the tokens in {field!r}, a next_token field that the batch lacks")
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
