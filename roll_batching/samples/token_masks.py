"""Per-token masks and sample indices of a batch, on the host."""

from __future__ import annotations

import torch

from roll_batching.errors import DataError
from roll_batching.samples.batch import SampleBatch


def sample_of(batch: SampleBatch) -> torch.Tensor:
    """[tokens] int64: the row of each token's sample."""
    return torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)


def by_prediction(batch: SampleBatch, name: str) -> torch.Tensor:
    """[tokens, ...] a token or next_token field, shifted so that position i has the value of token i + 1, as in losses.

    The value at a sample's last position is undefined.
    """
    values: torch.Tensor = batch[name].cpu()
    return values.roll(-1, 0) if batch.schema[name].kind == "token" else values


def mask_of(batch: SampleBatch, name: str) -> torch.Tensor:
    """[tokens] bool on the host: the token or next_token field `name` as a mask.

    Raises:
        DataError: for more than one value per token, or values other than bool, 0 and 1.
    """
    values: torch.Tensor = batch[name].cpu()
    if values.dim() != 1:
        raise DataError(f"the mask {name!r} has the shape {list(values.shape)}: give one value per token")
    if values.dtype is torch.bool:
        return values
    wrong = (values != 0) & (values != 1)  # NaN is neither
    if batch.schema[name].kind == "next_token":
        wrong[batch.offsets[1:] - 1] = False  # belongs to no token
    if len(positions := wrong.nonzero()):
        first = int(positions[0, 0])
        row = int(torch.searchsorted(batch.offsets, first, right=True)) - 1
        raise DataError(
            f"the mask {name!r} of sample {int(batch.ids[row])} is {values[first].item()} at position "
            f"{first - int(batch.offsets[row])}, one of {len(positions)} values that are neither 0 nor 1: a mask says "
            "what counts; weights of samples belong into a separate field (sample_weights), weights of tokens into "
            "the advantages"
        )
    return values == 1


def counted_positions(batch: SampleBatch, mask: str = "response_mask") -> torch.Tensor:
    """[tokens] bool: positions whose next token is in the mask field `mask`; never a sample's last position.

    Raises `DataError` for an invalid mask; see `mask_of`.
    """
    counted = mask_of(batch, mask)
    counted = counted.roll(-1, 0) if batch.schema[mask].kind == "token" else counted.clone()
    counted[batch.offsets[1:] - 1] = False
    return counted
