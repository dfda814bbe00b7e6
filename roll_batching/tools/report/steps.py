"""Sections with values of each step: tokens, fill of the cap, balance of the ranks, times, staleness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll_batching.jobs.observe.closing import MODES
from roll_batching.tools.report.charts import (
    BLUE,
    COLORS,
    DASHES,
    GREEN,
    GREY,
    INK,
    ORANGE,
    Chart,
    Section,
    Table,
    Trace,
    areas,
    line,
)
from roll_batching.tools.report.curves import RUN_COLORS
from roll_batching.tools.report.run_files import Row, RunFiles, phases_of


def tokens_section(runs: Sequence[RunFiles]) -> Section:
    """Section of the tokens of each step: computed real tokens, computed padding, and tokens that the run saves."""
    charts, absent = [], []
    for phase in phases_of(runs):
        for run in runs:
            chart = _tokens_chart(run, phase, f"{phase} ({run.label})" if len(runs) > 1 else phase)
            if chart is not None:
                charts.append(chart)
    if charts and not any("tokens_padded" in row.values for run in runs for row in run.rows):
        absent.append("Tokens of padded training: only reinforcement learning compares modes in each step.")
    tables = [table for run in runs if (table := _modes_table(run)) is not None]
    note = (
        "Saved padding: tokens that the same steps would compute if each sample were padded to the longest of its "
        "mini-batch, without those that this run computes or takes from a common prefix."
    )
    return Section("Tokens computed and saved", note=note, charts=charts, tables=tables, absent=absent)


def _tokens_chart(run: RunFiles, phase: str, name: str) -> Chart | None:
    rows = [row for row in run.of_phase(phase) if {"tokens", "computed_tokens"} <= row.values.keys()]
    if not rows:
        return None
    steps = np.array([row.step for row in rows], dtype=np.float64)
    total, computed = _values(rows, "tokens"), _values(rows, "computed_tokens")
    shared = _values(rows, "shared_tokens")
    padded = _values(rows, "tokens_padded")
    real = np.minimum(total - shared, computed)
    traces = areas(
        steps,
        [
            ("computed: real tokens", np.maximum(real, 0), BLUE),
            ("computed: padding and fillers", np.maximum(computed - real, 0), ORANGE),
            ("saved: common prefixes", np.maximum(shared, 0), GREEN),
            ("saved: padding", np.maximum(padded - computed - shared, 0), GREY),
        ],
        "tokens",
    )
    return Chart(f"Tokens of a step: {name}", traces, "tokens per step", from_zero=True)


def _modes_table(run: RunFiles) -> Table | None:
    """Table of the tokens that each batching mode computes in the steps that compare modes; None without any."""
    rows = [row for row in run.rows if {"tokens", "computed_tokens", "tokens_padded"} <= row.values.keys()]
    if not rows:
        return None
    tokens = sum(row.values["tokens"] for row in rows)
    shared = sum(row.values.get("shared_tokens", 0.0) for row in rows)
    computed = sum(row.values["computed_tokens"] for row in rows)
    padded = sum(row.values["tokens_padded"] for row in rows)
    records = [("this run", computed, tokens - shared)]
    for mode, label in MODES:
        values = [row.values[f"tokens_{mode}"] for row in rows if f"tokens_{mode}" in row.values]
        if len(values) == len(rows):
            records.append((label, sum(values), tokens))
    return Table(
        title=f"{run.label}: tokens of {len(rows):,} steps in each batching mode",
        head=("mode", "tokens computed", "of them padding", "against padded"),
        records=[
            (
                label,
                f"{count:,.0f}",
                f"{1 - real / count:.1%}" if count else "",
                f"{count / padded:.2f} x" if padded else "",
            )
            for label, count, real in records
        ],
    )


def balance_section(runs: Sequence[RunFiles]) -> Section:
    """Fill of the cap, padding and imbalance per step."""
    charts: list[Chart] = []
    absent: list[str] = []
    for phase in phases_of(runs):
        fill = [trace for number, run in enumerate(runs) for trace in _fill(run, phase, number, len(runs))]
        if fill:
            charts.append(Chart(f"Fill and padding: {phase}", fill, "share of tokens", percent=True, from_zero=True))
        columns = [("imbalance", "costliest rank above the mean"), ("row_imbalance", "spread of ranks at an index")]
        traces = lines_of_runs(runs, phase, columns)
        if traces:
            charts.append(Chart(f"Imbalance: {phase}", traces, "share of the mean cost", percent=True, from_zero=True))
    for run in runs:
        if _cap(run) is None:
            absent.append(f"Fill of the cap of {run.label}: config.yaml names no cap of its packs.")
    note = (
        "Fill: computed tokens of a micro-batch (fillers included) / its cap. Imbalance is of planned costs, not of "
        "measured times."
    )
    return Section("Fill and balance", note=note, charts=charts, absent=absent)


def _fill(run: RunFiles, phase: str, number: int, runs: int) -> list[Trace]:
    cap = _cap(run)
    rows = run.of_phase(phase)
    if cap is not None:
        rows = [
            Row(row.phase, row.step, row.values | {"fill": row.values["tokens_per_row"] / cap})
            if "tokens_per_row" in row.values
            else row
            for row in rows
        ]
    prefix = f"{run.label}: " if runs > 1 else ""
    color = RUN_COLORS[number]
    return [
        *line(rows, "fill", f"{prefix}fill of the cap", color),
        *line(rows, "padding_share", f"{prefix}padding", color if runs > 1 else ORANGE, dash="dot"),
    ]


def _cap(run: RunFiles) -> int | None:
    """Cap of a micro-batch in tokens, from the settings; None without a cap, or if packs differ in context ranks."""
    settings = run.settings
    if settings.get("actor_train.strategy_args.strategy_config.dynamic_context_parallel") == "True":
        return None
    if settings.get("actor_train.strategy_args.strategy_config.context_parallel_size") == "auto":
        return None
    packing = "actor_train.sequence_packing_args.max_packed_sequence_length"
    keys = [f"{packing}_train", f"{packing}_forward"]
    if settings.get("actor_train.use_sequence_packing") != "True":
        keys = ["actor_train.max_tokens_per_microbatch_in_train"]
    for key in keys:
        # 18 digits: the file is untrusted, and longer numbers would not fit an int64.
        if (text := settings.get(key, "")).isascii() and text.isdigit() and 0 < int(text[:18]):
            return int(text[:18])
    return None


def lines_of_runs(runs: Sequence[RunFiles], phase: str, columns: Sequence[tuple[str, str]]) -> list[Trace]:
    """Lines of `columns`, (column, label) each: with two runs coloured by run, with one by column."""
    traces = []
    for number, run in enumerate(runs):
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        for index, (key, label) in enumerate(columns):
            color = RUN_COLORS[number] if len(runs) > 1 else COLORS[index]
            traces += line(run.of_phase(phase), key, prefix + label, color, dash=DASHES[index], has_band=index == 0)
    return traces


# ---- times


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
    """Time of each step by activity, and throughput."""
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
    """Table of the time of each phase; None without times."""
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
        minutes, rest = divmod(int(seconds + 0.5), 60)  # rounded to whole seconds
        clock = f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
        records.append((phase, f"{len(rows):,}", clock, f"{seconds / len(rows):,.3g} s", ", ".join(parts)))
    if not records:
        return None
    return Table(
        title=f"{run.label}: time of the recorded steps",
        head=("phase", "steps", "time", "per step", "shares"),
        records=records,
    )


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
