"""Policy gradients that exclude or penalise the tokens with the largest covariance of log-prob and advantage.

These tokens drive the decrease of entropy (Cui et al. 2025, arXiv 2505.22617). The covariance of a token is
(A - mean A)(log p - mean log p), with means over all counted tokens. The selection must not depend on micro-batches:
`prepare` selects among all tokens of a step, by the log-probs before its first update, and marks them in the field
`held_back` (bool, next_token). verl selects within each micro-batch, by the current log-probs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from roll_batching.distributed import exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.losses.contract import Metric
from roll_batching.losses.estimators import bounded
from roll_batching.losses.objectives import PolicyGradient, PolicyLoss, PolicyTokens, token_ratio
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.token_fields import counted_positions, sample_of
from roll_batching.settings.losses import ClipCovSettings, KlCovSettings

_HELD_BACK = "held_back"


@dataclass(frozen=True)
class _Tokens:
    """Counted tokens of a rank."""

    values: np.ndarray
    """float64 [n]: covariances."""
    ids: np.ndarray
    """int64 [n]: ids of the samples."""
    places: np.ndarray
    """int64 [n]: positions in the samples."""


def _covariances(batch: SampleBatch, counted: torch.Tensor, layout: ParallelLayout) -> tuple[_Tokens, int]:
    """This rank's counted tokens with their covariance terms, and the count of tokens on all ranks. Collective."""
    if "old_log_probs" not in batch.schema:
        raise DataError(
            "the loss selects tokens by their old log-probs, which the samples lack: set logprob_plan to train or own"
        )
    advantages = batch["advantages"].cpu().double()
    if batch.schema["advantages"].kind == "sample":
        advantages = advantages[sample_of(batch)]
    elif batch.schema["advantages"].kind == "token":
        # Position i of old_log_probs and `counted` is the prediction of token i + 1, whose advantage stands at i + 1.
        # A sample's last position, which gets the next sample's value, is never counted.
        advantages = advantages.roll(-1, 0)
    pair = torch.stack([advantages, batch["old_log_probs"].cpu().double()], -1)[counted]
    sums = [float(pair[:, 0].sum()), float(pair[:, 1].sum()), float(len(pair))]
    parts = exchange(layout.host_group, "covariances", lambda: sums if layout.is_replica_leader else None)
    # fsum is the same in every order of its terms.
    totals = [math.fsum(column) for column in zip(*(part for part in parts if part is not None), strict=True)]
    count = max(totals[2], 1.0)
    positions = torch.nonzero(counted)[:, 0]
    sample = sample_of(batch)[positions]
    values = (pair[:, 0] - totals[0] / count) * (pair[:, 1] - totals[1] / count)
    return _Tokens(values.numpy(), batch.ids[sample].numpy(), (positions - batch.offsets[sample]).numpy()), int(
        totals[2]
    )


def _gather_selected(is_selected: np.ndarray, tokens: _Tokens, layout: ParallelLayout) -> np.ndarray:
    """[n, 3] covariance, id and position of the selected tokens of all ranks, sorted by id and position. Collective."""
    columns = (tokens.values, tokens.ids, tokens.places)
    local = np.stack([column[is_selected].astype(np.float64) for column in columns], -1)
    parts = exchange(
        layout.host_group, "selecting tokens by covariance", lambda: local if layout.is_replica_leader else None
    )
    selected = np.concatenate([part for part in parts if part is not None])
    # One order in every layout, so that one seed selects the same tokens.
    return selected[np.lexsort((selected[:, 2], selected[:, 1]))]


def _mark(batch: SampleBatch, selected: np.ndarray) -> SampleBatch:
    """`batch` with the field `held_back`: true at those of its tokens that `selected` names, [n, 3] as gathered."""
    marks = torch.zeros(batch.num_tokens, dtype=torch.bool)
    rows, is_here = batch.find(torch.from_numpy(selected[:, 1].astype(np.int64)))
    positions = torch.from_numpy(selected[:, 2].astype(np.int64))
    marks[batch.offsets[rows[is_here]] + positions[is_here]] = True
    return batch.with_fields({_HELD_BACK: marks}, {_HELD_BACK: FieldSpec("next_token")})


@dataclass(frozen=True, kw_only=True)
class ClipCovLoss(ClipCovSettings, PolicyLoss):
    """`PolicyLoss` without a random `share` of the tokens whose covariance is in [lowest, highest]."""

    def prepare(self, batch: SampleBatch, layout: ParallelLayout, seed: int) -> SampleBatch:
        """Marks the excluded tokens, drawn with `seed`, equal on every rank. Collective."""
        tokens, count = _covariances(batch, counted_positions(batch), layout)
        candidates = _gather_selected((tokens.values > self.lowest) & (tokens.values < self.highest), tokens, layout)
        most = min(max(int(self.share * count), 1), len(candidates))
        return _mark(batch, candidates[np.random.default_rng(seed).permutation(len(candidates))[:most]])

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See `PolicyGradient.surrogate`."""
        per_token, metrics = super().surrogate(policy)
        held = policy.tokens[_HELD_BACK]
        return torch.where(held, 0.0, per_token), metrics | {"held_back": policy.tokens.mean_metric(held.float())}


@dataclass(frozen=True, kw_only=True)
class KlCovLoss(KlCovSettings, PolicyGradient):
    """-r A, plus penalty |log r| for the `share` of tokens with the largest covariances."""

    def prepare(self, batch: SampleBatch, layout: ParallelLayout, seed: int) -> SampleBatch:
        """Marks the penalised tokens, equal on every rank. Collective."""
        tokens, count = _covariances(batch, counted_positions(batch), layout)
        most = max(int(self.share * count), 1)
        # Each of the `most` largest of all ranks is among the `most` largest of its own rank.
        largest_here = np.zeros(len(tokens.values), dtype=bool)
        largest_here[np.argsort(-tokens.values, kind="stable")[:most]] = True
        candidates = _gather_selected(largest_here, tokens, layout)
        return _mark(batch, candidates[np.argsort(-candidates[:, 0], kind="stable")[:most]])

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """See `PolicyGradient.surrogate`."""
        ratio, beyond = token_ratio(policy)
        held = policy.tokens[_HELD_BACK]
        distance = torch.where(held, bounded(policy.log_ratio).abs(), 0.0)
        metrics = policy.ratio_metrics(ratio, beyond) | {"held_back": policy.tokens.mean_metric(held.float())}
        return -ratio * policy.advantages + self.penalty * distance, metrics
