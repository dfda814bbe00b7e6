"""Advantages of tokens: discounted returns, with the divergence from the reference in the reward.

The reward of a response, as the estimator made it, is that of its last token; each token costs the coefficient times an
estimate of its divergence. Its advantage is the discounted sum of what follows (ROLL's reinforce, slime's and verl's
REINFORCE++), whitened and clipped where the job says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from roll_batching.distributed import exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.jobs.objectives.advantages import VARIANCE_EPSILON
from roll_batching.jobs.objectives.running import KlCoefficient
from roll_batching.jobs.observe.metrics_file import Row
from roll_batching.losses.estimators import ESTIMATORS, KL_BOUND, KlEstimator, k3
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.positions import counted_positions, sample_of


@dataclass(frozen=True, kw_only=True)
class TokenRewards:
    """How a response's reward becomes advantages of its tokens."""

    gamma: float = 1.0
    """Discount per token of the sequence."""
    kl: KlCoefficient | None = None
    """Weight of the divergence in the reward; reads `old_log_probs` and `ref_log_probs`. None: not in it."""
    estimator: KlEstimator = "k1"
    whiten: bool = False
    """Mean 0 and deviation 1 over the tokens of each reward domain, as `AdvantageRule.whiten`."""
    clip: float | None = None
    """Advantages are clipped to [-x, x] last."""

    def __call__(self, home: SampleBatch, layout: ParallelLayout, domains: np.ndarray) -> tuple[SampleBatch, Row]:
        """`home`, this rank's samples of a step, with `advantages` of tokens (next_token), and columns. Collective.

        `domains`, text [n], are the reward domains of all samples of the step, by id.
        """
        counted = counted_positions(home)
        spent, row = None, Row()
        if self.kl is not None:
            divergence = torch.where(counted, self._divergence(home), 0.0)
            spent = self.kl.value * divergence
            row = self._followed(home, divergence, counted, layout)
        found = returns(home, counted, self.gamma, spent)
        if self.whiten:
            found = _whitened(home, found, counted, layout, domains)
        if self.clip is not None:
            found = found.clamp(-self.clip, self.clip)
        values = torch.where(counted, found, 0.0).float()
        return home.with_fields({"advantages": values}, {"advantages": FieldSpec("next_token")}), row

    def _divergence(self, home: SampleBatch) -> torch.Tensor:
        other, sampled = home["ref_log_probs"].cpu().double(), home["old_log_probs"].cpu().double()
        return k3(other, sampled, KL_BOUND) if self.estimator == "k3" else ESTIMATORS[self.estimator](other, sampled)

    def _followed(
        self, home: SampleBatch, divergence: torch.Tensor, counted: torch.Tensor, layout: ParallelLayout
    ) -> Row:
        """The step's divergence, which moves the coefficient: mean over samples of the mean over tokens."""
        assert self.kl is not None
        sample = sample_of(home)
        tokens = torch.zeros(len(home), dtype=torch.float64).index_add_(0, sample, counted.double())
        sums = torch.zeros(len(home), dtype=torch.float64).index_add_(0, sample, divergence)
        mean = sums / tokens.clamp(min=1)
        total, samples = _summed(layout, "the divergence in the reward", float(mean.sum()), float((tokens > 0).sum()))
        current, used = total / max(samples, 1.0), self.kl.value
        if not math.isfinite(current):
            raise DataError("the divergence in the reward is not finite: log-probs of policy and reference overflow")
        self.kl.update(current, int(samples))
        return {"reward_kl": current, "reward_kl_coef": used}


def returns(batch: SampleBatch, counted: torch.Tensor, gamma: float, spent: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens] float64, next_token: what follows of `advantages` (sample field), less what each token `spent`."""
    count, ends = len(batch), batch.offsets[1:]
    found = torch.zeros(batch.num_tokens, dtype=torch.float64) if spent is None else -spent.double()
    place = torch.where(counted, torch.arange(batch.num_tokens), -1)
    last = torch.full((count,), -1).scatter_reduce_(0, sample_of(batch), place, "amax")
    answered = last >= 0
    found[last[answered]] += batch["advantages"].double().cpu()[answered]
    following = torch.zeros(count, dtype=torch.float64)
    longest = int(batch.lengths.max()) if count else 0
    for back in range(longest):
        here = torch.nonzero(batch.lengths > back)[:, 0]
        at = ends[here] - 1 - back
        following[here] = found[at] + gamma * following[here]
        found[at] = following[here]
    return found


def _whitened(
    home: SampleBatch, values: torch.Tensor, counted: torch.Tensor, layout: ParallelLayout, domains: np.ndarray
) -> torch.Tensor:
    names, numbers = np.unique(domains, return_inverse=True)
    domain = torch.from_numpy(numbers)[home.ids][sample_of(home)]

    def sums(of: torch.Tensor) -> torch.Tensor:
        parts = torch.zeros(len(names), dtype=torch.float64).index_add_(0, domain[counted], of[counted])
        return torch.tensor(_summed(layout, "whitening", *parts.tolist()), dtype=torch.float64)

    count = sums(torch.ones_like(values))
    mean = (sums(values) / count.clamp(min=1))[domain]
    variance = sums((values - mean) ** 2) / (count - 1).clamp(min=1)
    return torch.where((count < 2)[domain], values, (values - mean) * torch.rsqrt(variance + VARIANCE_EPSILON)[domain])


def _summed(layout: ParallelLayout, what: str, *numbers: float) -> list[float]:
    """Sums over the data-parallel ranks, the same on every rank."""
    parts = exchange(layout.host_group, what, lambda: numbers if layout.is_replica_leader else None)
    return [math.fsum(column) for column in zip(*(part for part in parts if part is not None), strict=True)]
