"""The loss of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roll_batching.losses.aggregation import Aggregation, resolve_aggregation
from roll_batching.losses.contract import LossOutput
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
