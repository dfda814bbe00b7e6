"""Policy-gradient objectives: surrogates of the ratio to the old policy, per token or per sequence.

Notation: r = p / p_old, A the advantage, sg stop-gradient. The common parts are in `losses.policy`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from roll_batching.losses.contract import Metric
from roll_batching.losses.estimators import LOG_RATIO_BOUND, SEQUENCE_LOG_RATIO_BOUND, bounded
from roll_batching.losses.policy import PolicyGradient, PolicyTokens
from roll_batching.settings.losses import CISPOSettings, GMPOSettings, PolicySettings, SAPOSettings, TOPRSettings


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(PolicySettings, PolicyGradient):
    """Clipped policy gradient, -min(r A, clip(r) A) (PPO, Schulman et al. 2017, arXiv 1707.06347)."""

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See `PolicyGradient.surrogate`."""
        tokens, advantages = policy.tokens, policy.advantages
        ratio, beyond = self._ratio(policy)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        too_high = (advantages > 0) & (ratio > 1 + self.clip_high)
        too_low = (advantages < 0) & (ratio < 1 - self.clip_low)
        metrics = policy.ratio_metrics(ratio, beyond)
        metrics["clip_fraction"] = tokens.mean_metric((too_high | too_low).float())
        if self.dual_clip is not None:
            bound = torch.where(advantages < 0, -self.dual_clip * advantages, float("inf"))
            metrics["dual_clip_fraction"] = tokens.mean_metric((per_token > bound).float())
            per_token = torch.minimum(per_token, bound)
        return per_token, metrics

    def _ratio(self, policy: PolicyTokens) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens] the ratio to the old policy, and whether it was bounded."""
        if self.ratio == "token":
            return token_ratio(policy)
        log_ratio = policy.tokens.expand(policy.tokens.segment_mean(policy.log_ratio))
        if self.ratio == "sequence_token":
            log_ratio = log_ratio.detach() + (policy.log_probs - policy.log_probs.detach())
        return log_ratio.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp(), log_ratio > SEQUENCE_LOG_RATIO_BOUND


def token_ratio(policy: PolicyTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens] each token's ratio to the old policy, and whether it was bounded."""
    return bounded(policy.log_ratio).exp(), policy.log_ratio.abs() > LOG_RATIO_BOUND


@dataclass(frozen=True, kw_only=True)
class CISPOLoss(CISPOSettings, PolicyGradient):
    """-sg(clip(r)) A log p: clipped weights, but a gradient for every token (MiniMax-M1, 2025, arXiv 2506.13585).

    The weight is clipped to [1 - clip_low, 1 + clip_high]. `clip_low=1` has no lower bound, as in the paper;
    `clip_low=1, clip_high=0` is ROLL's `tis`.
    """

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See `PolicyGradient.surrogate`."""
        ratio, beyond = token_ratio(policy)
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high).detach()
        metrics = policy.ratio_metrics(ratio, beyond)
        metrics["clip_fraction"] = policy.tokens.mean_metric((ratio != weight).float())
        return -weight * policy.advantages * policy.log_probs, metrics


@dataclass(frozen=True, kw_only=True)
class SAPOLoss(SAPOSettings, PolicyGradient):
    """-(4 / t) sigmoid(t (r - 1)) A: a soft gate instead of a clip (SAPO, Gao et al. 2025, arXiv 2511.20347)."""

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See `PolicyGradient.surrogate`."""
        ratio, beyond = token_ratio(policy)
        span = self.temperature_positive - self.temperature_negative
        temperature = self.temperature_negative + span * (policy.advantages > 0).to(ratio.dtype)
        gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
        return -gate * policy.advantages, policy.ratio_metrics(ratio, beyond)


@dataclass(frozen=True, kw_only=True)
class GMPOLoss(GMPOSettings, PolicyGradient):
    """-A exp(mean of clip(log r)): the geometric mean of clipped ratios (GMPO, Zhao et al. 2025, arXiv 2507.20673).

    log r is clipped at clip_high for positive A and at -clip_low for negative A. A is the mean over the sequence. The
    paper's aggregation is "sequence_mean".
    """

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See `PolicyGradient.surrogate`; equal at all tokens of a sequence."""
        tokens, log_ratio = policy.tokens, policy.log_ratio
        advantages = tokens.expand(tokens.segment_mean(policy.advantages))
        beyond = log_ratio.abs() > LOG_RATIO_BOUND
        bounded_log_ratio = bounded(log_ratio)
        clipped = torch.where(
            policy.advantages > 0,
            bounded_log_ratio.clamp(max=self.clip_high),
            torch.where(policy.advantages < 0, bounded_log_ratio.clamp(min=-self.clip_low), 0.0),
        )
        mean = tokens.expand(tokens.segment_mean(clipped)).clamp(max=SEQUENCE_LOG_RATIO_BOUND)
        metrics = policy.ratio_metrics(mean.exp(), beyond)
        was_clipped = (clipped != bounded_log_ratio) & (policy.advantages != 0)
        metrics["clip_fraction"] = tokens.mean_metric(was_clipped.float())
        return -advantages * mean.exp(), metrics


@dataclass(frozen=True, kw_only=True)
class GPGLoss(PolicyGradient):
    """-A log p, without ratio or clip (GPG, Chu et al. 2025, arXiv 2504.02546; for the estimator `gpg`)."""

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See `PolicyGradient.surrogate`."""
        return -policy.advantages * policy.log_probs, {}


@dataclass(frozen=True, kw_only=True)
class TOPRLoss(TOPRSettings, PolicyGradient):
    """-A log p for responses with positive reward, -sg(min(r, 1)) A log p for others, each with its weight.

    Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286), with a ratio per token as in ROLL (in the
    paper per sequence). Reads `rewards` (sample field).
    """

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See `PolicyGradient.surrogate`."""
        ratio, beyond = token_ratio(policy)
        positive = policy.tokens.per_token("rewards") > 0
        weight = torch.where(positive, self.positive_weight, self.negative_weight * ratio.clamp(max=1.0).detach())
        return -weight * policy.advantages * policy.log_probs, policy.ratio_metrics(ratio, beyond)
