"""Estimators of a KL divergence per token, and aggregations of a loss per token.

The divergence is that between the sampling policy and another one, with d = other - sampled, both log-probs of the
sampled token (Schulman 2020, "Approximating KL Divergence", joschu.net/blog/kl-approx.html). As values k1 and k3 are
unbiased, k2 is not. As losses, k2's gradient estimates the divergence's; k1's has mean zero and is offered for
monitoring and for comparison with other frameworks.

Log-probs that are far apart make exp(d) overflow, and a clip after it then has a gradient of NaN. So d is clamped
before every exp, as in verl and NeMo-RL; beyond the bound there is no gradient.

`kl_gradient` selects the gradient independently of the value:

- "value": the estimator's own gradient; only k2's is that of the divergence;
- "straight_through": k2's gradient, which is unbiased on samples of the policy (verl's k1+, k3+, abs+);
- "score_function": value x grad log p plus the value's own gradient, also unbiased (Tang and Munos 2025, arXiv
  2506.09477; NeMo-RL);
- "importance": the value times p / p_old, both differentiated, unbiased on samples of p_old (DeepSeek-V3.2, arXiv
  2512.02556; TRL's use_bias_correction_kl, slime).

An aggregation is a function of a view and a [tokens] loss, which it reduces to a micro-batch's share of the step's
loss. Those here divide by counts over the whole step, so the sum of all shares does not depend on the micro-batches.
Your own is such a function of the view's reductions.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from roll_batching.errors import LossError
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch
from roll_batching.settings.losses import KL_BOUND, Aggregation, KlGradient

LOG_RATIO_BOUND = 20.0
"""Log-ratios of tokens are clamped to +-20 before exp (verl, NeMo-RL)."""
SEQUENCE_LOG_RATIO_BOUND = 10.0
"""A sequence's mean log-ratio is clamped to at most 10 before exp (verl's GSPO)."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """`log_ratio` clamped to +-20, without gradient beyond, so that exp does not overflow."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k1(other: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """-d: unbiased, of either sign."""
    return sampled - other


def k2(other: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, never negative."""
    return (other - sampled).square() / 2


def k3(other: torch.Tensor, sampled: torch.Tensor, bound: float | None = KL_BOUND) -> torch.Tensor:
    """exp(d) - 1 - d, at most `bound`: never negative, unbiased unless bounded. None bounds only d, to +-20."""
    difference = bounded(other - sampled)
    divergence = difference.exp() - 1 - difference
    return divergence if bound is None else divergence.clamp(max=bound)


def absolute(other: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """|d|: biased, never negative; its gradient is +-1."""
    return (other - sampled).abs()


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
}


def with_gradient(
    value: torch.Tensor, kind: KlGradient, *, other: torch.Tensor, sampled: torch.Tensor, ratio: torch.Tensor
) -> torch.Tensor:
    """`value`, an estimate of the divergence between `sampled` and `other`, with the gradient that `kind` names.

    `ratio` is p / p_old of the tokens; "importance" multiplies the value by it.
    """
    if kind == "straight_through":
        # Value of the estimator, gradient of k2: its own value cancels.
        quadratic = k2(bounded(other - sampled), torch.zeros_like(sampled))
        return quadratic - quadratic.detach() + value.detach()
    if kind == "score_function":  # the factor is 1, its gradient that of log p
        return value * (sampled - sampled.detach()).exp()
    return value * ratio if kind == "importance" else value


# ---- aggregation


def token_mean(view: TokenView, per_token: torch.Tensor) -> torch.Tensor:
    """Mean over all counted tokens of the step (ROLL and verl: token-mean)."""
    return view.mean(per_token)


def sequence_mean(view: TokenView, per_token: torch.Tensor) -> torch.Tensor:
    """Mean over sequences, each the mean of its tokens (seq-mean-token-mean)."""
    return view.sequence_mean(per_token)


def sequence_sum(view: TokenView, per_token: torch.Tensor) -> torch.Tensor:
    """Mean over sequences, each the sum of its tokens (seq-mean-token-sum)."""
    return view.sequence_sum(per_token)


def rollout_mean(view: TokenView, per_token: torch.Tensor) -> torch.Tensor:
    """Mean over rollouts, each the mean of its samples, each the mean of its tokens. Reads `rollout_ids`."""
    return view.rollout_mean(per_token)


def rollout_token_mean(view: TokenView, per_token: torch.Tensor) -> torch.Tensor:
    """Mean over rollouts, each the mean over the tokens of all its samples (slime, miles). Reads `rollout_ids`."""
    return view.rollout_token_mean(per_token)


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


_BY_NAME = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "rollout_mean": rollout_mean,
    "rollout_token_mean": rollout_token_mean,
}


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
