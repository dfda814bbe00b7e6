"""The loss of a critic: the squared distance of values from returns, clipped around the old values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from roll_batching.checked_fields import OptionalPositive
from roll_batching.errors import DataError
from roll_batching.losses.aggregation import resolve_aggregation
from roll_batching.losses.contract import VALUES, LossOutput
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch
from roll_batching.samples.token_masks import counted_positions
from roll_batching.settings.losses import Aggregation, LossSettings


@dataclass(frozen=True, kw_only=True)
class ValueLoss(LossSettings):
    """aggregation(1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)), with returns R and clip range c.

    Reads `response_mask`, `returns` (next_token) and, with a clip range, `old_values` (next_token). PPO's value loss as
    in OpenAI's baselines, with the half of TRL, verl and ROLL.
    """

    clip: OptionalPositive = None
    """None: 1/2 (V - R)^2."""
    aggregation: Aggregation = "token_mean"

    needs: ClassVar[frozenset[str]] = frozenset({VALUES})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)

    def check(self, batch: SampleBatch, micro_batches: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raises `DataError` for missing fields, and for counted returns or old values that are not finite."""
        counted: torch.Tensor | None = None
        for name in ("returns", "old_values") if self.clip is not None else ("returns",):
            if name not in batch.schema or batch.schema[name].kind != "next_token":
                raise DataError(f"the value loss reads {name!r}, a next_token field, which the samples do not have")
            counted = counted_positions(batch, self.masks[0]) if counted is None else counted
            wrong = ~torch.isfinite(batch[name].cpu()) & counted
            if wrong.any():
                row = int(torch.searchsorted(batch.offsets, wrong.nonzero()[0, 0], right=True)) - 1
                raise DataError(
                    f"{name} of sample {int(batch.ids[row])} is not finite at {int(wrong.sum())} counted positions of "
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
