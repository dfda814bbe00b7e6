"""Reports of simulated steps: tables of text, JSON with the timeline of every rank, and a picture of its passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from roll_batching.jobs.observe.plan_picture import save_figure
from roll_batching.planning.simulated_step import SimulatedStep
from roll_batching.tools.simulation.scenario import Scenario, SweepResult

MOST_SHOWN_RANKS = 16
"""Most data-parallel ranks in the table; of more the slowest and the fastest are shown."""
LEFT_OUT = (
    "left out: sums of gradients, the optimizer, the exchange of tokens among experts, uneven stages (embedding "
    "and head), memory (`roll-batching rehearse` counts it)"
)
RANK_HEADER = ("rank", "packs", "tokens", "ends, s", "compute", "exchange", "bubbles", "end wait")


def lines_of(scenario: Scenario, step: SimulatedStep, cluster: str) -> Iterator[str]:
    """Yields the lines about a simulated step, its time first. `cluster`: as `describe_cluster` returns it."""
    constraints, report = scenario.constraints, step.plan.report
    devices = constraints.world_size
    yield (
        f"{step.seconds:.4g} s a step, predicted: {step.tokens_per_second:,.0f} tokens per second, "
        f"{step.tokens_per_second / devices:,.0f} per device"
    )
    yield (
        f"{report.samples:,} sequences, {report.real_tokens:,} tokens; {constraints} = {devices:,} devices of {cluster}"
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
    if step.plan.slices is not None:
        counts = step.plan.slices.counts
        yield f"slices: {counts.sum():,} of {len(counts):,} packs, up to {counts.max()} of one"
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


def pipeline_lines(steps: Mapping[str, SimulatedStep]) -> Iterator[str]:
    """Lines that compare the schedules of a pipeline, and say which one to take."""
    fastest = min(steps, key=lambda name: steps[name].seconds)
    yield "pipeline: " + ", ".join(
        f"{name} {step.seconds:.4g} s (bubbles {step.bubble_share:.1%})" for name, step in steps.items()
    )
    if fastest == "slices" and steps[fastest].plan.slices is not None:
        yield "fastest: slices; set pipeline_slices: auto"
    elif fastest.startswith("vpp"):
        yield f"fastest: {fastest}; set virtual_pipeline_model_parallel_size: {fastest.removeprefix('vpp ')}"
    else:
        yield "fastest: whole packs"


def rank_rows(step: SimulatedStep) -> tuple[list[tuple[str, ...]], int]:
    """(Rows of the table of data-parallel ranks, number of ranks left out)."""
    packs = [len({step.pack_of[unit] for unit in units}) for units in step.units]
    ranks = list(range(len(packs)))
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
                f"{packs[rank]:,}",
                f"{int(tokens[rank]):,}",
                f"{end:.4g}",
                *(f"{share / step.seconds:.1%}" for share in shares),
            )
        )
    return rows, len(packs) - len(ranks)


def sweep_rows(swept: Sequence[SweepResult]) -> list[tuple[str, ...]]:
    """Rows of the table of a sweep, in the order of `swept`: sizes, then figures, without impossible combinations."""
    rows = []
    for result in swept:
        if result.step is not None:
            step, counts = result.step, [len(units) for units in result.step.units]
            few, many = min(counts), max(counts)
            rows.append(
                (
                    *(f"{value:,}" if isinstance(value, int) else str(value) for value in result.changes.values()),
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


# ---- picture


MOST_LANES = 48
"""Most lanes that are drawn; of more ranks some are chosen, the slowest and the fastest among them."""
FORWARD, BACKWARD, EXCHANGE, WAITING = "#4c72b0", "#55a868", "#e08a3c", "0.92"
_LABEL_WIDTH = 0.011
"""Width of a character of a label, as a share of the step: narrower passes have no label."""


def draw_timeline(step: SimulatedStep, path: str | Path, *, title: str = "") -> Path:
    """Draw the passes of `step` into the file `path`, in the format of its suffix; returns the path.

    Raises `ConfigError` if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    constraints = step.plan.constraints
    ranks = chosen_ranks(step)
    lanes = [(rank, stage) for rank in ranks for stage in range(constraints.pp_size)]
    height = 0.34 if len(lanes) <= 24 else 0.24
    figure, axis = pyplot.subplots(figsize=(15, 1.9 + height * len(lanes)), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, 0.35 / figure.get_figheight(), 1, 1 - 0.7 / figure.get_figheight()))
    gap = 0.5 if constraints.pp_size > 1 else 0.0  # between ranks
    places = [lane + gap * ranks.index(rank) for lane, (rank, _) in enumerate(lanes)]
    for place, (rank, stage) in zip(places, lanes, strict=True):
        _draw_lane(axis, step, rank, stage, place)
    names = [f"rank {rank}" if constraints.pp_size == 1 else f"rank {rank}, stage {stage}" for rank, stage in lanes]
    axis.set_yticks(places, names, fontsize=9 if len(lanes) <= 24 else 7)
    axis.set_ylim(places[-1] + 0.6, -0.6)
    axis.set_xlim(0, step.seconds)
    axis.set_xlabel("seconds of the step (predicted, not measured)")
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    _draw_legend(axis, step)
    head = title or f"{step.plan.report.samples:,} sequences, {constraints}: {step.seconds:.3g} s a step"
    if len(ranks) < constraints.dp_size:
        head += f" ({len(ranks)} of {constraints.dp_size} data-parallel ranks)"
    figure.text(0.01, 1 - 0.28 / figure.get_figheight(), head, fontsize=13)
    foot = (
        f"{step.tokens_per_second:,.0f} tokens/s   computing {step.compute_share:.1%}   exchange "
        f"{step.exchange_share:.1%}   bubbles {step.bubble_share:.1%}   waiting at the end {step.end_wait_share:.1%}"
    )
    figure.text(0.01, 0.1 / figure.get_figheight(), foot, fontsize=10, color="0.3")
    return save_figure(figure, path, dpi=110)


def chosen_ranks(step: SimulatedStep) -> list[int]:
    """Data-parallel ranks that are drawn: all, or some at equal distances with the slowest and the fastest."""
    count, stages = len(step.units), step.plan.constraints.pp_size
    most = max(2, MOST_LANES // stages)
    if count <= most:
        return list(range(count))
    chosen = {int(step.rank_ends.argmax()), int(step.rank_ends.argmin())}
    for place in range(most):
        if len(chosen) < most:
            chosen.add(place * count // most)
    return sorted(chosen)


def _draw_lane(axis: Any, step: SimulatedStep, rank: int, stage: int, y: float) -> None:
    chunks, sizes = step.plan.constraints.vpp_size, step.plan.cp_sizes
    axis.barh(y, step.seconds, height=0.82, color=WAITING, linewidth=0)
    bars: dict[Any, list[tuple[float, float]]] = {}
    for event in step.timeline[rank][stage]:
        pack, busy, exchange = step.parts_of(rank, event)
        colour = _shade(BACKWARD if event.is_backward else FORWARD, event.chunk, chunks)
        bars.setdefault(colour, []).append((event.start, busy - exchange))
        if exchange:
            bars.setdefault(EXCHANGE, []).append((event.start + busy - exchange, exchange))
        label = f"cp {sizes[pack]}" if step.plan.blocks is not None else str(event.index)
        if busy - exchange > step.seconds * _LABEL_WIDTH * max(len(label), 1.3) * 0.6:
            x = event.start + (busy - exchange) / 2
            axis.text(x, y, label, ha="center", va="center", fontsize=7, color="white", clip_on=True)
    for colour, spans in bars.items():
        axis.broken_barh(spans, (y - 0.41, 0.82), facecolors=colour, edgecolor="white", linewidth=0.4)


def _draw_legend(axis: Any, step: SimulatedStep) -> None:
    from matplotlib.patches import Patch

    lighter = " (later model chunks lighter)" if step.plan.constraints.vpp_size > 1 else ""
    handles = [Patch(color=FORWARD, label="forward"), Patch(color=BACKWARD, label=f"backward{lighter}")]
    if step.exchange.any():
        handles.append(Patch(color=EXCHANGE, label="exchange of keys and values (drawn at the end of a pass)"))
    handles.append(Patch(color=WAITING, label="waiting"))
    number = "number: micro-batch" if step.plan.slices is None else "number: slice"
    if step.plan.blocks is not None:
        number = "cp n: a pack on n context-parallel ranks"
    handles.append(Patch(color="none", label=number))
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=8, frameon=False, fontsize=9)


def _shade(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """`colour`, lighter for later chunks."""
    from matplotlib.colors import to_rgb

    white = 0.45 * chunk / max(chunks - 1, 1)
    red, green, blue = (channel + (1 - channel) * white for channel in to_rgb(colour))
    return red, green, blue
