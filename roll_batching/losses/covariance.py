"""Policy gradients that hold back the few tokens whose log-prob and advantage vary together most.

These tokens drive the loss of entropy (Cui et al. 2025, arXiv 2505.22617). The covariance of a token is
(A - mean A)(log p - mean log p), the means over all counted tokens. Which tokens are chosen must not depend on how a
mini-batch is cut: `prepare` chooses them among all tokens of a step, by the log-probs before its first update, and
marks them in the field `held_back` (bool, next_token). verl chooses within each micro-batch, by the current log-probs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from roll_batching.distributed import exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError, LossError
from roll_batching.losses.contract import Metric
from roll_batching.losses.estimators import bounded
from roll_batching.losses.objectives import PolicyLoss, token_ratio
from roll_batching.losses.policy import PolicyGradient, PolicyTokens
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.positions import counted_positions, sample_of

_HELD_BACK = "held_back"


@dataclass(frozen=True)
class _Tokens:
    """Counted tokens of a rank: their covariances, and who they are."""

    values: np.ndarray
    """float64 [n]."""
    ids: np.ndarray
    """int64 [n]: the sample's."""
    places: np.ndarray
    """int64 [n]: in the sample."""


def _covariances(home: SampleBatch, counted: torch.Tensor, layout: ParallelLayout) -> tuple[_Tokens, int]:
    """This rank's tokens, and the number of tokens on all ranks. Collective."""
    if "old_log_probs" not in home.schema:
        raise DataError("tokens are held back by their old log-probs, which the samples do not have: see logprob_plan")
    advantages = home["advantages"].cpu().double()
    if home.schema["advantages"].kind == "sample":
        advantages = advantages[sample_of(home)]
    elif home.schema["advantages"].kind == "token":
        advantages = advantages.roll(-1, 0)
    pair = torch.stack([advantages, home["old_log_probs"].cpu().double()], -1)[counted]
    sums = [float(pair[:, 0].sum()), float(pair[:, 1].sum()), float(len(pair))]
    parts = exchange(layout.host_group, "covariances", lambda: sums if layout.is_replica_leader else None)
    totals = [math.fsum(column) for column in zip(*(part for part in parts if part is not None), strict=True)]
    count = max(totals[2], 1.0)
    at = torch.nonzero(counted)[:, 0]
    sample = sample_of(home)[at]
    values = (pair[:, 0] - totals[0] / count) * (pair[:, 1] - totals[1] / count)
    return _Tokens(values.numpy(), home.ids[sample].numpy(), (at - home.offsets[sample]).numpy()), int(totals[2])


def _together(chosen: np.ndarray, tokens: _Tokens, layout: ParallelLayout) -> np.ndarray:
    """[n, 3] value, id and place of the tokens `chosen` on any rank, by id and place. Collective."""
    columns = (tokens.values, tokens.ids, tokens.places)
    mine = np.stack([column[chosen].astype(np.float64) for column in columns], -1)
    parts = exchange(layout.host_group, "tokens to hold back", lambda: mine if layout.is_replica_leader else None)
    found = np.concatenate([part for part in parts if part is not None])
    return found[np.lexsort((found[:, 2], found[:, 1]))]


def _marked(home: SampleBatch, held: np.ndarray) -> SampleBatch:
    """`home` with the tokens `held`, of which it has some."""
    marks = torch.zeros(home.num_tokens, dtype=torch.bool)
    rows, here = home.find(torch.from_numpy(held[:, 1].astype(np.int64)))
    places = torch.from_numpy(held[:, 2].astype(np.int64))
    marks[home.offsets[rows[here]] + places[here]] = True
    return home.with_fields({_HELD_BACK: marks}, {_HELD_BACK: FieldSpec("next_token")})


def _share(share: float) -> None:
    if not 0 < share <= 1:
        raise LossError(f"share is {share}: give the share of tokens to hold back, above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class ClipCovLoss(PolicyLoss):
    """`PolicyLoss` without the loss of a random `share` of tokens, out of those with a covariance in a range."""

    share: float = 0.0002
    lowest: float = 1.0
    highest: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _share(self.share)
        if self.lowest >= self.highest:
            raise LossError(f"lowest is {self.lowest}, highest {self.highest}: give a range of covariances")

    def prepare(self, home: SampleBatch, layout: ParallelLayout, seed: int) -> SampleBatch:
        """Marks the tokens to leave out, the same on every rank, drawn with `seed`. Collective."""
        tokens, count = _covariances(home, counted_positions(home), layout)
        found = _together((tokens.values > self.lowest) & (tokens.values < self.highest), tokens, layout)
        most = min(max(int(self.share * count), 1), len(found))
        return _marked(home, found[np.random.default_rng(seed).permutation(len(found))[:most]])

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """[tokens] loss of the policy alone, and its metrics."""
        per_token, metrics = super().surrogate(policy)
        held = policy.tokens[_HELD_BACK]
        return torch.where(held, 0.0, per_token), metrics | {"held_back": policy.tokens.mean_metric(held.float())}


@dataclass(frozen=True, kw_only=True)
class KlCovLoss(PolicyGradient):
    """-r A, and + penalty |log r| for the `share` of tokens with the largest covariances."""

    share: float = 0.0002
    penalty: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _share(self.share)
        if self.penalty < 0:
            raise LossError(f"penalty is {self.penalty}: give 0 or more")

    def prepare(self, home: SampleBatch, layout: ParallelLayout, seed: int) -> SampleBatch:
        """Marks the tokens to hold back, the same on every rank. Collective."""
        tokens, count = _covariances(home, counted_positions(home), layout)
        most = max(int(self.share * count), 1)
        mine = np.zeros(len(tokens.values), dtype=bool)
        mine[np.argsort(-tokens.values, kind="stable")[:most]] = True
        found = _together(mine, tokens, layout)
        return _marked(home, found[np.argsort(-found[:, 0], kind="stable")[:most]])

    def surrogate(self, policy: PolicyTokens) -> tuple[torch.Tensor, dict[str, Metric]]:
        """[tokens] loss of the policy alone, and its metrics."""
        ratio, beyond = token_ratio(policy)
        held = policy.tokens[_HELD_BACK]
        distance = torch.where(held, bounded(policy.log_ratio).abs(), 0.0)
        metrics = policy.ratio_metrics(ratio, beyond) | {"held_back": policy.tokens.mean_metric(held.float())}
        return -ratio * policy.advantages + self.penalty * distance, metrics
