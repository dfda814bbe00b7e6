"""Positions of a batch on the host: which sample each belongs to, and which ones a mask counts."""

from __future__ import annotations

import torch

from roll_batching.data.samples import SampleBatch


def sample_of(batch: SampleBatch) -> torch.Tensor:
    """[tokens] int64: the row of the sample that a token belongs to."""
    return torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)


def counted_positions(batch: SampleBatch, mask: str = "response_mask") -> torch.Tensor:
    """[tokens] bool: positions whose next token the `token` field `mask` counts; a sample's last position never."""
    following = (batch[mask].cpu() != 0).roll(-1, 0)
    following[batch.offsets[1:] - 1] = False
    return following
