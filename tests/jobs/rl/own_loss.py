"""A loss and an advantage estimator that belong to nobody's tables: a job names them by their dotted paths."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from roll_batching.losses import LossOutput, Max, Mean, Min, Sum, TokenView


@dataclass(frozen=True, kw_only=True)
class ClippedWeights:
    """Policy gradient with weights clipped from above, and a metric of every kind."""

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)
    largest: float = 2.0
    """The ratio is clipped here, without gradient."""
    shares: tuple[int, ...] = (1,)
    """Parts of the loss, which are added up."""

    def __post_init__(self) -> None:
        if self.largest <= 0:
            raise ValueError(f"largest is {self.largest}; give a positive number")

    def token_loss(self, tokens: TokenView) -> LossOutput:
        ratio = (tokens.log_probs - tokens["old_log_probs"]).exp()
        per_token = -ratio.clamp(max=self.largest).detach() * tokens.per_token("advantages") * tokens.log_probs
        counted, drawn = tokens.mask(), tokens["rollout_log_probs"]
        metrics = {
            "own/tokens": Sum(counted.sum()),
            "own/tokens_max": Sum(counted.sum()),  # its name says one thing, its kind another: the kind counts
            "own/reward": Mean((tokens.per_token("rewards") * counted).sum(), counted.sum()),
            "own/drawn": Mean((drawn * counted).sum(), counted.sum()),
            "own/highest": Max(torch.where(counted, drawn, -1e9).max()),
            "own/lowest": Min(torch.where(counted, drawn, 1e9).min()),
            "own/setting": Mean(torch.tensor(self.largest), torch.ones(())),
            "own/is_float": Min(torch.tensor(float(type(self.largest) is float))),
            "own/shares": Max(torch.tensor(float(self.shares[-1]))),
            "own/is_tuple": Min(torch.tensor(float(type(self.shares) is tuple))),
        }
        return LossOutput(sum(self.shares) * tokens.mean(per_token), metrics)


class TakesAColumn(ClippedWeights):
    """Reports a metric under the name of a column that a run has itself."""

    def token_loss(self, tokens: TokenView) -> LossOutput:
        return LossOutput(-tokens.mean(tokens.log_probs), {"reward": tokens.mean_metric(tokens.log_probs)})


class NoLoss:
    """Has neither of the methods of a loss."""

    def __init__(self, *, weight: float) -> None:
        self.weight = weight


class Leaves:
    """Calls exit where it is made, on the rank that it is told."""

    def __init__(self, rank: int = 0) -> None:
        if rank == int(os.environ.get("RANK", "0")):
            raise SystemExit(0)
        self.masks = ("response_mask",)

    def token_loss(self, tokens: TokenView) -> LossOutput:
        return LossOutput(-tokens.mean(tokens.log_probs))


def ranks(rewards: np.ndarray, group_size: int, *, response_tokens: np.ndarray) -> np.ndarray:
    """Advantages by place in the group, from -1 to 1; a shorter response is the better of two with equal rewards."""
    groups, tokens = rewards.reshape(-1, group_size), response_tokens.reshape(-1, group_size)
    order = np.lexsort((-tokens, groups), axis=1)
    places = np.empty(groups.shape)
    np.put_along_axis(places, order, np.arange(group_size, dtype=float)[None], axis=1)
    return (2 * places / (group_size - 1) - 1).ravel()


def too_few(rewards: np.ndarray, group_size: int, *, response_tokens: np.ndarray) -> list[float]:
    """One advantage less than there are rewards."""
    return [0.0] * (len(rewards) - 1)
