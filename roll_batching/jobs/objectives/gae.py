"""Generalised advantage estimation over responses (Schulman et al. 2016, arXiv 1506.02438)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from roll_batching.jobs.observe.metrics_file import Metrics
from roll_batching.samples import SampleBatch


def generalised_advantages(
    batch: SampleBatch,
    counted: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    gamma: float,
    lambd: float,
) -> torch.Tensor:
    """Advantages of tokens: [tokens] float64; undefined where `counted` is false.

    With V = 0 after the last counted token:

        delta_t = r_t + gamma V_next - V_t,    A_t = delta_t + gamma lambd A_next.

    `rewards` and `values` are [tokens] float64, all by the position that predicts the token. "Next" is the next counted
    token: tokens between them, which the policy did not write, have no step and no value (as in verl).
    """
    count, ends, result = len(batch), batch.offsets[1:], torch.zeros_like(rewards)
    next_value, next_advantage = torch.zeros(2, count, dtype=torch.float64)
    longest = int(batch.lengths.max()) if count else 0
    for back in range(longest):  # from the samples' ends, one token of every sample at a time
        rows = torch.nonzero(batch.lengths > back)[:, 0]
        rows = rows[counted[ends[rows] - 1 - back]]
        at = ends[rows] - 1 - back
        delta = rewards[at] + gamma * next_value[rows] - values[at]
        result[at] = delta + gamma * lambd * next_advantage[rows]
        next_value[rows], next_advantage[rows] = values[at], result[at]
    return result


def explained_variance(
    returns: torch.Tensor, values: torch.Tensor, sum_over_ranks: Callable[..., list[float]]
) -> Metrics:
    """The share of the variance of `returns` that `values` explain, 1 at best; left out where returns are equal.

    Both are this rank's, [n] float64. Collective.
    """
    error = returns - values
    parts = (float(len(returns)), *(float(x.sum()) for x in (returns, returns.square(), error, error.square())))
    count, total, squares, error_total, error_squares = sum_over_ranks(*parts)
    if not count:
        return {}
    variance = squares / count - (total / count) ** 2
    if variance <= 1e-12 * max(squares / count, 1e-12):
        return {}
    return {"value_explained_variance": 1 - (error_squares / count - (error_total / count) ** 2) / variance}
