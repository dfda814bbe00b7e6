"""A simulated step as a picture: passes and waiting over time, one lane per data-parallel rank and pipeline stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll_batching.jobs.observe.plan_picture import save_figure
from roll_batching.tools.simulation.step import SimulatedStep

MOST_LANES = 48
"""Most lanes that are drawn; of more ranks some are chosen, the slowest and the fastest among them."""
FORWARD, BACKWARD, EXCHANGE, WAITING = "#4c72b0", "#55a868", "#e08a3c", "0.92"
_LABEL_WIDTH = 0.011
"""Least width of a labelled pass, as a share of the step, per character."""


def draw_timeline(step: SimulatedStep, path: str | Path, *, title: str = "") -> Path:
    """Write a PNG (or what the suffix says) of `step`; returns the path. Raises `ConfigError` if that fails."""
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
    count, stages = len(step.packs), step.plan.constraints.pp_size
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
    number = "cp n: a pack on n context-parallel ranks" if step.plan.blocks is not None else "number: micro-batch"
    handles.append(Patch(color="none", label=number))
    axis.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=8, frameon=False, fontsize=9)


def _shade(colour: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """`colour`, lighter for later chunks."""
    from matplotlib.colors import to_rgb

    white = 0.45 * chunk / max(chunks - 1, 1)
    red, green, blue = (channel + (1 - channel) * white for channel in to_rgb(colour))
    return red, green, blue
