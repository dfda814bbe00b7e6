"""Preference losses over pairs of responses: DPO and IPO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from roll_batching.errors import DataError
from roll_batching.losses.contract import LossOutput, Mean
from roll_batching.losses.denominators import counted_per_sample
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch
from roll_batching.settings.losses import DPOSettings, PreferenceSettings


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(PreferenceSettings):
    """The mean over pairs of a loss of the margin between chosen and rejected response.

    The margin is sum(log p - log p_ref) of the chosen response minus that of the rejected one. Reads `response_mask`,
    `ref_log_probs` (next_token), and the sample fields `pair` (int64, equal for both responses of a pair) and `chosen`
    (bool). Both responses must be in one micro-batch: plan with `group_ids=` the pairs, in any of the three modes.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)
    sums: ClassVar[tuple[str, ...]] = ("chosen",)

    def per_pair(self, margin: torch.Tensor) -> torch.Tensor:
        """[pairs] loss of margins [pairs]."""
        raise NotImplementedError

    def check(self, batch: SampleBatch, micro_batches: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raises `DataError` for a micro-batch with an incomplete pair, and for responses without counted tokens."""
        for name in ("pair", "chosen"):
            if name not in batch.schema or batch.schema[name].kind != "sample":
                raise DataError(f"{type(self).__name__} needs the sample field {name!r}")
        if len(empty := batch.ids[counted_per_sample(batch, self.masks[0]) == 0]):
            raise DataError(
                f"the samples {empty[:8].tolist()} have no counted response token, and a pair needs two "
                "responses: leave such pairs out"
            )
        pair, chosen = batch["pair"].cpu().numpy(), batch["chosen"].cpu().numpy().astype(bool)
        for members in micro_batches:
            order = members[np.lexsort((~chosen[members], pair[members]))]
            first, second = order[0::2], order[1::2]
            is_paired = len(first) == len(second) and bool((pair[first] == pair[second]).all())
            if not (is_paired and chosen[first].all() and not chosen[second].any()):
                raise DataError(
                    f"a micro-batch holds the samples {batch.ids[members][:8].tolist()}, which are not complete pairs "
                    "of a chosen and a rejected response: plan with group_ids= the samples' `pair` values"
                )

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss. Sorting brings the responses of a pair together."""
        reduce = tokens.segment_mean if self.average_log_probs else tokens.segment_sum
        log_ratios = reduce(tokens.log_probs - tokens["ref_log_probs"])
        order = torch.argsort(2 * tokens["pair"] + (~tokens["chosen"].bool()).long())
        chosen, rejected = log_ratios[order[0::2]], log_ratios[order[1::2]]
        margin = chosen - rejected
        pairs = torch.full((), len(margin), device=margin.device)
        loss = self.per_pair(margin).sum()
        metrics = {
            "reward_margin": Mean(self.beta * margin.detach().sum(), pairs),
            "reward_accuracy": Mean((margin.detach() > 0).sum(), pairs),
            "chosen_reward": Mean(self.beta * chosen.detach().sum(), pairs),
        }
        if self.sft_coef:
            reduce = tokens.segment_mean if self.sft_average_log_probs else tokens.segment_sum
            nll = -reduce(tokens.log_probs)[order[0::2]].sum()
            loss = loss + self.sft_coef * nll
            metrics["chosen_nll"] = Mean(nll.detach(), pairs)
        return LossOutput(loss / max(tokens.total("chosen"), 1.0), metrics)


@dataclass(frozen=True, kw_only=True)
class DPOLoss(DPOSettings, PreferenceLoss):
    """-log sigmoid(beta margin): direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    def per_pair(self, margin: torch.Tensor) -> torch.Tensor:
        """See `PreferenceLoss.per_pair`."""
        reward, smooth = self.beta * margin, self.label_smoothing
        return -(1 - smooth) * F.logsigmoid(reward) - smooth * F.logsigmoid(-reward)


@dataclass(frozen=True, kw_only=True)
class IPOLoss(PreferenceLoss):
    """(margin - 1 / (2 beta))^2: identity preference optimisation (Azar et al. 2023, arXiv 2310.12036, equation 17).

    Margins are sums over tokens as in ROLL; TRL uses means (`average_log_probs`).
    """

    def per_pair(self, margin: torch.Tensor) -> torch.Tensor:
        """See `PreferenceLoss.per_pair`."""
        return (margin - 1 / (2 * self.beta)).square()
