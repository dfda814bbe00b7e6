"""The base of policy-gradient losses: surrogate, engine correction, entropy bonus, KL penalty, aggregation.

An objective is a subclass with a `surrogate`; the other terms are the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from roll_batching.errors import DataError
from roll_batching.losses.aggregation import resolve_aggregation
from roll_batching.losses.contract import LossOutput, Max, Metric
from roll_batching.losses.estimators import ESTIMATORS, LOG_RATIO_BOUND, bounded, k3, with_gradient
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch
from roll_batching.settings.losses import EngineCorrection, PolicyGradientSettings

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
            at = int(wrong[0, 0])
            raise DataError(
                f"sample {int(batch.ids[at])} has the weight {weights[at].tolist()} in {name!r} (sample_weights), one "
                f"of {len(wrong)} invalid samples: give finite weights of 0 or more"
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
            divergence, more = self._divergence(policy)
            per_token, metrics = per_token + self.kl_coef * divergence, metrics | more
        if self.sample_weights is not None:
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
    tokens: TokenView, old: torch.Tensor, how: EngineCorrection, lowest: float, cap: float
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """[tokens] weights p_trainer / p_engine without gradient, and their metrics; `old` are the trainer's log-probs.

    The engine samples the tokens, and its kernels compute other probabilities than the trainer's from equal weights.
    """
    log_ratio = (old - tokens["rollout_log_probs"]).detach()
    ratio = bounded(log_ratio).exp()
    compared = ratio
    if how == "mask_sequences":
        compared = tokens.expand(tokens.segment_mean(bounded(log_ratio))).exp()
    outside = (compared < lowest) | (compared > cap)
    weight = ratio.clamp(lowest, cap) if how == "truncate" else torch.where(outside, 0.0, ratio)
    return weight, {
        "engine_ratio": tokens.mean_metric(ratio),
        "engine_ratio_bounded": tokens.mean_metric((log_ratio.abs() > LOG_RATIO_BOUND).float()),
        "engine_ratio_outside": tokens.mean_metric(outside.float()),
    }
