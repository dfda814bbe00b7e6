"""Advantages of tokens: discounted returns or GAE, with the KL divergence from the reference in the reward.

The last token of a response gets the response's reward, as the estimator made it. From the reward of each token the KL
coefficient times an estimate of the token's divergence is subtracted. The advantage of a token is the discounted sum of
the rewards after it (ROLL's reinforce, slime's and verl's REINFORCE++), or generalised advantage estimation with a
critic's values. Advantages are whitened and clipped if the job sets it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le

from roll_batching.checked_fields import CheckedFields, OptionalPositive, PositiveShare
from roll_batching.distributed import exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.jobs.objectives.advantages import VARIANCE_EPSILON
from roll_batching.jobs.objectives.stateful import KlCoefficient
from roll_batching.jobs.observe.run_files import Metrics
from roll_batching.losses.estimators import ESTIMATORS, k3
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.token_fields import counted_positions, sample_of
from roll_batching.settings.losses import KL_BOUND, KlEstimator


@dataclass(frozen=True, kw_only=True)
class TokenRewards(CheckedFields, error=DataError):
    """Turns the reward of a response into advantages of its tokens."""

    gamma: PositiveShare = 1.0
    """Discount per token of the sequence."""
    lambd: Annotated[float | None, Ge(0), Le(1)] = None
    """Lambda of generalised advantage estimation, which reads `old_values`. None: discounted returns."""
    kl: KlCoefficient | None = None
    """Coefficient of the KL term in the reward, which reads `old_log_probs` and `ref_log_probs`. None: no KL term."""
    estimator: KlEstimator = "k1"
    whiten: bool = False
    """Give advantages mean 0 and deviation 1 over the tokens of each reward domain, as `AdvantageRule.whiten`."""
    clip: OptionalPositive = None
    """Advantages are clipped to [-x, x] last."""

    def __call__(
        self, local_batch: SampleBatch, layout: ParallelLayout, domains: np.ndarray
    ) -> tuple[SampleBatch, Metrics]:
        """Adds `advantages` of tokens (next_token) to this rank's samples; returns them and metrics. Collective.

        With a critic's values it also adds `returns` (next_token), the target of the critic's loss, which are neither
        whitened nor clipped.
        `domains`, text [n], are the reward domains of all samples of the step, by id.
        """
        counted = counted_positions(local_batch)
        kl_cost, metrics = None, Metrics()
        if self.kl is not None:
            divergence = torch.where(counted, self._divergence(local_batch), 0.0)
            kl_cost = self.kl.value * divergence
            metrics = self._update_coefficient(local_batch, divergence, counted, layout)
        rewards = token_rewards(local_batch, counted, kl_cost)
        fields = {}
        if self.lambd is None:
            advantages = discounted(local_batch, rewards, self.gamma)
        else:
            values = local_batch["old_values"].double().cpu()
            advantages = generalised_advantages(local_batch, counted, rewards, values, self.gamma, self.lambd)
            target = torch.where(counted, advantages + values, 0.0)
            fields["returns"] = target.float()
            metrics |= explained_variance(target[counted], values[counted], partial(_sum_over_ranks, layout, "values"))
        if self.whiten:
            advantages = _whiten(local_batch, advantages, counted, layout, domains)
        if self.clip is not None:
            advantages = advantages.clamp(-self.clip, self.clip)
        fields["advantages"] = torch.where(counted, advantages, 0.0).float()
        return local_batch.with_fields(fields, dict.fromkeys(fields, FieldSpec("next_token"))), metrics

    def _divergence(self, batch: SampleBatch) -> torch.Tensor:
        reference, old = batch["ref_log_probs"].cpu().double(), batch["old_log_probs"].cpu().double()
        if self.estimator == "k3":
            return k3(reference, old, KL_BOUND)
        return ESTIMATORS[self.estimator](reference, old)

    def _update_coefficient(
        self, batch: SampleBatch, divergence: torch.Tensor, counted: torch.Tensor, layout: ParallelLayout
    ) -> Metrics:
        """Adapts the coefficient to the step's divergence: mean over samples of the mean over tokens. Collective."""
        assert self.kl is not None
        sample = sample_of(batch)
        tokens = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, sample, counted.double())
        sums = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, sample, divergence)
        means = sums / tokens.clamp(min=1)
        total, samples = _sum_over_ranks(
            layout, "the divergence in the reward", float(means.sum()), float((tokens > 0).sum())
        )
        mean, coefficient = total / max(samples, 1.0), self.kl.value  # before `update`: the one of this step
        if not math.isfinite(mean):
            raise DataError(
                "the divergence in the reward is not finite: log-probs of policy and reference overflow; resume from "
                "an earlier checkpoint with a smaller learning rate"
            )
        self.kl.update(mean, int(samples))
        return {"reward_kl": mean, "reward_kl_coef": coefficient}


def require_single_samples(samples: np.ndarray, estimator: str) -> None:
    """Raises DataError where a rollout has several samples: a reward is discounted along the tokens of one sample.

    `samples`, int64 [rollouts], counts those of each rollout; `estimator` is `adv_estimator`.
    """
    several = np.flatnonzero(samples > 1)
    if several.size:
        raise DataError(
            f"rollout {several[0]} has {samples[several[0]]} samples, and the job makes advantages of tokens "
            f"(adv_estimator: {estimator}), along one sample: return one sample per rollout, or leave out gamma, "
            "add_token_level_kl and adv_estimator: gae"
        )


def token_rewards(batch: SampleBatch, counted: torch.Tensor, kl_cost: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a reward for each token: [tokens] float64, next_token.

    The last counted token of a sample gets the sample field `advantages`; `kl_cost`, [tokens], is subtracted from all.
    """
    count = len(batch)
    result = torch.zeros(batch.num_tokens, dtype=torch.float64) if kl_cost is None else -kl_cost.double()
    position = torch.where(counted, torch.arange(batch.num_tokens), -1)
    last = torch.full((count,), -1).scatter_reduce_(0, sample_of(batch), position, "amax")  # -1: no counted token
    has_response = last >= 0
    result[last[has_response]] += batch["advantages"].double().cpu()[has_response]
    return result


def discounted(batch: SampleBatch, rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """Returns for each token the discounted sum of its own and later `rewards`: [tokens] float64, next_token."""
    count, ends, result = len(batch), batch.offsets[1:], rewards.clone()
    following = torch.zeros(count, dtype=torch.float64)
    longest = int(batch.lengths.max()) if count else 0
    for back in range(longest):  # from the samples' ends, one token of every sample at a time
        long_enough = torch.nonzero(batch.lengths > back)[:, 0]
        positions = ends[long_enough] - 1 - back
        following[long_enough] = result[positions] + gamma * following[long_enough]
        result[positions] = following[long_enough]
    return result


def _whiten(
    batch: SampleBatch, values: torch.Tensor, counted: torch.Tensor, layout: ParallelLayout, domains: np.ndarray
) -> torch.Tensor:
    """Whitens `values` over the counted tokens of each reward domain on all ranks; fewer than two are left as is."""
    names, domain_indices = np.unique(domains, return_inverse=True)
    domain = torch.from_numpy(domain_indices)[batch.ids][sample_of(batch)]  # of each token: `domains` is by sample id

    def sum_by_domain(terms: torch.Tensor) -> torch.Tensor:
        parts = torch.zeros(len(names), dtype=torch.float64).index_add_(0, domain[counted], terms[counted])
        return torch.tensor(_sum_over_ranks(layout, "whitening", *parts.tolist()), dtype=torch.float64)

    count = sum_by_domain(torch.ones_like(values))
    mean = (sum_by_domain(values) / count.clamp(min=1))[domain]
    variance = sum_by_domain((values - mean) ** 2) / (count - 1).clamp(min=1)
    return torch.where((count < 2)[domain], values, (values - mean) * torch.rsqrt(variance + VARIANCE_EPSILON)[domain])


def _sum_over_ranks(layout: ParallelLayout, action: str, *numbers: float) -> list[float]:
    """Sums each of `numbers` over the replicas; the same on every rank. `action` names the exchange in errors."""
    parts = exchange(layout.host_group, action, lambda: numbers if layout.is_replica_leader else None)
    return [math.fsum(column) for column in zip(*(part for part in parts if part is not None), strict=True)]


# ---- gae


def generalised_advantages(
    batch: SampleBatch,
    counted: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    gamma: float,
    lambd: float,
) -> torch.Tensor:
    """Computes advantages of tokens, [tokens] float64; they are undefined where `counted` is false.

    With V = 0 after the last counted token:

        delta_t = r_t + gamma V_next - V_t,    A_t = delta_t + gamma lambd A_next.

    `rewards` and `values` are [tokens] float64, all by the position that predicts the token. "Next" is the next counted
    token: tokens between them, which the policy did not write, have no step and no value (as in verl).
    """
    count, ends, result = len(batch), batch.offsets[1:], torch.zeros_like(rewards)
    next_value, next_advantage = torch.zeros(2, count, dtype=torch.float64)
    longest = int(batch.lengths.max()) if count else 0
    for back in range(longest):  # from the samples' ends, one token of every sample at a time
        samples = torch.nonzero(batch.lengths > back)[:, 0]
        samples = samples[counted[ends[samples] - 1 - back]]
        positions = ends[samples] - 1 - back
        delta = rewards[positions] + gamma * next_value[samples] - values[positions]
        result[positions] = delta + gamma * lambd * next_advantage[samples]
        next_value[samples], next_advantage[samples] = values[positions], result[positions]
    return result


def explained_variance(
    returns: torch.Tensor, values: torch.Tensor, sum_over_ranks: Callable[..., list[float]]
) -> Metrics:
    """Measures the share of the variance of `returns` that `values` explain, 1 at best. Collective.

    Both are this rank's, [n] float64. Empty if all returns are equal.
    """
    error = returns - values
    parts = (float(len(returns)), *(float(x.sum()) for x in (returns, returns.square(), error, error.square())))
    count, total, squares, error_total, error_squares = sum_over_ranks(*parts)
    if not count:
        return {}
    variance = squares / count - (total / count) ** 2
    if variance <= 1e-12 * max(squares / count, 1e-12):  # rounding alone, as the difference of two equal numbers
        return {}
    return {"value_explained_variance": 1 - (error_squares / count - (error_total / count) ** 2) / variance}
