"""Losses of multi-token prediction heads, over the tokens that the main loss counts.

The loss of head k is the mean cross-entropy of its labels over the whole step and all ranks, so it does not depend on
micro-batches. The sum of all heads' losses enters the gradient times `mtp_loss_scaling_factor` / heads, as in
Megatron-Core. The heads' losses are metrics; the reported loss leaves them out.
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
class MTPLosses:
    """Loss and metrics of all heads for one micro-batch."""

    loss: torch.Tensor
    """Scalar that is added to the loss before backward."""
    metrics: dict[str, Metric]
    """`mtp_1_loss` and so on: the mean loss of each head."""

    @classmethod
    def of(
        cls, outputs: torch.Tensor, pack: PackedBatch, chunk: Any, head: HeadContext, spec: LossSpec, counts: StepCounts
    ) -> MTPLosses:
        """Computes them from the heads' hidden states, [1, heads x tokens / cp (/ tp), hidden]; 0 for a filler."""
        gpt = gpt_of(chunk)
        scale, total = gpt.config.mtp_loss_scaling_factor / spec.heads, []
        metrics: dict[str, Metric] = {}
        for number, hidden in enumerate(outputs.chunk(spec.heads, dim=1), 1):
            inputs = pack.params.mtp_inputs
            labels, rows = inputs.tokens[number], inputs.rows[number - 1]
            values = head.label_log_probs(hidden, labels, rows, chunk, detach=gpt.detach_heads)
            # Gathered, so that every context-parallel rank has the whole loss, like that of the main head.
            entropy = -(head.gather(values, pack) if pack.samples else values).sum()
            count = max(counts.tokens[head_count(number)], 1)
            # Added with a factor of 0, too: overlapped gradient reduction waits for every parameter.
            total.append(entropy * (scale / count) if scale else entropy.nan_to_num(0, 0, 0) * 0)
            if pack.samples and pack.params.cp_rank == 0:
                labelled = torch.full_like(entropy, inputs.counts[number - 1])
                metrics[f"mtp_{number}_loss"] = Mean(entropy.detach(), labelled)
        return cls(loss=torch.stack(total).sum(), metrics=metrics)


def split_output(output: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a model's output, [1, (1 + heads) s, hidden], into hidden states of the model and of all heads."""
    tokens = output.shape[1] // (1 + heads)
    return output[:, :tokens], output[:, tokens:]
