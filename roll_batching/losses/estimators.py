"""Per-token estimates of the divergence of the sampling policy from another one.

With d = other - sampled, both log-probs of the sampled token (Schulman 2020, "Approximating KL
Divergence", joschu.net/blog/kl-approx.html). As values k1 and k3 are unbiased, k2 is not. As losses,
k2's gradient estimates the divergence's; k1's has mean zero and is offered for monitoring and for
comparison with other frameworks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3"]


def k1(other: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """-d: unbiased, of either sign."""
    return sampled - other


def k2(other: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased, never negative."""
    return (other - sampled).square() / 2


def k3(other: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased, never negative."""
    difference = other - sampled
    return difference.exp() - 1 - difference


ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
