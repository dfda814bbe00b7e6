"""Positions of a batch on the host: which sample each belongs to, and which ones a mask counts."""

from __future__ import annotations

import torch

from roll_batching.data.samples import SampleBatch


def sample_of(batch: SampleBatch) -> torch.Tensor:
    """[tokens] int64: the row of the sample that a token belongs to."""
    return torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)


def by_prediction(batch: SampleBatch, name: str) -> torch.Tensor:
    """[tokens, ...] a token or next_token field where losses see it: at each position, what it says of the next token.

    A sample's last position, which has no next token, holds anything.
    """
    values: torch.Tensor = batch[name].cpu()
    return values.roll(-1, 0) if batch.schema[name].kind == "token" else values


def counted_positions(batch: SampleBatch, mask: str = "response_mask") -> torch.Tensor:
    """[tokens] bool: positions whose next token the token or next_token field `mask` counts; a sample's last never."""
    counted = by_prediction(batch, mask) != 0
    counted[batch.offsets[1:] - 1] = False
    return counted
