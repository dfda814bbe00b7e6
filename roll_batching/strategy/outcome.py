"""What a pass with a loss came to: one loss and one set of metrics, or one error, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LossError
from roll_batching.losses.metric_kinds import HostMetric, join_parts, to_host
from roll_batching.losses.runner import LossRunner, MicroBatchRecord
from roll_batching.strategy.finite import describe_weights
from roll_batching.strategy.state import ModelState


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a pass came to, over all ranks or on some."""

    loss: float
    metrics: Sequence[dict[str, HostMetric]]
    """Of micro-batches of different ranks, to be joined."""
    gradient: float
    """The sum of squares of the gradients, replicated ones as often as they are there; 0 where nobody asks."""
    problems: tuple[str, ...]
    """What is wrong with the loss."""
    infinite: bool
    """Whether it is that a loss is not finite."""

    @classmethod
    def merge(cls, parts: Sequence[Outcome]) -> Outcome:
        """What all of `parts` came to."""
        return cls(
            loss=sum(part.loss for part in parts),
            metrics=[metrics for part in parts for metrics in part.metrics],
            gradient=sum(part.gradient for part in parts),
            problems=tuple(dict.fromkeys(text for part in parts for text in part.problems)),
            infinite=any(part.infinite for part in parts),
        )


def join_outcomes(
    state: ModelState,
    records: list[MicroBatchRecord],
    runner: LossRunner,
    gradient: Callable[[], torch.Tensor] | None = None,
) -> tuple[float, dict[str, HostMetric], float]:
    """(loss of the step, metrics, sum of squares of gradients) over all ranks; raises what any found, on all.

    Collective: one exchange, behind the first host read of the step. Every rank tells its loss, its metrics and, where
    a loss is not finite or broke its contract, what is wrong and with which samples. `gradient` gives the sum of
    squares of this rank's gradients, on the device.
    """
    layout = state.layout
    parts = layout.team.join("the step's loss", lambda: _outcome(layout, records, runner, gradient), Outcome.merge)
    whole = Outcome.merge(parts)
    if whole.problems:
        weights = f". {describe_weights(state)}" if whole.infinite else ""
        raise LossError("; ".join(whole.problems) + weights) from runner.error
    return whole.loss, join_parts(whole.metrics), whole.gradient


def _outcome(
    layout: ParallelLayout,
    records: list[MicroBatchRecord],
    runner: LossRunner,
    gradient: Callable[[], torch.Tensor] | None,
) -> Outcome:
    """This rank's loss, metrics and gradients, and what is wrong with its loss."""
    square = None if gradient is None else gradient()
    losses, metrics = to_host([r.loss for r in records], [r.metrics for r in records])
    problem = None if runner.error is None else str(runner.error)
    bad = [r for r, value in zip(records, losses, strict=True) if not math.isfinite(value)]
    if problem is None and bad:
        samples = sorted({sample for record in bad for sample in record.nonfinite_samples()})
        value = losses[records.index(bad[0])]
        problem = (
            f"the loss is {value} for sample{'s' if len(samples) > 1 else ''} {', '.join(map(str, samples[:16]))}: "
            "look at these samples' fields and at what the loss computes from them. The optimizer made no step"
        )
    speaks = layout.is_last_stage and layout.tp_rank == 0 and (layout.cp_rank == 0 or runner.partial_over_cp)
    return Outcome(
        loss=sum(losses) if speaks else 0.0,
        metrics=[metrics] if speaks and metrics else [],
        gradient=0.0 if square is None else float(square),
        problems=() if problem is None else (problem,),
        infinite=bool(bad),
    )
