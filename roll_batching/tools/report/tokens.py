"""Sections on tokens: computed, padded and saved ones, fill of the cap, balance of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll_batching.jobs.observe.closing import MODES
from roll_batching.tools.report.charts import BLUE, COLORS, DASHES, GREEN, GREY, ORANGE, Chart, Trace, areas, line
from roll_batching.tools.report.curves import RUN_COLORS
from roll_batching.tools.report.run_files import Row, RunFiles, phases_of
from roll_batching.tools.report.sections import Section, Table


def tokens_section(runs: Sequence[RunFiles]) -> Section:
    """Tokens of each step: computed ones, padding among them, and those that the run does not compute."""
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
    total, computed = _of(rows, "tokens"), _of(rows, "computed_tokens")
    shared = _of(rows, "shared_tokens")
    padded = np.array([row.values.get("tokens_padded", 0.0) for row in rows])
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


def _of(rows: Sequence[Row], key: str) -> np.ndarray:
    return np.array([row.values.get(key, 0.0) for row in rows])


def _modes_table(run: RunFiles) -> Table | None:
    """Tokens that the steps with a comparison compute in each mode."""
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
    """Most tokens of a micro-batch, from the settings; None without one, or with a size per pack."""
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
        if (text := settings.get(key, "")).isascii() and text.isdigit() and 0 < int(text[:18]):
            return int(text[:18])
    return None


def lines_of_runs(runs: Sequence[RunFiles], phase: str, columns: Sequence[tuple[str, str]]) -> list[Trace]:
    """Lines of columns: coloured by run where there are two, else by column."""
    traces = []
    for number, run in enumerate(runs):
        prefix = f"{run.label}: " if len(runs) > 1 else ""
        for index, (key, label) in enumerate(columns):
            color = RUN_COLORS[number] if len(runs) > 1 else COLORS[index]
            traces += line(run.of_phase(phase), key, prefix + label, color, dash=DASHES[index], has_band=index == 0)
    return traces
