"""The section on the plan of a run's last step: which rank computes which samples when, and where ranks wait.

Times are predicted from the planner's costs, not measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from roll_batching.jobs.observe.run_files import MOST_SAMPLES
from roll_batching.planning import Plan
from roll_batching.planning.pipeline.execution import execute_plan, units_of_ranks
from roll_batching.tools.report.charts import INK, Chart, Section, Trace
from roll_batching.tools.report.run_files import RunFiles

MOST_ROWS = 64
"""Most rows of a timeline: ranks, or stages of pipelines."""
MOST_BOXES = 1500
"""Most samples that are drawn one by one; above, a micro-batch is one box. Also the most boxes of a pipeline."""
_MOST_LENGTHS = 12


def plan_section(runs: Sequence[RunFiles]) -> Section:
    """Timelines of the runs' last plans."""
    charts, absent = [], []
    for run in runs:
        last = run.last_plan
        if last is None:
            absent.append(f"The plan of {run.label}: its folder has no last_plan.json that can be read.")
        elif last.plan is None:
            absent.append(
                f"The plan of {run.label}: a run keeps plans of up to {MOST_SAMPLES:,} samples, and this one has "
                f"{last.samples:,}."
            )
        else:
            name = f"{last.phase}, step {last.step:,}" + (f" ({run.label})" if len(runs) > 1 else "")
            charts.append(_timeline_chart(last.plan, name))
    note = (
        "The plan of the last recorded step (of its last optimizer step). Runs keep this one plan only. Times follow "
        "from the planner's costs and are not measured; communication is free. Grey: a rank waits for another one."
    )
    return Section("Plan of a step", note=note, charts=charts, absent=absent)


def _timeline_chart(plan: Plan, name: str) -> Chart:
    stages = plan.constraints.pp_size
    ranks = min(plan.constraints.dp_size, max(MOST_ROWS // stages, 1))
    if stages > 1:
        passes = 2 * stages * plan.constraints.vpp_size * plan.num_micro_batches
        ranks = min(ranks, max(MOST_BOXES // passes, 1))
    timeline = make_timeline(plan, ranks)
    report = plan.report
    hidden = plan.constraints.dp_size - ranks
    note = (
        f"{report.samples:,} samples, {report.real_tokens:,} tokens in {len(plan.tokens):,} micro-batches on "
        f"{plan.constraints.dp_size:,} data-parallel ranks; fill {report.fill:.1%}, "
        f"padding {report.padding_share:.1%}, bubbles {timeline.bubble_share:.2%}"
    )
    note += f" of the rows shown: {hidden:,} more ranks are not drawn." if hidden else "."
    boxes = timeline.boxes
    if stages > 1:
        traces = [_passes(plan, boxes, kind, label) for kind, label in (("F", "forward"), ("B", "backward"))]
    elif int(np.diff(plan.offsets)[[box.pack for box in boxes]].sum()) <= MOST_BOXES:
        frames = {"color": "rgba(0,0,0,0)", "line": {"color": INK, "width": 1.2}}
        outlines = _bars("micro-batch", *_places(boxes)) | {"hoverinfo": "skip", "marker": frames}
        traces = [_samples(plan, boxes), outlines]
    else:
        marker = _colored([int(plan.tokens[box.pack]) for box in boxes], "tokens", 0.3)
        marker |= {"cmin": 0}  # near the cap, differences are small
        bars = {"hovertext": [_pack_text(plan, box) for box in boxes], "marker": marker, "showlegend": False}
        traces = [_bars("micro-batches", *_places(boxes)) | bars]
    rows, starts, durations = zip(*timeline.bubbles, strict=True) if timeline.bubbles else ((), (), ())
    unit = " ms" if timeline.is_milliseconds else " of the mean work of a row"
    waits = {"hovertext": [f"waits {duration:.3g}{unit}" for duration in durations]}
    grey = {"marker": {"color": "#d5dae0", "line": {"width": 0}}}
    traces.append(_bars("waiting", rows, starts, durations) | waits | grey)
    ticks = list(range(0, timeline.rows, -(-timeline.rows // 16)))
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "hovermode": "closest",
        "bargap": 0.15,
        "yaxis": {
            "title": {"text": "replica, stage" if stages > 1 else "data-parallel rank"},
            "autorange": "reversed",
            "tickvals": ticks,
            "ticktext": [f"{row // stages}, {row % stages}" if stages > 1 else str(row) for row in ticks],
            "showgrid": False,
            "zeroline": False,
        },
    }
    x = "predicted milliseconds" if timeline.is_milliseconds else "planned cost (1 = the mean work of a row)"
    height = 130 + max(16 * timeline.rows, 110)
    return Chart(f"Timeline: {name}", traces, "", x=x, note=note, height=height, layout=layout, is_wide=True)


def _bars(name: str, rows: Sequence[int], starts: Sequence[float], durations: Sequence[float]) -> Trace:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(rows),
        "base": [_short(value) for value in starts],
        "x": [_short(value) for value in durations],
        "hoverinfo": "text",
        "width": 0.86,
    }


def _samples(plan: Plan, boxes: Sequence[Box]) -> Trace:
    """One bar per sample, coloured by its length."""
    rows, starts, durations, texts, lengths = [], [], [], [], []
    for box in boxes:
        first, end = int(plan.offsets[box.pack]), int(plan.offsets[box.pack + 1])
        members = plan.samples[first:end]
        costs = plan.sample_costs[members].astype(float)
        total = costs.sum()
        start = box.start
        for place, (sample, cost) in enumerate(zip(members.tolist(), costs.tolist(), strict=True)):
            duration = box.duration * (cost / total if total else 1 / len(members))
            shared = int(plan.shared[first + place])
            rows.append(box.row)
            starts.append(start)
            durations.append(duration)
            lengths.append(int(plan.used[sample]))
            prefix = f", {shared:,} of them computed with the sample before" if shared else ""
            texts.append(f"sample {int(plan.ids[sample])}: {lengths[-1]:,} tokens{prefix}<br>{_pack_text(plan, box)}")
            start += duration
    trace = _bars("samples", rows, starts, durations)
    return trace | {"hovertext": texts, "marker": _colored(lengths, "tokens", 0.5), "showlegend": False}


def _passes(plan: Plan, boxes: Sequence[Box], kind: str, label: str) -> Trace:
    """Bars of the forward or backward passes of a pipeline."""
    boxes = [box for box in boxes if box.kind == kind]
    color = "#6f9fd4" if kind == "F" else "#1f5a96"
    return _bars(label, *_places(boxes)) | {
        "hovertext": [f"{label}<br>{_pack_text(plan, box)}" for box in boxes],
        "marker": {"color": color, "line": {"color": "white", "width": 0.5}},
    }


def _places(boxes: Sequence[Box]) -> tuple[list[int], list[float], list[float]]:
    return [box.row for box in boxes], [box.start for box in boxes], [box.duration for box in boxes]


def _pack_text(plan: Plan, box: Box) -> str:
    """The contents of a micro-batch, for its hover text."""
    members = plan.samples[plan.offsets[box.pack] : plan.offsets[box.pack + 1]]
    tokens, cap = int(plan.tokens[box.pack]), plan.constraints.max_tokens
    size = int(plan.cp_sizes[box.pack]) // plan.constraints.cp_size
    fill = f", {tokens / (cap * size):.0%} of the cap" if cap else ""
    place = f"rank {box.row // plan.constraints.pp_size}, micro-batch {box.index}"
    text = f"{place}: {len(members):,} samples, {tokens:,} tokens{fill}"
    if not len(members):
        return f"{text} (a filler)"
    lengths = sorted(plan.used[members].tolist(), reverse=True)
    more = f", {len(lengths) - _MOST_LENGTHS:,} more" if len(lengths) > _MOST_LENGTHS else ""
    return f"{text}<br>lengths: {', '.join(f'{length:,}' for length in lengths[:_MOST_LENGTHS])}{more}"


def _colored(values: Sequence[int], title: str, line: float) -> dict[str, Any]:
    return {
        "color": list(values),
        "colorscale": "Viridis",
        "reversescale": True,
        "colorbar": {"title": {"text": title}, "thickness": 12, "outlinewidth": 0},
        "line": {"color": "white", "width": line},
    }


def _short(value: float) -> float:
    return float(f"{value:.7g}")


# ---- times of micro-batches


@dataclass(frozen=True)
class Box:
    """One pass of a micro-batch on a row of the timeline."""

    row: int
    """DP rank; in a pipeline DP rank x stages + stage."""
    start: float
    """Milliseconds for a plan with predicted times; otherwise in units of the mean work of a row."""
    duration: float
    pack: int
    """Index into the plan's micro-batch arrays."""
    index: int
    """Position among the micro-batches of the rank."""
    kind: str
    """"step" for forward and backward together; "F" or "B" in a pipeline."""


@dataclass(frozen=True)
class Timeline:
    """Boxes of all rows, and the gaps between them."""

    boxes: list[Box]
    bubbles: list[tuple[int, float, float]]
    """Row, start and duration."""
    rows: int
    end: float
    is_milliseconds: bool

    @property
    def bubble_share(self) -> float:
        """Share of all rows' time until the end that is bubbles."""
        return sum(duration for _, _, duration in self.bubbles) / (self.rows * self.end) if self.end else 0.0


def make_timeline(plan: Plan, ranks: int) -> Timeline:
    """Timeline of the first `ranks` DP ranks, as the planner predicts it: transfers between stages are free."""
    constraints, stages = plan.constraints, plan.constraints.pp_size
    units, pack_of = units_of_ranks(plan)
    costs = plan.costs / plan.cp_sizes * constraints.cp_size
    if plan.slices is not None:
        costs = plan.slices.costs.astype(np.float64)
    is_predicted = plan.blocks is not None and bool(plan.blocks.step_time)
    if plan.blocks is not None and is_predicted:
        costs = plan.blocks.times.astype(np.float64)
    events = execute_plan(plan, costs / 3, costs * 2 / 3)  # a backward pass costs two forward passes
    end = max((passes[-1].end for of_rank in events for passes in of_rank), default=0.0)
    shares = plan.chunk_shares or (1.0,) * (stages * constraints.vpp_size)
    boxes = []
    for row, (rank, stage) in enumerate(itertools.product(range(ranks), range(stages))):
        for event in events[rank][stage]:
            unit = units[rank][event.index]
            if stages == 1 and event.is_backward:
                continue  # the box of the forward pass holds both
            kind, part = ("step", 3) if stages == 1 else ("B", 2) if event.is_backward else ("F", 1)
            share = shares[event.chunk * stages + stage] / constraints.vpp_size
            duration = float(costs[unit]) * share * part / 3
            boxes.append(Box(row, event.start, duration, pack_of[unit], event.index, kind))
    rows = ranks * stages
    # Predicted times are nanoseconds, shown in milliseconds; costs are shown in means of the rows' work.
    scale = 1e-6 if is_predicted else rows / (sum(box.duration for box in boxes) or rows)
    boxes = [replace(box, start=box.start * scale, duration=box.duration * scale) for box in boxes]
    return Timeline(boxes, _gaps(boxes, rows, end * scale), rows, end * scale, is_predicted)


def _gaps(boxes: list[Box], rows: int, end: float) -> list[tuple[int, float, float]]:
    """(Row, start, duration) of every gap between boxes until `end`."""
    gaps: list[tuple[int, float, float]] = []
    clock = [0.0] * rows
    smallest = end * 1e-9  # smaller gaps are rounding errors
    for box in sorted(boxes, key=lambda box: box.start):
        if box.start - clock[box.row] > smallest:
            gaps.append((box.row, clock[box.row], box.start - clock[box.row]))
        clock[box.row] = box.start + box.duration
    return [*gaps, *((row, at, end - at) for row, at in enumerate(clock) if end - at > smallest)]
