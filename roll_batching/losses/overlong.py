"""Leaving out responses that were cut off at the length limit."""

from __future__ import annotations

import torch

from roll_batching.samples import SampleBatch


def mask_overlong(batch: SampleBatch, overlong: torch.Tensor, mask: str = "response_mask") -> SampleBatch:
    """`batch` whose `overlong` samples count nowhere: neither in the loss nor in its denominators.

    Overlong filtering (DAPO, Yu et al. 2025, arXiv 2503.14476): a response that was cut off says nothing
    about the quality of its tokens. `overlong` is bool [samples]. The head skips these positions.
    """
    sample = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    kept = ~overlong.bool().cpu()[sample].to(batch[mask].device)
    return batch.with_fields({mask: batch[mask] * kept}, {mask: batch.schema[mask]})
