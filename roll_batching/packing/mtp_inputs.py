"""Inputs and labels of multi-token prediction heads: the tokens of a pack, shifted on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from roll_batching.packing.pack_layout import PackLayout


@dataclass(frozen=True, kw_only=True)
class MTPInputs:
    """Inputs and labels of all heads at the local positions of a pack; heads are numbered from 1."""

    tokens: torch.Tensor
    """[heads + 1, tokens / cp] int64: entry k holds, for each position, the token k + 1 places later in its sample, or
    0 behind the sample's end. Entry k is the label of head k and the input of head k + 1."""
    rows: tuple[torch.Tensor, ...]
    """Per head, the local positions whose label counts, int64; entry k - 1 is head k's."""
    counts: tuple[int, ...]
    """Per head, the number of such positions in the whole pack, over all context-parallel ranks."""


def shift_tokens(
    layout: PackLayout, heads: int, input_ids: torch.Tensor, counted: torch.Tensor, local_tokens: torch.Tensor
) -> MTPInputs:
    """Shift the tokens of a pack without shared prefixes for its MTP heads.

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
        before = np.minimum(here + ahead, layout.tokens - 1)  # predicts the token k + 1 places later
        exists = (here + ahead < layout.tokens) & (layout.segment_ids[before] == layout.segment_ids)
        exists &= layout.predicts[before]
        index, valid = (torch.from_numpy(x).to(input_ids.device) for x in (before, exists))
        label = input_ids[(index + 1).clamp(max=layout.tokens - 1)]
        tokens.append(torch.where(valid, label, 0)[local])
        if ahead:
            labelled = counted[index] & valid
            rows.append(labelled[local].nonzero()[:, 0])
            counts.append(int(labelled.sum()))
    return MTPInputs(tokens=torch.stack(tokens), rows=tuple(rows), counts=tuple(counts))
