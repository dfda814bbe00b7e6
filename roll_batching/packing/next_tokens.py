"""Tokens after the next one, by position of a pack: inputs and labels of the heads of multi-token prediction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from roll_batching.packing.pack_layout import PackLayout


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """Inputs and labels of the heads at the local positions of a pack; head k is entry k - 1 or k."""

    tokens: torch.Tensor
    """[heads + 1, tokens / cp] int64: entry k is the token k + 1 places after each, of the same sample; 0 where there
    is none. It is the input of head k + 1, and the label of head k."""
    rows: tuple[torch.Tensor, ...]
    """Per head int64, the local positions whose label counts."""
    counts: tuple[int, ...]
    """Per head, the number of such positions of the whole pack."""


def next_tokens(
    layout: PackLayout, heads: int, input_ids: torch.Tensor, counted: torch.Tensor, local_tokens: torch.Tensor
) -> NextTokens:
    """The `NextTokens` of a pack without shared prefixes.

    Args:
        layout: the pack's layout.
        heads: number of heads.
        input_ids: [tokens] int64, in pack order.
        counted: [tokens] bool; entry i is whether token i + 1 counts as a label.
        local_tokens: [tokens / cp] indices of this context-parallel rank's tokens.
    """
    here = np.arange(layout.tokens)
    tokens, rows, counts, local = [], [], [], local_tokens.to(input_ids.device)
    for ahead in range(heads + 1):
        before = np.minimum(here + ahead, layout.tokens - 1)  # its next token is the one that is meant
        exists = (here + ahead < layout.tokens) & (layout.segment_ids[before] == layout.segment_ids)
        exists &= layout.predicts[before]
        index, valid = (torch.from_numpy(x).to(input_ids.device) for x in (before, exists))
        label = input_ids[(index + 1).clamp(max=layout.tokens - 1)]
        tokens.append(torch.where(valid, label, 0)[local])
        if ahead:
            labelled = counted[index] & valid
            rows.append(labelled[local].nonzero()[:, 0])
            counts.append(int(labelled.sum()))
    return NextTokens(tokens=torch.stack(tokens), rows=tuple(rows), counts=tuple(counts))
