"""An optimizer step in all: what is computed, and how much of it is the model's own work on real tokens."""

from __future__ import annotations

from dataclasses import dataclass

from roll_batching.rehearsal.job import Rehearsal


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Of one replica's optimizer step; its micro-batches are taken to be as full as the rehearsed one."""

    micro_batches: int | None
    """None where a stream decides."""
    computed: float
    """FLOPs of a micro-batch, forward and backward, on all ranks of the replica."""
    model: float
    """Of these the model's own, 6 per parameter and real token, and attention (`modeling.cost`)."""
    padding: float
    """Share of the tokens that are not real."""

    @property
    def useful(self) -> float:
        """The model's share of what is computed. The rest: padding, recomputation, the head's second pass."""
        return self.model / self.computed


def totals_of(found: Rehearsal) -> StepTotals:
    """The totals of a rehearsed job's training."""
    dims, job = found.dims, found.job
    computed, pipeline = 0.0, dims.pp_size
    for number, stage in enumerate(found.stages):
        alike = pipeline - 2 if number == 1 and len(found.stages) == 3 else 1
        passes = stage.report.flops.get("forward", 0.0) + stage.report.flops.get("backward", 0.0)
        computed += alike * passes / stage.report.micro_batches
    training = found.stages[0].report.training
    count = None
    if job.stream is None:
        count = training.in_step or -(-job.mini_batch_size(dims.dp_size) // dims.dp_size // training.samples)
    return StepTotals(
        micro_batches=count,
        computed=computed * dims.tp_size * dims.cp_size,
        model=training.model_flops,
        padding=training.padding,
    )
