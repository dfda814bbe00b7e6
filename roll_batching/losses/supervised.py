"""The loss of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from roll_batching.losses.aggregation import resolve_aggregation
from roll_batching.losses.contract import LossOutput
from roll_batching.losses.views import TokenView
from roll_batching.settings.losses import SFTSettings


@dataclass(frozen=True, kw_only=True)
class SFTLoss(SFTSettings):
    """Mean negative log-likelihood of the response tokens.

    Reads `response_mask` (token field).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss."""
        nll = -tokens.log_probs
        return LossOutput(resolve_aggregation(self.aggregation)(tokens, nll), {"nll": tokens.mean_metric(nll)})
