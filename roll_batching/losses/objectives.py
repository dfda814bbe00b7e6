"""Objectives as loss objects: supervised fine-tuning and the clipped policy gradient of PPO and GRPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from roll_batching.errors import LossError
from roll_batching.losses.contract import LossOutput, Max, Metric
from roll_batching.losses.views import TokenView

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]


def aggregate(view: TokenView, per_token: torch.Tensor, how: Aggregation) -> torch.Tensor:
    """This pack's share of a [tokens] loss, averaged over the whole step as `how` says.

    token_mean: over all tokens; sequence_mean: over sequences, each the mean of its tokens;
    sequence_sum: over sequences, each the sum of its tokens.
    """
    reductions = {"token_mean": view.mean, "sequence_mean": view.sequence_mean, "sequence_sum": view.sequence_sum}
    return reductions[how](per_token)


@dataclass(frozen=True, kw_only=True)
class SFTLoss:
    """Mean negative log-likelihood of the response tokens.

    Reads `response_mask` (token field).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)
    aggregation: Aggregation = "token_mean"

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss."""
        nll = -tokens.log_probs
        return LossOutput(aggregate(tokens, nll, self.aggregation), {"nll": tokens.mean_metric(nll)})


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Clipped policy gradient (PPO, Schulman et al. 2017, arXiv 1707.06347) with GRPO-style advantages.

    `clip_low` and `clip_high` bound the ratio to [1 - clip_low, 1 + clip_high] (clip-higher: DAPO,
    Yu et al. 2025, arXiv 2503.14476). `kl_coef` weights the k3 estimate of the divergence from the
    reference (Schulman 2020; GRPO, Shao et al. 2024, arXiv 2402.03300), `entropy_coef` an entropy bonus.

    Reads `response_mask`, `advantages` (sample or token field), `old_log_probs` (next_token; absent
    means strictly on-policy: the detached current ones), and `ref_log_probs` (next_token) when `kl_coef` > 0.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs", "entropy"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        if not (0 < self.clip_low <= 1 and self.clip_high > 0):
            raise LossError(
                f"clip range ({self.clip_low}, {self.clip_high}): give clip_low in (0, 1] and clip_high above 0"
            )
        if self.kl_coef < 0:
            raise LossError(f"kl_coef is {self.kl_coef}: give 0 or more")

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss, with the usual diagnostics."""
        log_probs, advantages = tokens.log_probs, tokens.per_token("advantages")
        old = tokens["old_log_probs"] if "old_log_probs" in tokens else log_probs.detach()
        log_ratio = log_probs - old
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        outside = torch.where(advantages > 0, ratio > 1 + self.clip_high, ratio < 1 - self.clip_low)
        metrics: dict[str, Metric] = {
            "approx_kl": tokens.mean_metric(k3(log_probs, old)),
            "clip_fraction": tokens.mean_metric((outside & (advantages != 0)).float()),
            "entropy": tokens.mean_metric(tokens.entropy),
            "ratio_max": Max(torch.where(tokens.mask(), ratio, 0.0).max().detach()),
        }
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * tokens.entropy
        if self.kl_coef:
            divergence = k3(tokens["ref_log_probs"], log_probs)
            per_token = per_token + self.kl_coef * divergence
            metrics["ref_kl"] = tokens.mean_metric(divergence)
        return LossOutput(aggregate(tokens, per_token, self.aggregation), metrics)


def k3(other: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate of KL(sampled || other) per token: exp(d) - 1 - d >= 0, d = other - sampled.

    `sampled` are log-probs under the policy that the tokens are drawn from.
    """
    difference = other - sampled
    return difference.exp() - 1 - difference
