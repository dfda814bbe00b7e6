"""Distillation: divergences between a teacher's and a student's distributions over the teacher's likely tokens.

The teacher's k most likely tokens and their log-probs travel with the samples. By default both distributions are
renormalised over these tokens, at a temperature. On-policy distillation: Agarwal et al. 2024, arXiv 2306.13649;
MiniLLM, Gu et al. 2024, arXiv 2306.08543; skewed divergences: DistiLLM, Ko et al. 2024, arXiv 2402.03898; adaptive:
Wu et al. 2025, arXiv 2404.02657.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from roll_batching.errors import DataError
from roll_batching.losses.contract import CANDIDATES, LossOutput
from roll_batching.losses.estimators import resolve_aggregation
from roll_batching.losses.views import TokenView
from roll_batching.samples import SampleBatch
from roll_batching.samples.token_fields import counted_positions, require_field, token_place
from roll_batching.settings.losses import DistillSettings

TEACHER_LOG_PROBS, TEACHER_IDS = "teacher_log_probs", "teacher_ids"
"""The fields of the teacher's likely tokens: next_token, [tokens, k], fp32 log-probs and int32 ids."""
FLOOR = -100.0
"""The teacher's log-prob of tokens that are not among its k, with `zero_outside_topk` (NeMo-RL)."""


def _forward(p: torch.Tensor, log_p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The sum of p (log p - q) over the last dimension; q holds log-probs, p may be 0."""
    return torch.where(p > 0, p * (log_p - q), 0.0).sum(-1)  # 0 log 0 is 0, which the product would make NaN


def divergence(settings: DistillSettings, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """[tokens] divergence of two [tokens, k] log-probs over the same k tokens, each normalised over them."""
    p, q = teacher.exp(), student.exp()
    match settings.objective:
        case "forward_kl":
            return _forward(p, teacher, student)
        case "reverse_kl":
            return _forward(q, student, teacher)
        case "mixed_kl":
            return _mix(settings.mixed_weight, _forward(p, teacher, student), _forward(q, student, teacher))
        case "js_divergence":
            middle = _mixture(teacher, student, 0.5)
            return (_forward(p, teacher, middle) + _forward(q, student, middle)) / 2
        case "skewed_forward_kl":
            return _forward(p, teacher, _mixture(teacher, student, settings.skew))
        case "skewed_reverse_kl":
            return _forward(q, student, _mixture(student, teacher, settings.skew))
        case "adaptive_kl":
            head = _head_weight(p, q.detach(), settings.adaptive_share)
            return _mix(head, _forward(p, teacher, student), _forward(q, student, teacher))


def _mixture(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """The log of share exp(first) + (1 - share) exp(second), with 0 < share < 1."""
    return torch.logaddexp(first + np.log(share), second + np.log(1 - share))


def _mix(weight: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return weight * first + (1 - weight) * second


def _head_weight(p: torch.Tensor, q: torch.Tensor, share: float) -> torch.Tensor:
    """[tokens] part of the distance |p - q| in the teacher's head: beyond its least likely tokens that sum to `share`.

    1/2 where there is no distance.
    """
    ascending, order = p.sort(-1)
    gap = (ascending - q.gather(-1, order)).abs()
    in_tail = ascending.cumsum(-1) <= share  # the token that crosses `share` is in the head
    head, total = torch.where(in_tail, 0.0, gap).sum(-1), gap.sum(-1)
    return torch.where(total > 0, head / total.clamp(min=torch.finfo(total.dtype).tiny), 0.5)


@dataclass(frozen=True, kw_only=True)
class DistillLoss(DistillSettings):
    """aggregation(weight D(teacher, student) + (1 - weight) (-log p(token))), with a divergence D of `objective`.

    Reads `response_mask`, `teacher_log_probs` and `teacher_ids`. With p and q renormalised over the teacher's tokens at
    `temperature`: forward_kl is KL(p, q), reverse_kl KL(q, p), mixed_kl their mixture. With `zero_outside_topk` q stays
    the student's distribution over the whole vocabulary, and the teacher's log-prob of other tokens is -100.
    """

    candidates: ClassVar[str] = TEACHER_IDS
    masks: ClassVar[tuple[str, ...]] = ("response_mask",)

    @property
    def needs(self) -> frozenset[str]:
        """Outputs of the student that the loss reads: log-probs of the teacher's tokens; other terms need more."""
        needs = {CANDIDATES} | ({"log_probs"} if self.weight != 1 else set())
        reads_rest = self.zero_outside_topk and self.objective != "forward_kl"
        return frozenset(needs | ({"entropy"} if reads_rest else set()))

    def check(self, batch: SampleBatch, micro_batches: Sequence[npt.NDArray[np.int64]]) -> None:
        """Raises `DataError` for missing fields of the teacher, and for log-probs that are not finite."""
        for name in (TEACHER_LOG_PROBS, TEACHER_IDS):
            require_field(batch, name, "distillation", "next_token")
            if batch[name].dim() != 2:
                raise DataError(f"{name} has the shape {list(batch[name].shape)}: give the teacher's as [tokens, k]")
        log_probs, ids = batch[TEACHER_LOG_PROBS], batch[TEACHER_IDS]
        if log_probs.shape != ids.shape:
            raise DataError(f"teacher_log_probs is {list(log_probs.shape)}, teacher_ids {list(ids.shape)}: give pairs")
        wrong = (~torch.isfinite(log_probs.cpu())).any(1) & counted_positions(batch, self.masks[0])
        if wrong.any():
            sample, _ = token_place(batch, int(wrong.nonzero()[0, 0]))
            raise DataError(
                f"teacher_log_probs of sample {sample} are not finite at {int(wrong.sum())} counted "
                "positions of the batch: look at the teacher's weights"
            )

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """The pack's share of the loss; metrics: the divergence, the teacher's mass on its k tokens, agreement."""
        teacher_log_probs, student_log_probs = tokens[TEACHER_LOG_PROBS], tokens.candidate_log_probs
        teacher = (teacher_log_probs / self.temperature).log_softmax(-1)
        if self.zero_outside_topk:
            per_token = self._over_vocabulary(teacher, student_log_probs, tokens)
        else:
            per_token = divergence(self, teacher, (student_log_probs / self.temperature).log_softmax(-1))
        metrics = {
            "divergence": tokens.mean_metric(per_token),
            "teacher_mass": tokens.mean_metric(teacher_log_probs.exp().sum(-1)),
            "student_mass": tokens.mean_metric(student_log_probs.exp().sum(-1)),
        }
        if self.weight != 1:
            likelihood = -tokens.log_probs
            metrics["sft_loss"] = tokens.mean_metric(likelihood)
            per_token = _mix(self.weight, per_token, likelihood)
        return LossOutput(resolve_aggregation(self.aggregation)(tokens, per_token), dict(metrics))

    def _over_vocabulary(self, teacher: torch.Tensor, student: torch.Tensor, tokens: TokenView) -> torch.Tensor:
        """[tokens] divergence with q over the whole vocabulary; `student` holds log q at the teacher's tokens."""
        q = student.exp()
        forward = _forward(teacher.exp(), teacher, student)
        if self.objective == "forward_kl":
            return forward
        # sum over other tokens of q (log q - FLOOR), where sum q log q over all tokens is -entropy.
        rest = -tokens.entropy - (q * student).sum(-1) - FLOOR * (1 - q.sum(-1))
        reverse = _forward(q, student, teacher) + rest
        return reverse if self.objective == "reverse_kl" else _mix(self.mixed_weight, forward, reverse)
