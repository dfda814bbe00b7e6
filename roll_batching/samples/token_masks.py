"""Positions of a batch on the host: which sample each belongs to, and which ones a mask counts."""

from __future__ import annotations

import torch

from roll_batching.errors import DataError
from roll_batching.samples.batch import SampleBatch


def sample_of(batch: SampleBatch) -> torch.Tensor:
    """[tokens] int64: the row of the sample that a token belongs to."""
    return torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)


def by_prediction(batch: SampleBatch, name: str) -> torch.Tensor:
    """[tokens, ...] a token or next_token field where losses see it: at each position, what it says of the next token.

    A sample's last position, which has no next token, holds anything.
    """
    values: torch.Tensor = batch[name].cpu()
    return values.roll(-1, 0) if batch.schema[name].kind == "token" else values


def mask_of(batch: SampleBatch, name: str) -> torch.Tensor:
    """[tokens] bool on the host: the token or next_token field `name`, which says what counts.

    Raises `DataError` for more than one value per token, and for values that are neither bool nor exactly 0 and 1.
    """
    values: torch.Tensor = batch[name].cpu()
    if values.dim() != 1:
        raise DataError(f"the mask {name!r} has the shape {list(values.shape)}: give one value per token")
    if values.dtype is torch.bool:
        return values
    wrong = (values != 0) & (values != 1)  # NaN is neither
    if batch.schema[name].kind == "next_token":
        wrong[batch.offsets[1:] - 1] = False  # speaks of nothing
    if len(places := wrong.nonzero()):
        at = int(places[0, 0])
        row = int(torch.searchsorted(batch.offsets, at, right=True)) - 1
        raise DataError(
            f"the mask {name!r} of sample {int(batch.ids[row])} is {values[at].item()} at position "
            f"{at - int(batch.offsets[row])}, one of {len(places)} values that are neither 0 nor 1: a mask says what "
            "counts; weights of samples belong into a field of their own (sample_weights), weights of tokens into the "
            "advantages"
        )
    return values == 1


def counted_positions(batch: SampleBatch, mask: str = "response_mask") -> torch.Tensor:
    """[tokens] bool: positions whose next token the token or next_token field `mask` counts; a sample's last never.

    Raises `DataError` for what is no mask; see `mask_of`.
    """
    counted = mask_of(batch, mask)
    counted = counted.roll(-1, 0) if batch.schema[mask].kind == "token" else counted.clone()
    counted[batch.offsets[1:] - 1] = False
    return counted
