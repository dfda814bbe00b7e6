"""From the last stage's output to what views show: log-probs and entropies in pack order, or logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from roll_batching.losses.vocab_parallel import token_log_probs
from roll_batching.modeling.head import gpt_of, head_input, head_weight, is_deferred
from roll_batching.modeling.parallel import ParallelLayout
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.collectives import gather_results


@dataclass(frozen=True, kw_only=True)
class HeadContext:
    """What the head needs to know beyond the model."""

    layout: ParallelLayout
    vocab_size: int | None
    """Real vocabulary; None counts every column of the head."""
    temperature: float = 1.0

    def log_probs(
        self, output: torch.Tensor, pack: PackedBatch, chunk: Any, *, entropy: bool, idle: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies [tokens] in pack order, gathered once over context parallelism.

        `output` is the model's, [1, tokens / cp (/ tp), hidden] from a deferred head or
        [1, tokens / cp, vocabulary / tp]. With `idle` no row counts, yet the head takes part.
        """
        source, weight = self._source(output, chunk)
        rows = pack.head_rows[:0] if idle else pack.head_rows
        values, entropies = token_log_probs(
            source,
            pack.labels,
            weight=weight,
            rows=rows,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
            entropy=entropy,
            tp_group=self.layout.tp_group,
        )
        if entropies is None:
            return gather_results(values, pack.params, self.layout.cp_group), None
        both = gather_results(torch.stack([values, entropies], -1), pack.params, self.layout.cp_group)
        return both[:, 0], both[:, 1]

    def logits(self, output: torch.Tensor, chunk: Any) -> torch.Tensor:
        """Logits of this rank's rows after temperature, [tokens / cp, vocabulary / tp], with gradient."""
        source, weight = self._source(output, chunk)
        logits = source if weight is None else F.linear(source, weight)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def _source(self, output: torch.Tensor, chunk: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        gpt = gpt_of(chunk)
        if not is_deferred(gpt):
            return output.reshape(-1, output.shape[-1]), None
        weight = head_weight(gpt)
        return head_input(output, weight, self.layout.sequence_parallel), weight
