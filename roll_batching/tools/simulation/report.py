"""Reports of simulated steps: tables of text, and JSON with the timeline of every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from roll_batching.tools.simulation.scenario import Scenario, Swept
from roll_batching.tools.simulation.step import SimulatedStep

MOST_SHOWN_RANKS = 16
"""Most data-parallel ranks in the table; of more the slowest and the fastest are shown."""
LEFT_OUT = (
    "left out: sums of gradients, the optimizer, the exchange of tokens among experts, uneven stages (embedding "
    "and head), memory (`roll-batching rehearse` counts it)"
)
RANK_HEADER = ("rank", "packs", "tokens", "ends, s", "compute", "exchange", "bubbles", "end wait")


def lines_of(scenario: Scenario, step: SimulatedStep, cluster: str) -> Iterator[str]:
    """Lines about a step, the verdict first."""
    constraints, report = scenario.constraints, step.plan.report
    devices = constraints.world_size
    yield (
        f"{step.seconds:.4g} s a step, predicted: {step.tokens_per_second:,.0f} tokens per second, "
        f"{step.tokens_per_second / devices:,.0f} per device"
    )
    yield (
        f"{report.samples:,} sequences, {report.real_tokens:,} tokens; {constraints} = {devices:,} devices of "
        f"{cluster}, whose rates are estimates"
    )
    yield f"{'computing':<20}{step.compute_share:>8.1%}  padding and recomputed layers included"
    yield f"{'exchange':<20}{step.exchange_share:>8.1%}  waiting for keys and values of context-parallel ranks"
    yield f"{'bubbles':<20}{step.bubble_share:>8.1%}  waiting inside the step: for pipeline stages, for ranks that meet"
    yield f"{'waiting at the end':<20}{step.end_wait_share:>8.1%}  for slower data-parallel ranks"
    if constraints.pp_size > 1:
        free = step.with_free_transfers().waiting_share
        yield f"{'waiting in all':<20}{step.waiting_share:>8.1%}  {free:.1%} if transfers between stages were free"
    yield f"{'imbalance':<20}{step.imbalance:>8.1%}  slowest data-parallel rank above the mean"
    yield f"{'padding':<20}{report.padding_share:>8.1%}  of the computed tokens"
    if step.plan.blocks is not None:
        sizes, counts = np.unique(step.plan.blocks.cp_sizes, return_counts=True)
        shown = ", ".join(f"{count:,} on {size}" for size, count in zip(sizes.tolist(), counts.tolist(), strict=True))
        yield f"packs by number of context-parallel ranks: {shown}"
    for count, why in ((report.truncated, "truncated"), (report.dropped, "dropped"), (report.fillers, "fillers")):
        if count:
            yield f"{why}: {count:,}"


def single_size_lines(
    step: SimulatedStep, single: Mapping[int, SimulatedStep], reasons: Mapping[int, str]
) -> Iterator[str]:
    """Lines that compare packs of several context-parallel sizes with each single size."""
    if single:
        best = min(single, key=lambda size: single[size].seconds)
        yield (
            f"best single context-parallel size: {best}, {single[best].seconds:.4g} s; a size per pack takes "
            f"{step.seconds / single[best].seconds:.3f} of it"
        )
        others = ", ".join(f"{size}: {other.seconds:.4g} s" for size, other in single.items() if size != best)
        if others:
            yield f"other single sizes: {others}"
    for size, reason in reasons.items():
        yield f"single size {size} is impossible: {reason}"


def rank_rows(step: SimulatedStep) -> tuple[list[tuple[str, ...]], int]:
    """(Rows of the table of data-parallel ranks, number of ranks left out)."""
    ranks = list(range(len(step.packs)))
    if len(ranks) > MOST_SHOWN_RANKS:
        by_end = np.argsort(-step.rank_ends, kind="stable").tolist()
        half = MOST_SHOWN_RANKS // 2
        ranks = by_end[:half] + by_end[-half:]
    tokens = step.plan.by_rank(step.plan.tokens).sum(axis=1)
    rows = []
    for rank in ranks:
        end, busy, exchange = (float(values[rank]) for values in (step.rank_ends, step.busy, step.exchange))
        shares = (busy - exchange, exchange, max(0.0, end - busy), step.seconds - end)
        rows.append(
            (
                f"{rank}",
                f"{len(step.packs[rank]):,}",
                f"{int(tokens[rank]):,}",
                f"{end:.4g}",
                *(f"{share / step.seconds:.1%}" for share in shares),
            )
        )
    return rows, len(step.packs) - len(ranks)


def sweep_rows(swept: Sequence[Swept]) -> list[tuple[str, ...]]:
    """Rows of the table of a sweep, best first: sizes, then figures; impossible combinations are left out."""
    rows = []
    for one in swept:
        if one.step is not None:
            step, counts = one.step, [len(packs) for packs in one.step.packs]
            few, many = min(counts), max(counts)
            rows.append(
                (
                    *(f"{value:,}" if isinstance(value, int) else str(value) for value in one.changes.values()),
                    f"{step.plan.constraints.dp_size:,}",
                    f"{step.seconds:.4g}",
                    f"{step.tokens_per_second:,.0f}",
                    f"{step.exchange_share:.1%}",
                    f"{step.bubble_share:.1%}",
                    f"{step.imbalance:.1%}",
                    f"{many:,}" if few == many else f"{few:,} to {many:,}",
                )
            )
    return rows


SWEEP_FIGURES = ("dp", "s a step", "tokens/s", "exchange", "bubbles", "imbalance", "micro-batches")
"""Header of `sweep_rows` after the sizes."""


def figures_of(step: SimulatedStep) -> dict[str, Any]:
    """Figures of a step as plain values; shares are of the time of all ranks."""
    return {
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "compute_share": step.compute_share,
        "exchange_share": step.exchange_share,
        "bubble_share": step.bubble_share,
        "end_wait_share": step.end_wait_share,
        "imbalance": step.imbalance,
        "real_tokens": step.plan.report.real_tokens,
        "fingerprint": step.plan.fingerprint,
        "constraints": step.plan.constraints.to_dict(),
    }


def timeline_of(step: SimulatedStep) -> list[dict[str, Any]]:
    """Passes of every data-parallel rank and pipeline stage as plain values, in seconds."""
    rows = []
    for rank, stages in enumerate(step.timeline):
        for stage, events in enumerate(stages):
            passes = []
            for event in events:
                pack, busy, exchange = step.parts_of(rank, event)
                passes.append(
                    {
                        "pass": "backward" if event.is_backward else "forward",
                        "micro_batch": event.index,
                        "chunk": event.chunk,
                        "cp_size": int(step.plan.cp_sizes[pack]),
                        "start": event.start,
                        "end": event.end,
                        "busy": busy,
                        "exchange": exchange,
                    }
                )
            rows.append({"dp_rank": rank, "stage": stage, "passes": passes})
    return rows
