"""Policy-gradient objectives and the critic's loss.

The base class adds the engine's correction, the entropy bonus, the KL penalty and the aggregation to a surrogate; an
objective is a subclass with a `surrogate`. Notation: r = p / p_old, A the advantage, sg stop-gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from roll_batching.checked_fields import OptionalPositive
from roll_batching.errors import DataError
from roll_batching.losses.contract import VALUES, LossOutput, Max, Metric
from roll_batching.losses.estimators import (
    ESTIMATORS,
    LOG_RATIO_BOUND,
    SEQUENCE_LOG_RATIO_BOUND,
    bounded,
    k3,
    resolve_aggregation,
    with_gradient,
)
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch
from roll_batching.samples.token_fields import counted_positions, require_field, token_place
from roll_batching.settings.losses import (
    Aggregation,
    CISPOSettings,
    EngineCorrection,
    GMPOSettings,
    LossSettings,
    PolicyGradientSettings,
    PolicySettings,
    SAPOSettings,
    TOPRSettings,
)

IS_WEIGHT = "train_infer_is_weight"
"""Field of weights that multiply the surrogate: next_token, [tokens]; see `losses.train_infer`."""


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """Inputs of a surrogate, [tokens] each."""

    tokens: TokenView
    log_probs: torch.Tensor
    old: torch.Tensor
    """`old_log_probs`: log-probs before the step's first update; without that field the current ones, detached."""
    advantages: torch.Tensor

    @classmethod
    def of(cls, tokens: TokenView) -> PolicyTokens:
        """The inputs of a micro-batch."""
        log_probs = tokens.log_probs
        old = tokens["old_log_probs"] if "old_log_probs" in tokens else log_probs.detach()
        return cls(tokens=tokens, log_probs=log_probs, old=old, advantages=tokens.per_token("advantages"))

    @property
    def log_ratio(self) -> torch.Tensor:
        """Unbounded log-ratio, log p - log p_old."""
        return self.log_probs - self.old

    def ratio_metrics(self, ratio: torch.Tensor, beyond: torch.Tensor) -> dict[str, Metric]:
        """Metrics of the distance to the old policy; `beyond` marks tokens with a bounded ratio."""
        return {
            "ratio_bounded": self.tokens.mean_metric(beyond.float()),
            "ratio_max": Max(torch.where(self.tokens.mask(), ratio, 0.0).max().detach()),
        }


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(PolicyGradientSettings):
    """The loss aggregation(w S + kl_coef KL - entropy_coef H), with surrogate S and engine correction w.

    Reads `response_mask`, `advantages` (sample or token field), `old_log_probs` (next_token; absent: strictly
    on-policy), the factor `train_infer_is_weight` of S where there is one, and the fields that single options name.
    Log-ratios are bounded before exp (`losses.estimators`); the metrics `ratio_bounded`, `ref_kl_bounded` and
    `engine_ratio_bounded` are the shares of counted tokens with a bounded value.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs", "entropy"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)

    @property
    def sums(self) -> tuple[str, ...]:
        """Fields whose totals over the step the loss reads."""
        return () if self.sample_weights is None else (self.sample_weights,)

    def check(self, batch: SampleBatch, micro_batches: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raises `DataError` for sample weights that are negative or not finite."""
        name = self.sample_weights
        if name is None or name not in batch.schema or batch.schema[name].kind != "sample":
            return  # `local_counts` reports a missing field
        weights = batch[name].cpu()
        if len(wrong := ((weights < 0) | ~torch.isfinite(weights)).nonzero()):
            row = int(wrong[0, 0])
            raise DataError(
                f"sample {int(batch.ids[row])} has the weight {weights[row].tolist()} in {name!r} (sample_weights), "
                f"one of {len(wrong)} invalid samples: give finite weights of 0 or more"
            )

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """[tokens] loss of the policy term, and its metrics."""
        raise NotImplementedError

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss, with the metrics approx_kl and entropy."""
        policy = PolicyTokens.of(tokens)
        per_token, metrics = self.surrogate(policy)
        metrics |= {
            "approx_kl": tokens.mean_metric(k3(policy.log_probs, policy.old, self.kl_bound)),
            "entropy": tokens.mean_metric(tokens.entropy),
        }
        if self.engine_ratio_cap is not None:
            weight, more = engine_weights(
                tokens, policy.old, self.engine_correction, self.engine_ratio_min, self.engine_ratio_cap
            )
            per_token, metrics = per_token * weight, metrics | more
        if IS_WEIGHT in tokens:
            per_token = per_token * tokens[IS_WEIGHT]
        if self.entropy_coef:
            per_token = per_token - self.entropy_coef * tokens.entropy
        if self.kl_coef:
            # Added to the loss and not to the reward: the reference pulls on tokens without an advantage, too.
            divergence, more = self._divergence(policy)
            per_token, metrics = per_token + self.kl_coef * divergence, metrics | more
        if self.sample_weights is not None:
            # The aggregation divides by the number of sequences: this makes it their total weight.
            scale = tokens.num_sequences() / (tokens.total(self.sample_weights) or 1.0)
            per_token = per_token * tokens.per_token(self.sample_weights) * scale
        return LossOutput(resolve_aggregation(self.aggregation)(tokens, per_token), metrics)

    def _divergence(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """[tokens] KL estimate to the reference, and its metrics."""
        tokens, ref, log_probs = policy.tokens, policy.tokens["ref_log_probs"], policy.log_probs
        metrics: dict[str, Metric] = {}
        if self.kl_estimator == "k3":
            value = k3(ref, log_probs, self.kl_bound)
            beyond = (ref - log_probs).abs() > LOG_RATIO_BOUND
            if self.kl_bound is not None:
                beyond |= value >= self.kl_bound
            metrics["ref_kl_bounded"] = tokens.mean_metric(beyond.float())
        else:
            value = ESTIMATORS[self.kl_estimator](ref, log_probs)
        metrics["ref_kl"] = tokens.mean_metric(value)
        ratio = bounded(policy.log_ratio).exp()
        return with_gradient(value, self.kl_gradient, other=ref, sampled=log_probs, ratio=ratio), metrics


def engine_weights(
    tokens: TokenView, old: torch.Tensor, correction: EngineCorrection, lowest: float, cap: float
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """[tokens] weights p_trainer / p_engine without gradient, and their metrics; `old` are the trainer's log-probs.

    The engine samples the tokens, and its kernels compute other probabilities than the trainer's from equal weights.
    """
    # A constant of the step: with a gradient the weights themselves would be trained.
    log_ratio = (old - tokens["rollout_log_probs"]).detach()
    ratio = bounded(log_ratio).exp()
    compared = ratio
    if correction == "mask_sequences":
        compared = tokens.expand(tokens.segment_mean(bounded(log_ratio))).exp()
    outside = (compared < lowest) | (compared > cap)
    weight = ratio.clamp(lowest, cap) if correction == "truncate" else torch.where(outside, 0.0, ratio)
    return weight, {
        "engine_ratio": tokens.mean_metric(ratio),
        "engine_ratio_bounded": tokens.mean_metric((log_ratio.abs() > LOG_RATIO_BOUND).float()),
        "engine_ratio_outside": tokens.mean_metric(outside.float()),
    }


# ---- objectives


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
        # Where A < 0, -r A grows with r without bound: the dual clip bounds it (Ye et al. 2020, arXiv 1912.09729).
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
        # GSPO (Zheng et al. 2025, arXiv 2507.18071). GSPO-token has the sequence's value, and each token's gradient.
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
        gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature  # of slope 1 at r = 1, like r itself
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


# ---- the critic


@dataclass(frozen=True, kw_only=True)
class ValueLoss(LossSettings):
    """aggregation(1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)), with returns R and clip range c.

    Reads `response_mask`, `returns` (next_token) and, with a clip range, `old_values` (next_token). PPO's value loss as
    in OpenAI's baselines, with the half of TRL, verl and ROLL.
    """

    clip: OptionalPositive = None
    """The clip range c. None: no clip, 1/2 (V - R)^2."""
    aggregation: Aggregation = "token_mean"

    needs: ClassVar[frozenset[str]] = frozenset({VALUES})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)

    def check(self, batch: SampleBatch, micro_batches: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raises `DataError` for missing fields, and for counted returns or old values that are not finite."""
        counted: torch.Tensor | None = None
        for name in ("returns", "old_values") if self.clip is not None else ("returns",):
            require_field(batch, name, "the value loss", "next_token")
            counted = counted_positions(batch, self.masks[0]) if counted is None else counted
            wrong = ~torch.isfinite(batch[name].cpu()) & counted
            if wrong.any():
                sample, _ = token_place(batch, int(wrong.nonzero()[0, 0]))
                raise DataError(
                    f"{name} of sample {sample} is not finite at {int(wrong.sum())} counted positions of "
                    "the batch: look at its reward"
                )

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss; metrics: means of value, return and squared error, share of clipped tokens."""
        values, returns = tokens.values, tokens["returns"]
        error = (values - returns).square()
        metrics = {
            "value": tokens.mean_metric(values),
            "return": tokens.mean_metric(returns),
            "error": tokens.mean_metric(error),
        }
        per_token = error
        if self.clip is not None:
            old = tokens["old_values"]
            # Not old + (values - old).clamp(...): its rounding inside the range would count as clipped.
            clipped = (values.clamp(old - self.clip, old + self.clip) - returns).square()
            metrics["clip_share"] = tokens.mean_metric((clipped > error).float())
            per_token = torch.maximum(error, clipped)
        return LossOutput(resolve_aggregation(self.aggregation)(tokens, per_token / 2), dict(metrics))
