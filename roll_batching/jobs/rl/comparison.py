"""What the same samples would cost in the other batching modes: planned, not run."""

from __future__ import annotations

from typing import Any

import numpy as np

from roll_batching.jobs.config import WorkerConfig
from roll_batching.planning import ParallelDims, PlanConstraints, plan_step


class ModeComparison:
    """Computed tokens of a mini-batch in each mode, under the settings that `worker` has for that mode.

    A mode without a cap of its own takes the cap of the mode that runs.
    """

    def __init__(self, worker: WorkerConfig, dims: ParallelDims, *, sequence_length: int) -> None:
        cap = (
            worker.batching().train.max_tokens
            or worker.sequence_packing_args.max_packed_sequence_length_train
            or worker.max_tokens_per_microbatch_in_train
            or worker.training_args.per_device_train_batch_size * sequence_length
        )
        packing = worker.sequence_packing_args
        packed_cap = packing.max_packed_sequence_length_train or cap
        self._full = sequence_length
        planning = worker.planning_args
        if planning.oversize == "error":  # it fits in the mode that runs, whose cap may be another
            planning = planning.model_copy(update={"oversize": "alone"})
        off: dict[str, Any] = {
            "planning_args": planning,
            "use_sequence_packing": False,
            "use_dynamic_batching": None,
            "use_dynamic_batching_in_train": False,
        }
        variants: dict[str, dict[str, Any]] = {
            "dynamic": off
            | {
                "use_dynamic_batching_in_train": True,
                "max_tokens_per_microbatch_in_train": worker.max_tokens_per_microbatch_in_train or cap,
            },
            "packed": off
            | {
                "use_sequence_packing": True,
                "sequence_packing_args": packing.model_copy(update={"max_packed_sequence_length_train": packed_cap}),
            },
        }
        self._constraints = {
            mode: PlanConstraints.of(dims, worker.model_copy(update=changes).batching().train)
            for mode, changes in variants.items()
        }

    def tokens(self, lengths: np.ndarray) -> dict[str, int]:
        """Computed tokens, all ranks: `full` (all rows of the sequence length), `padded` (of the longest sample),
        `dynamic`, `packed`. `lengths` is int64 `[n]`, one mini-batch.
        """
        planned = {
            mode: plan_step(lengths, constraints).report.computed_tokens
            for mode, constraints in self._constraints.items()
        }
        count = len(lengths)
        return {"full": count * self._full, "padded": count * int(lengths.max()), **planned}
