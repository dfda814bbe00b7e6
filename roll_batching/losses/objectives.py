"""Objectives as loss objects: supervised fine-tuning and the clipped policy gradients of PPO, GRPO and kin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from roll_batching.errors import LossError
from roll_batching.losses.aggregation import Aggregation, resolve_aggregation
from roll_batching.losses.contract import LossOutput, Max, Metric
from roll_batching.losses.estimators import (
    ESTIMATORS,
    KL_BOUND,
    LOG_RATIO_BOUND,
    SEQUENCE_LOG_RATIO_BOUND,
    KlEstimator,
    bounded,
    k3,
)
from roll_batching.losses.views import TokenView


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
        return LossOutput(resolve_aggregation(self.aggregation)(tokens, nll), {"nll": tokens.mean_metric(nll)})


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Clipped policy gradient (PPO, Schulman et al. 2017, arXiv 1707.06347) with GRPO-style advantages.

    Reads `response_mask`, `advantages` (sample or token field), `old_log_probs` (next_token; absent
    means strictly on-policy: the detached current ones), and what single options name.

    Log-ratios are bounded before exp (see `losses.estimators`); the metrics `ratio_bounded`, `ref_kl_bounded` and
    `engine_ratio_bounded` are the shares of counted tokens for which that made a difference.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs", "entropy"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)
    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher: DAPO, Yu et al. 2025, arXiv 2503.14476)."""
    dual_clip: float | None = None
    """Under a negative advantage A the loss is at most -dual_clip * A, above 1 (Ye et al. 2020, arXiv 1912.09729)."""
    ratio: Literal["token", "sequence"] = "token"
    """"sequence": one ratio per sequence, the geometric mean of its tokens' (GSPO, Zheng et al. 2025, arXiv
    2507.18071; its clip range is much narrower, about 3e-4, and its aggregation "sequence_mean")."""
    kl_coef: float = 0.0
    """Weight of the divergence from the reference (GRPO, Shao et al. 2024, arXiv 2402.03300); reads
    `ref_log_probs` (next_token)."""
    kl_estimator: KlEstimator = "k3"
    kl_bound: float | None = KL_BOUND
    """Largest value of k3 per token, without gradient beyond (verl, ROLL: 10); None: no bound."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    engine_ratio_cap: float | None = None
    """Weights each token by min(p_trainer / p_engine, cap), the truncated importance weight (IMPALA, Espeholt et
    al. 2018, arXiv 1802.01561) that corrects for an inference engine's different numbers; reads
    `rollout_log_probs` (next_token), the engine's, against the old log-probs."""
    sample_weights: str | None = None
    """Name of a sample field of non-negative weights; they are scaled to a mean of 1 over the whole mini-batch."""
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        if not (0 < self.clip_low <= 1 and self.clip_high > 0):
            raise LossError(
                f"clip range ({self.clip_low}, {self.clip_high}): give clip_low in (0, 1] and clip_high above 0"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise LossError(f"dual_clip is {self.dual_clip}: give a number above 1, such as 3, or None")
        if self.engine_ratio_cap is not None and self.engine_ratio_cap <= 0:
            raise LossError(f"engine_ratio_cap is {self.engine_ratio_cap}: give a positive number, such as 2, or None")
        if self.ratio not in ("token", "sequence") or self.kl_estimator not in ESTIMATORS:
            raise LossError(
                f"ratio {self.ratio!r}, kl_estimator {self.kl_estimator!r}: give token or sequence, and one of "
                f"{', '.join(ESTIMATORS)}"
            )
        if self.kl_coef < 0:
            raise LossError(f"kl_coef is {self.kl_coef}: give 0 or more")
        if self.kl_bound is not None and self.kl_bound <= 0:
            raise LossError(f"kl_bound is {self.kl_bound}: give a positive number, such as 10, or None")
        resolve_aggregation(self.aggregation)

    @property
    def sums(self) -> tuple[str, ...]:
        """Fields whose totals over the step are needed."""
        return () if self.sample_weights is None else (self.sample_weights,)

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss, with the usual diagnostics."""
        log_probs, advantages = tokens.log_probs, tokens.per_token("advantages")
        old = tokens["old_log_probs"] if "old_log_probs" in tokens else log_probs.detach()
        ratio, ratio_bounded = self._ratio(tokens, log_probs - old)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages)
        too_high = (advantages > 0) & (ratio > 1 + self.clip_high)
        too_low = (advantages < 0) & (ratio < 1 - self.clip_low)
        metrics: dict[str, Metric] = {
            "approx_kl": tokens.mean_metric(k3(log_probs, old, self.kl_bound)),
            "clip_fraction": tokens.mean_metric((too_high | too_low).float()),
            "entropy": tokens.mean_metric(tokens.entropy),
            "ratio_bounded": tokens.mean_metric(ratio_bounded.float()),
            "ratio_max": Max(torch.where(tokens.mask(), ratio, 0.0).max().detach()),
        }
        if self.dual_clip is not None:
            bound = torch.where(advantages < 0, -self.dual_clip * advantages, float("inf"))
            metrics["dual_clip_fraction"] = tokens.mean_metric((per_token > bound).float())
            per_token = torch.minimum(per_token, bound)
        if self.engine_ratio_cap is not None:
            log_weight = old - tokens["rollout_log_probs"]
            weight = bounded(log_weight).exp()
            metrics["engine_ratio"] = tokens.mean_metric(weight)
            metrics["engine_ratio_bounded"] = tokens.mean_metric((log_weight.abs() > LOG_RATIO_BOUND).float())
            per_token = per_token * weight.clamp(max=self.engine_ratio_cap).detach()
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * tokens.entropy
        if self.kl_coef:
            divergence, ref_metrics = self._divergence(tokens)
            per_token = per_token + self.kl_coef * divergence
            metrics |= ref_metrics
        if self.sample_weights is not None:
            scale = tokens.num_sequences() / (tokens.total(self.sample_weights) or 1.0)
            per_token = per_token * tokens.per_token(self.sample_weights) * scale
        return LossOutput(resolve_aggregation(self.aggregation)(tokens, per_token), metrics)

    def _ratio(self, tokens: TokenView, log_ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[tokens] the ratio to the old policy, and where it was bounded."""
        if self.ratio == "sequence":
            log_ratio = tokens.expand(tokens.segment_mean(log_ratio))
            return log_ratio.clamp(max=SEQUENCE_LOG_RATIO_BOUND).exp(), log_ratio > SEQUENCE_LOG_RATIO_BOUND
        return bounded(log_ratio).exp(), log_ratio.abs() > LOG_RATIO_BOUND

    def _divergence(self, tokens: TokenView) -> tuple[torch.Tensor, dict[str, Metric]]:
        """[tokens] the divergence from the reference, and its metrics."""
        ref, log_probs = tokens["ref_log_probs"], tokens.log_probs
        if self.kl_estimator != "k3":
            divergence = ESTIMATORS[self.kl_estimator](ref, log_probs)
            return divergence, {"ref_kl": tokens.mean_metric(divergence)}
        divergence = k3(ref, log_probs, self.kl_bound)
        beyond = (ref - log_probs).abs() > LOG_RATIO_BOUND
        if self.kl_bound is not None:
            beyond |= divergence >= self.kl_bound
        return divergence, {
            "ref_kl": tokens.mean_metric(divergence),
            "ref_kl_bounded": tokens.mean_metric(beyond.float()),
        }
