"""Losses of fine-tuning: supervised, preferences over pairs (DPO, IPO), and unpaired preferences (KTO).

KTO (Ethayarajh et al. 2024, arXiv 2402.01306, equations 7 and 8) compares the implied reward log p - log p_ref of a
response with a reference point: the mean implied reward of responses to other prompts. It is one number for a whole
optimizer step, so that the loss does not depend on micro-batches:

    other = mismatched(batch)                         # before `distribute` moves samples
    ...                                               # other's log_probs, by the policy and by the reference
    point = reference_point(other, strategy.layout)   # equal on every rank
    batch = batch.with_fields({"reference_point": torch.full((len(batch),), point)}, {"reference_point": "sample"})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from roll_batching.distributed import exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import DataError
from roll_batching.losses.contract import LossOutput, Mean
from roll_batching.losses.denominators import counted_per_sample
from roll_batching.losses.estimators import resolve_aggregation
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch
from roll_batching.samples.exchange_group import ExchangeGroup
from roll_batching.samples.flatten import row_indices
from roll_batching.samples.length_table import require_batch
from roll_batching.samples.token_fields import counted_positions, mask_of, require_field, sample_of
from roll_batching.settings.losses import DPOSettings, KTOSettings, PreferenceSettings, SFTSettings


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


# ---- pairs


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
            require_field(batch, name, type(self).__name__, "sample")
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
        """Sum of the losses of the pack's pairs, divided by the number of pairs of the whole step."""
        reduce = tokens.segment_mean if self.average_log_probs else tokens.segment_sum
        log_ratios = reduce(tokens.log_probs - tokens["ref_log_probs"])
        # Sorted by pair id, the two responses of a pair are neighbours, the chosen one first.
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
        # Each pair has one chosen response, so their number is that of the pairs of the step.
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


# ---- KTO


def mismatched(batch: SampleBatch, mask: str = "response_mask") -> SampleBatch:
    """Each prompt of `batch` with the response of the previous sample, the first with the last's. Collective.

    A response begins at the first token that `mask`, a token or next_token field, counts. The result has `input_ids`,
    `mask` and the ids of the prompts.

    Raises `RankError` on all ranks (`DataError` in a single process) if any rank has a sample without prompt or
    response, a batch of one sample, or no such mask.
    """
    with ExchangeGroup.of().consensus("mismatched"):
        return mismatch_local(batch, mask)


def mismatch_local(batch: SampleBatch, mask: str = "response_mask") -> SampleBatch:
    """`mismatched` on one rank: each sample's prompt with the response of the sample before it. Raises `DataError`."""
    require_batch("mismatched responses", batch)
    require_field(batch, mask, "mismatched", "token", "next_token")
    if len(batch) < 2:
        raise DataError(f"{len(batch)} samples have no response to another prompt: give at least two")
    of_next = batch.schema[mask].kind == "next_token"
    counted = counted_positions(batch, mask) if of_next else mask_of(batch, mask)
    # A next_token mask counts position i for token i + 1: + 1 gives the place of the token in its sample.
    position = torch.arange(batch.num_tokens) - batch.offsets[:-1][sample_of(batch)] + int(of_next)
    counted_position = torch.where(counted, position, batch.max_length)
    no_response = torch.full((len(batch),), batch.max_length)
    # A prompt has the tokens before the first counted one.
    prompt_lengths = no_response.scatter_reduce(0, sample_of(batch), counted_position, "amin")
    if len(wrong := batch.ids[(prompt_lengths == 0) | (prompt_lengths >= batch.lengths)]):
        raise DataError(f"the samples {wrong[:8].tolist()} have no prompt or no counted response token: leave them out")
    # roll(1): sample i gets the response of sample i - 1, the first one that of the last.
    starts, response_lengths = batch.offsets[:-1], (batch.lengths - prompt_lengths).roll(1)
    part_starts = torch.stack([starts, (starts + prompt_lengths).roll(1)], -1).flatten()
    token_index = row_indices(part_starts, torch.stack([prompt_lengths, response_lengths], -1).flatten())
    fields = {name: batch[name].cpu()[token_index] for name in ("input_ids", mask)}
    lengths = prompt_lengths + response_lengths
    return SampleBatch(batch.ids, lengths, fields, {name: batch.schema[name] for name in fields})


def reference_point(mismatched: SampleBatch, layout: ParallelLayout, mask: str = "response_mask") -> float:
    """The mean implied reward of mismatched responses over all ranks, at least 0. Collective.

    `mismatched` holds this rank's samples, equal on all ranks of a replica, with the next_token fields `log_probs` (of
    the current policy) and `ref_log_probs`. The implied reward is the sum of their difference over counted tokens.
    """
    log_ratios = (mismatched["log_probs"] - mismatched["ref_log_probs"]).detach().double().cpu()
    total = float(torch.where(counted_positions(mismatched, mask), log_ratios, 0.0).sum())
    local = (total, len(mismatched)) if layout.is_replica_leader else (0.0, 0)
    parts = exchange(layout.host_group, "the reference point of KTO", lambda: local)
    # It estimates a KL divergence, which is never negative (equation 7).
    return max(sum(total for total, _ in parts) / max(sum(count for _, count in parts), 1), 0.0)


@dataclass(frozen=True, kw_only=True)
class KTOLoss(KTOSettings):
    """w sigmoid(beta (point - reward)) for desirable responses, w sigmoid(beta (reward - point)) for undesirable ones.

    The reward is sum(log p - log p_ref); the loss is the mean over all responses of the step. Reads `response_mask`,
    `ref_log_probs` (next_token), and the sample fields `desirable` (bool) and `reference_point` (float, see
    `reference_point`; 0 everywhere gives unpaired APO-zero, D'Oosterlinck et al. 2024, arXiv 2408.06266). Samples are
    independent and packed in any order.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"log_probs"})
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)

    def check(self, batch: SampleBatch, micro_batches: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raises `DataError` if a sample field is missing."""
        for name in ("desirable", "reference_point"):
            require_field(batch, name, "KTOLoss", "sample")

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss."""
        log_ratio = tokens.segment_sum(tokens.log_probs - tokens["ref_log_probs"])
        desirable = tokens["desirable"].bool()
        is_desirable = desirable.to(log_ratio.dtype)
        weight = self.desirable_weight * is_desirable + self.undesirable_weight * (1 - is_desirable)
        margin = self.beta * (1 - 2 * is_desirable) * (log_ratio - tokens["reference_point"])
        # `margin` is beta (point - reward) for desirable responses, and its negative for the others.
        loss = tokens.sample_mean(weight * torch.sigmoid(margin))
        present = tokens.segment_count() > 0
        rewards = self.beta * log_ratio.detach()
        metrics = {
            "desirable_reward": Mean((rewards * (desirable & present)).sum(), (desirable & present).sum()),
            "undesirable_reward": Mean((rewards * (~desirable & present)).sum(), (~desirable & present).sum()),
            "reference_point": Mean((tokens["reference_point"] * present).sum(), present.sum()),
        }
        return LossOutput(loss, metrics)
