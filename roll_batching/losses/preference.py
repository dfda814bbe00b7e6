"""Losses over pairs of responses: direct preference optimisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from roll_batching.data import SampleBatch
from roll_batching.errors import DataError
from roll_batching.losses.contract import LossOutput, Mean
from roll_batching.losses.views import TokenView


@dataclass(frozen=True, kw_only=True)
class DPOLoss:
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290), the mean over pairs.

    Reads `response_mask`, `ref_log_probs` (next_token), and the sample fields `pair` (int64, equal for
    the two responses of a pair) and `chosen` (bool). A pair must lie in one micro-batch: plan with
    `group_ids=` the pairs, in any of the three modes.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)
    sums: ClassVar[tuple[str, ...]] = ("chosen",)
    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """Share of pairs whose label is taken to be wrong (cDPO, Mitchell 2023)."""

    def check(self, batch: SampleBatch, micro_batches: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raises `DataError` when a micro-batch holds half a pair, or a response without counted tokens."""
        for name in ("pair", "chosen"):
            if name not in batch.schema or batch.schema[name].kind != "sample":
                raise DataError(f"DPOLoss needs the sample field {name!r}")
        sample = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)
        counted = (batch[self.masks[0]].cpu() != 0).long()
        counted[batch.offsets[:-1]] = 0  # a sample's first token is never predicted
        per_sample = torch.zeros(len(batch), dtype=torch.int64).index_add_(0, sample, counted)
        if len(empty := batch.ids[per_sample == 0]):
            raise DataError(
                f"the samples {empty[:8].tolist()} have no counted response token: a pair needs two responses; leave "
                "such pairs out"
            )
        pair, chosen = batch["pair"].cpu().numpy(), batch["chosen"].cpu().numpy().astype(bool)
        for members in micro_batches:
            order = members[np.lexsort((~chosen[members], pair[members]))]
            first, second = order[0::2], order[1::2]
            paired = len(first) == len(second) and bool((pair[first] == pair[second]).all())
            if not (paired and chosen[first].all() and not chosen[second].any()):
                raise DataError(
                    f"a micro-batch holds the samples {batch.ids[members][:8].tolist()}, which are not whole pairs of "
                    "one chosen and one rejected response: plan with group_ids= the samples' `pair` values"
                )

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss; the two responses of a pair meet by sorting, whatever their places."""
        rewards = self.beta * tokens.segment_sum(tokens.log_probs - tokens["ref_log_probs"])
        order = torch.argsort(2 * tokens["pair"] + (~tokens["chosen"].bool()).long())
        chosen, rejected = rewards[order[0::2]], rewards[order[1::2]]
        margin = chosen - rejected
        smooth = self.label_smoothing
        per_pair = -(1 - smooth) * F.logsigmoid(margin) - smooth * F.logsigmoid(-margin)
        pairs = torch.full((), len(margin), device=margin.device)
        metrics = {
            "reward_margin": Mean(margin.detach().sum(), pairs),
            "reward_accuracy": Mean((margin.detach() > 0).sum(), pairs),
            "chosen_reward": Mean(chosen.detach().sum(), pairs),
        }
        return LossOutput(per_pair.sum() / max(tokens.total("chosen"), 1.0), metrics)
