"""Rows of a host's batch on the ranks that compute their samples, and log-probs back on the rank of each row.

With a context-parallel size per pack several ranks compute one pack, of samples that lie anywhere. Each of them calls
the host's loss, for the gradient of its own part. So the rows that the loss reads travel with the samples, and the
host's results come from one more call, without gradient, over the rows of each rank.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from roll_batching.distributed import consensus
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.losses.contract import LossOutput
from roll_batching.losses.host import HostLoss
from roll_batching.losses.views import TokenView
from roll_batching.packing.pack_layout import IntArray
from roll_batching.planning import Plan
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.exchange_group import ExchangeGroup


@dataclass(frozen=True)
class HostRows:
    """A host's batch, and the host's own functions that divide and join such batches."""

    data: Any
    select: Callable[[Any, list[int]], Any]
    """(data, row numbers) -> these rows, in this order."""
    concat: Callable[[list[Any]], Any]
    """Batches of rows -> all rows."""
    ids: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """int64[rows], ascending: the sample id of each row, which `HostModel.run` gives."""

    def select_ids(self, ids: IntArray) -> Any:
        """The rows of these sample ids, in this order."""
        return self.select(self.data, np.searchsorted(self.ids, ids).tolist())

    def gather_for_plan(self, plan: Plan, layout: ParallelLayout) -> HostRows:
        """The rows of the samples that this rank computes; on the last pipeline stage. Collective.

        Raises RankError on all ranks where the host's functions fail on one.
        """
        parts: list[bytes] = []
        assert plan.location is not None
        with consensus(layout.host_group, "rows of the host's batch"):
            if layout.is_last_stage:
                for rank in range(layout.dp_size):
                    samples = np.unique(plan.rank_samples(rank))
                    own = np.sort(plan.ids[samples[plan.location[samples] == layout.dp_rank]])
                    parts.append(_to_bytes((own, self.select_ids(own) if len(own) else None)))
        if layout.is_last_stage:
            parts = ExchangeGroup.of(layout.dp_group).all_to_all_bytes(parts)
        with consensus(layout.host_group, "rows of the host's batch"):
            received = [_from_bytes(part, layout.device) for part in parts]
            rows = [data for ids, data in received if len(ids)]
            data = self.concat(rows) if rows else self.data
            return replace(self, data=data, ids=np.concatenate([self.ids[:0], *(ids for ids, _ in received)]))


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(part: bytes, device: torch.device) -> Any:
    """The value, with tensors of another rank's accelerator on this rank's `device`."""
    restore: Any = torch.serialization.default_restore_location  # untyped

    def place(storage: Any, location: str) -> Any:
        return restore(storage, "cpu" if location == "cpu" else str(device))

    return torch.load(io.BytesIO(part), map_location=place, weights_only=False)


class RecordedLoss(HostLoss):
    """A host's loss that keeps the model's outputs that it was called with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outputs: list[tuple[IntArray, IntArray, dict[str, torch.Tensor]]] = []

    def token_loss(self, tokens: TokenView) -> LossOutput:
        """As `HostLoss`."""
        outputs = {name: tokens.jagged(getattr(tokens, name).detach()).values() for name in sorted(self.needs)}
        self._outputs.append((tokens.ids, tokens.lengths, outputs))
        return super().token_loss(tokens)

    def outputs(self, model_dtype: torch.dtype) -> SampleBatch:
        """Log-probs and entropies, in at least fp32, of all samples that this rank computed; on the host."""
        nothing = torch.zeros(0, dtype=torch.promote_types(model_dtype, torch.float32))
        fields = {}
        for name in sorted(self.needs):
            fields[name] = torch.cat([nothing, *(values[name].cpu() for _, _, values in self._outputs)])
        none = np.zeros(0, dtype=np.int64)
        columns = [np.concatenate([none, *(call[part] for call in self._outputs)]) for part in (0, 1)]
        ids, lengths = map(torch.from_numpy, columns)
        return SampleBatch(ids, lengths, fields, {name: FieldSpec("next_token") for name in fields})
