"""What a pass with a loss came to: one loss and one set of metrics, or one error, on all ranks."""

from __future__ import annotations

import math

from roll_batching.distributed import exchange
from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LossError
from roll_batching.losses.metric_kinds import HostMetric, join_parts, to_host
from roll_batching.losses.runner import LossRunner, MicroBatchRecord


def join_outcomes(
    layout: ParallelLayout, records: list[MicroBatchRecord], runner: LossRunner
) -> tuple[float, dict[str, HostMetric]]:
    """(loss of the step, metrics over all ranks); raises what any rank found, on all. Collective.

    The first host read of the step. Every rank tells its loss, its metrics and, where a loss is
    not finite or broke its contract, what is wrong and with which samples.
    """
    everyone = exchange(layout.host_group, "the step's loss", lambda: _outcome(layout, records, runner))
    problems = list(dict.fromkeys(text for text, _, _ in everyone if text))
    if problems:
        raise LossError("; ".join(problems)) from runner.breach
    return sum(loss for _, loss, _ in everyone), join_parts(part for _, _, part in everyone)


def _outcome(
    layout: ParallelLayout, records: list[MicroBatchRecord], runner: LossRunner
) -> tuple[str | None, float, dict[str, HostMetric]]:
    """What is wrong with this rank's loss, the loss, and its metrics: one device read."""
    losses, metrics = to_host([r.loss for r in records], [r.metrics for r in records])
    problem = None if runner.breach is None else str(runner.breach)
    bad = [r for r, value in zip(records, losses, strict=True) if not math.isfinite(value)]
    if problem is None and bad:
        samples = sorted({sample for record in bad for sample in record.culprits()})
        value = losses[records.index(bad[0])]
        problem = (
            f"the loss is {value} for sample{'s' if len(samples) > 1 else ''} {', '.join(map(str, samples[:16]))}: "
            "look at these samples' fields and at what the loss computes from them. The optimizer made no step"
        )
    speaks = layout.is_last_stage and layout.tp_rank == 0 and (layout.cp_rank == 0 or runner.partial_over_cp)
    return (problem, sum(losses), metrics) if speaks else (problem, 0.0, {})
