"""Computed tokens of the same samples in the other batching modes: planned, not run."""

from __future__ import annotations

from typing import Any

import numpy as np

from roll_batching.jobs.config import WorkerConfig
from roll_batching.planning import ParallelDims, PlanConstraints, plan_step


class ModeComparison:
    """Computed tokens of a mini-batch in each mode, under the settings that `role` has for that mode.

    A mode without a cap takes that of the mode that runs.
    """

    def __init__(self, role: WorkerConfig, dims: ParallelDims, *, sequence_length: int) -> None:
        cap = (
            role.batching().train.max_tokens
            or role.sequence_packing_args.max_packed_sequence_length_train
            or role.max_tokens_per_microbatch_in_train
            or role.training_args.per_device_train_batch_size * sequence_length
        )
        packing = role.sequence_packing_args
        packed_cap = packing.max_packed_sequence_length_train or cap
        self._full = sequence_length
        planning = role.planning_args
        if planning.oversize == "error":  # samples fit the running mode's cap, which may be larger
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
                "max_tokens_per_microbatch_in_train": role.max_tokens_per_microbatch_in_train or cap,
            },
            "packed": off
            | {
                "use_sequence_packing": True,
                "sequence_packing_args": packing.model_copy(update={"max_packed_sequence_length_train": packed_cap}),
            },
        }
        multiple = role.strategy_args.strategy_config.pack_multiple
        self._constraints = {
            mode: PlanConstraints.of(dims, role.model_copy(update=changes).batching().train, pack_multiple=multiple)
            for mode, changes in variants.items()
        }

    def tokens(self, lengths: np.ndarray) -> dict[str, int]:
        """Computed tokens of all ranks by mode, for one mini-batch with `lengths`, int64 `[n]`.

        Modes: `full` (all rows padded to the sequence length), `padded` (to the longest sample), `dynamic`, `packed`.
        """
        planned = {
            mode: plan_step(lengths, constraints).report.computed_tokens
            for mode, constraints in self._constraints.items()
        }
        count = len(lengths)
        return {"full": count * self._full, "padded": count * int(lengths.max()), **planned}
