"""Losses of the heads of multi-token prediction, over the tokens that the main loss counts.

The loss of head k is the mean cross-entropy of its labels over the whole step and all ranks, so that no partition into
micro-batches changes it. The sum of all heads' losses enters the gradient with `mtp_loss_scaling_factor` / heads, as in
Megatron-Core. It is a metric, and no part of the reported loss.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from roll_batching.losses.contract import LossSpec, Mean, Metric, head_count
from roll_batching.losses.denominators import StepCounts
from roll_batching.losses.head import HeadContext
from roll_batching.modeling.head import gpt_of
from roll_batching.packing.batch import PackedBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadLosses:
    """The share of a micro-batch in the losses of all heads."""

    loss: torch.Tensor
    """What enters the gradient, a number."""
    metrics: dict[str, Metric]
    """By head: the mean of its loss."""

    @classmethod
    def of(
        cls, outputs: torch.Tensor, pack: PackedBatch, chunk: Any, head: HeadContext, spec: LossSpec, counts: StepCounts
    ) -> HeadLosses:
        """From the heads' hidden states [1, heads x tokens / cp (/ tp), hidden]. A filler's loss is 0."""
        gpt = gpt_of(chunk)
        scale, total = gpt.config.mtp_loss_scaling_factor / spec.heads, []
        metrics: dict[str, Metric] = {}
        for number, hidden in enumerate(outputs.chunk(spec.heads, dim=1), 1):
            given = pack.params.next_tokens
            labels, rows = given.tokens[number], given.rows[number - 1]
            values = head.label_log_probs(hidden, labels, rows, chunk, detach=gpt.detach_heads)
            # Gathered, so that every context-parallel rank has the whole loss, as of the main one.
            entropy = -(head.gather(values, pack) if pack.samples else values).sum()
            count = max(counts.tokens[head_count(number)], 1)
            total.append(entropy * (scale / count) if scale else entropy.nan_to_num(0, 0, 0) * 0)
            if pack.samples and pack.params.cp_rank == 0:
                labelled = torch.full_like(entropy, given.counts[number - 1])
                metrics[f"mtp_{number}_loss"] = Mean(entropy.detach(), labelled)
        return cls(loss=torch.stack(total).sum(), metrics=metrics)


def split_output(output: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states of the model, those of all heads), of a model's output [1, (1 + heads) s, hidden]."""
    tokens = output.shape[1] // (1 + heads)
    return output[:, :tokens], output[:, tokens:]
