"""Aggregations: reduce a loss per token to a micro-batch's share of the step's loss.

An aggregation is a function of a view and a [tokens] loss. These divide by counts over the whole step, so the sum of
all shares does not depend on the micro-batches. Your own is such a function of the view's reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from roll_batching.errors import LossError
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch
from roll_batching.settings.losses import Aggregation


def token_mean(view: TokenView, per_token: torch.Tensor) -> torch.Tensor:
    """Mean over all counted tokens of the step (ROLL and verl: token-mean)."""
    return view.mean(per_token)


def sequence_mean(view: TokenView, per_token: torch.Tensor) -> torch.Tensor:
    """Mean over sequences, each the mean of its tokens (seq-mean-token-mean)."""
    return view.sequence_mean(per_token)


def sequence_sum(view: TokenView, per_token: torch.Tensor) -> torch.Tensor:
    """Mean over sequences, each the sum of its tokens (seq-mean-token-sum)."""
    return view.sequence_sum(per_token)


def constant_mean(length: int) -> Callable[[TokenView, torch.Tensor], torch.Tensor]:
    """Mean over sequences of the sum over tokens, divided by a constant such as the longest response allowed.

    Dr. GRPO (Liu et al. 2025, arXiv 2503.20783): no response is weighted by its own length.
    Raises `LossError` unless `length` is positive.
    """
    _check_divisor("constant_mean", length)
    return lambda view, per_token: view.sequence_sum(per_token) / length


def constant_sum(length: float) -> Callable[[TokenView, torch.Tensor], torch.Tensor]:
    """Sum over all tokens of the step, divided by a constant (verl: token-sum; ROLL: seq-mean-token-sum-norm).

    Raises `LossError` unless `length` is positive.
    """
    _check_divisor("constant_sum", length)
    return lambda view, per_token: view.sum(per_token) / length


def _check_divisor(name: str, length: float) -> None:
    if not 0 < length < math.inf:
        raise LossError(f"{name}({length}): give a positive number, such as the longest response allowed")


_BY_NAME = {"token_mean": token_mean, "sequence_mean": sequence_mean, "sequence_sum": sequence_sum}


def resolve_aggregation(how: Aggregation) -> Callable[[TokenView, torch.Tensor], torch.Tensor]:
    """The aggregation of a name, which the loss's settings have checked; a function is returned unchanged."""
    return how if callable(how) else _BY_NAME[how]


# ---- overlong


def mask_overlong(batch: SampleBatch, overlong: torch.Tensor, mask: str = "response_mask") -> SampleBatch:
    """`batch` with `mask` cleared for `overlong` samples (bool [samples]), in the loss and in its denominators.

    Overlong filtering (DAPO, Yu et al. 2025, arXiv 2503.14476): the reward of a truncated response says nothing about
    its tokens. The head skips these positions.
    """
    sample = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
    is_counted = ~overlong.bool().cpu()[sample].to(batch[mask].device)
    return batch.with_fields({mask: batch[mask] * is_counted}, {mask: batch.schema[mask]})
