"""Per-token estimators of the KL divergence between the sampling policy and another one.

With d = other - sampled, both log-probs of the sampled token (Schulman 2020, "Approximating KL
Divergence", joschu.net/blog/kl-approx.html). As values k1 and k3 are unbiased, k2 is not. As losses,
k2's gradient estimates the divergence's; k1's has mean zero and is offered for monitoring and for
comparison with other frameworks.

Log-probs that are far apart make exp(d) overflow, and a clip after it then has a gradient of NaN. So d is clamped
before every exp, as in verl and NeMo-RL; beyond the bound there is no gradient.

`kl_gradient` selects the gradient independently of the value:

- "value": the estimator's own gradient; only k2's is that of the divergence;
- "straight_through": k2's gradient, which is unbiased on samples of the policy (verl's k1+, k3+, abs+);
- "score_function": value x grad log p plus the value's own gradient, also unbiased (Tang and Munos 2025, arXiv
  2506.09477; NeMo-RL);
- "importance": the value times p / p_old, both differentiated, unbiased on samples of p_old (DeepSeek-V3.2, arXiv
  2512.02556; TRL's use_bias_correction_kl, slime).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from roll_batching.settings.losses import KL_BOUND, KlGradient

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
    value: torch.Tensor, how: KlGradient, *, other: torch.Tensor, sampled: torch.Tensor, ratio: torch.Tensor
) -> torch.Tensor:
    """`value`, an estimate of the divergence between `sampled` and `other`, with the gradient `how`.

    `ratio` is p / p_old of the tokens; "importance" multiplies the value by it.
    """
    if how == "straight_through":
        # Value of the estimator, gradient of k2: its own value cancels.
        quadratic = k2(bounded(other - sampled), torch.zeros_like(sampled))
        return quadratic - quadratic.detach() + value.detach()
    if how == "score_function":  # the factor is 1, its gradient that of log p
        return value * (sampled - sampled.detach()).exp()
    return value * ratio if how == "importance" else value
