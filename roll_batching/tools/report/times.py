"""Sections on time: shares of a step, phases of the optimizer step, throughput; and staleness of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll_batching.tools.report.charts import COLORS, GREY, INK, Chart, areas, line
from roll_batching.tools.report.run_files import Row, RunFiles, phases_of
from roll_batching.tools.report.sections import Section, Table
from roll_batching.tools.report.tokens import lines_of_runs

_SHARES = (
    ("rollout", "rollouts"),
    ("reward", "rewards"),
    ("transfer", "weights"),
    ("train", "training"),
    ("wait", "waiting"),
)
_PARTS = (
    ("pack_seconds", "packing"),
    ("forward_backward_seconds", "forward and backward"),
    ("loss_seconds", "loss"),
    ("wait_seconds", "gradients, waiting for ranks"),
    ("optimizer_seconds", "optimizer"),
)


def time_section(runs: Sequence[RunFiles]) -> Section:
    """Time of each step by what it is spent on, and throughput."""
    charts: list[Chart] = []
    for phase in phases_of(runs):
        for make_chart in (_step_chart, _parts_chart):
            for run in runs:
                rows = [row for row in run.of_phase(phase) if "seconds" in row.values]
                chart = make_chart(rows, f"{phase} ({run.label})" if len(runs) > 1 else phase)
                charts += [] if chart is None else [chart]
    for phase in phases_of(runs):
        for title, y, key in (
            ("Throughput", "real tokens / s", "tokens_per_second"),
            ("Model FLOPs utilisation", "share of the device's peak", "mfu"),
        ):
            traces = lines_of_runs(runs, phase, [(key, title.lower())])
            if traces:
                charts.append(Chart(f"{title}: {phase}", traces, y, percent=key == "mfu", from_zero=True))
    tables = [table for run in runs if (table := _totals(run)) is not None]
    note = (
        "Times are rank 0's. Forward and backward do not include the loss; planning runs beside training and is not "
        "part of the step's time."
    )
    return Section("Time", note=note, charts=charts, tables=tables)


def _step_chart(rows: Sequence[Row], name: str) -> Chart | None:
    """Seconds of a step of reinforcement learning by part."""
    rows = [row for row in rows if any(f"share/{key}" in row.values for key, _ in _SHARES)]
    if not rows:
        return None
    steps, seconds = np.array([float(row.step) for row in rows]), _values(rows, "seconds")
    parts = [
        (label, np.maximum(_values(rows, f"share/{key}") * seconds, 0), color)
        for (key, label), color in zip(_SHARES, COLORS, strict=False)
    ]
    rest = np.maximum(seconds - sum(part for _, part, _ in parts), 0)
    traces = areas(steps, [*parts, ("evaluation and the rest", rest, GREY)], "seconds")
    return Chart(f"A whole step: {name}", traces, "seconds per step", from_zero=True)


def _parts_chart(rows: Sequence[Row], name: str) -> Chart | None:
    """Seconds of the optimizer steps by part."""
    rows = [row for row in rows if any(key in row.values for key, _ in _PARTS)]
    if not rows:
        return None
    steps = np.array([float(row.step) for row in rows])
    parts = [
        (label, np.maximum(_values(rows, key), 0), color) for (key, label), color in zip(_PARTS, COLORS, strict=False)
    ]
    traces = areas(steps, parts, "seconds")
    traces += line(rows, "plan_seconds", "planning, beside training", INK, dash="dot", has_band=False)
    return Chart(f"Optimizer steps: {name}", traces, "seconds per step", from_zero=True)


def _values(rows: Sequence[Row], key: str) -> np.ndarray:
    return np.array([row.values.get(key, 0.0) for row in rows])


def _totals(run: RunFiles) -> Table | None:
    """Time of whole phases."""
    records = []
    for phase in run.phases:
        rows = [row for row in run.of_phase(phase) if "seconds" in row.values]
        seconds = sum(row.values["seconds"] for row in rows)
        if not seconds:
            continue
        parts = [
            f"{label} {sum(row.values.get(f'share/{key}', 0.0) * row.values['seconds'] for row in rows) / seconds:.0%}"
            for key, label in _SHARES
            if any(f"share/{key}" in row.values for row in rows)
        ]
        records.append((phase, f"{len(rows):,}", _clock(seconds), f"{seconds / len(rows):,.3g} s", ", ".join(parts)))
    if not records:
        return None
    return Table(
        title=f"{run.label}: time of the recorded steps",
        head=("phase", "steps", "time", "per step", "shares"),
        records=records,
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def staleness_section(runs: Sequence[RunFiles]) -> Section:
    """Age of asynchronous rollouts, the queue, and waiting."""
    charts = []
    for title, y, columns in (
        ("Age of the samples", "steps", [("staleness_mean", "mean"), ("staleness_max", "oldest")]),
        ("Queue", "samples", [("queue_depth", "ready for later steps"), ("dropped_samples", "too old, sampled again")]),
        ("Waiting", "seconds per step", [("queue_wait_seconds", "training waits"), ("sampler_seconds", "sampling")]),
    ):
        for phase in phases_of(runs):
            traces = lines_of_runs(runs, phase, columns)
            if traces:
                charts.append(Chart(title, traces, y, from_zero=True))
    return Section("Staleness of asynchronous rollouts", charts=charts)
