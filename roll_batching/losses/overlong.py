"""Overlong filtering: excludes truncated responses from the loss."""

from __future__ import annotations

import torch

from roll_batching.samples import SampleBatch


def mask_overlong(batch: SampleBatch, overlong: torch.Tensor, mask: str = "response_mask") -> SampleBatch:
    """`batch` with `mask` cleared for `overlong` samples (bool [samples]), in the loss and in its denominators.

    Overlong filtering (DAPO, Yu et al. 2025, arXiv 2503.14476): the reward of a truncated response says nothing about
    its tokens. The head skips these positions.
    """
    sample = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    is_counted = ~overlong.bool().cpu()[sample].to(batch[mask].device)
    return batch.with_fields({mask: batch[mask] * is_counted}, {mask: batch.schema[mask]})
