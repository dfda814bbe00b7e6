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

from roll_batching.errors import DataError, LossError
from roll_batching.losses.aggregation import Aggregation, resolve_aggregation
from roll_batching.losses.contract import LossOutput, Max, Metric
from roll_batching.losses.corrections import CORRECTIONS, EngineCorrection, engine_weights
from roll_batching.losses.estimators import (
    ESTIMATORS,
    KL_BOUND,
    KL_GRADIENTS,
    LOG_RATIO_BOUND,
    KlEstimator,
    KlGradient,
    bounded,
    k3,
    with_gradient,
)
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch


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
class PolicyGradient:
    """The loss aggregation(w S + kl_coef KL - entropy_coef H), with surrogate S and engine correction w.

    Reads `response_mask`, `advantages` (sample or token field), `old_log_probs` (next_token; absent: strictly
    on-policy) and the fields that single options name. Log-ratios are bounded before exp (`losses.estimators`); the
    metrics `ratio_bounded`, `ref_kl_bounded` and `engine_ratio_bounded` are the shares of counted tokens with a bounded
    value.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs", "entropy"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)
    kl_coef: float = 0.0
    """Weight of the KL penalty to the reference (GRPO, Shao et al. 2024, arXiv 2402.03300); reads `ref_log_probs`
    (next_token)."""
    kl_estimator: KlEstimator = "k3"
    kl_gradient: KlGradient = "value"
    kl_bound: float | None = KL_BOUND
    """Upper bound of k3 per token, without gradient beyond (verl, ROLL: 10); None: no bound."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    engine_correction: EngineCorrection = "truncate"
    engine_ratio_min: float = 0.0
    """Lower bound of p_trainer / p_engine for `engine_correction`."""
    engine_ratio_cap: float | None = None
    """Upper bound; None: no correction. Reads `rollout_log_probs` (next_token), the engine's log-probs."""
    sample_weights: str | None = None
    """Name of a sample field of non-negative weights, normalised to a mean of 1 over the mini-batch."""
    aggregation: Aggregation = "token_mean"

    def __post_init__(self) -> None:
        if self.engine_ratio_cap is not None and self.engine_ratio_cap <= 0:
            raise LossError(f"engine_ratio_cap is {self.engine_ratio_cap}: give a positive number, such as 2, or None")
        if self.engine_ratio_min < 0 or self.engine_ratio_min > (self.engine_ratio_cap or float("inf")):
            raise LossError(f"engine_ratio_min is {self.engine_ratio_min}: give a number from 0 to engine_ratio_cap")
        if self.engine_correction not in CORRECTIONS:
            raise LossError(f"engine_correction {self.engine_correction!r}: give one of {', '.join(CORRECTIONS)}")
        if self.kl_estimator not in ESTIMATORS:
            raise LossError(f"kl_estimator {self.kl_estimator!r}: give one of {', '.join(ESTIMATORS)}")
        if self.kl_gradient not in KL_GRADIENTS:
            raise LossError(f"kl_gradient {self.kl_gradient!r}: give one of {', '.join(KL_GRADIENTS)}")
        if self.kl_coef < 0:
            raise LossError(f"kl_coef is {self.kl_coef}: give 0 or more")
        if self.kl_bound is not None and self.kl_bound <= 0:
            raise LossError(f"kl_bound is {self.kl_bound}: give a positive number, such as 10, or None")
        resolve_aggregation(self.aggregation)

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
