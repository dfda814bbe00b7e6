"""`roll-batching plan LENGTHS`: plan a file of sequence lengths, compare modes, draw the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from roll_batching.planning import Plan, PlanConstraints, plan_step
from roll_batching.planning.lengths_io import read_columns, sum_columns


def plan(
    lengths: Annotated[
        Path, typer.Argument(help="CSV (columns are summed), JSONL, npy or Parquet of sequence lengths.")
    ],
    column: Annotated[
        list[str] | None, typer.Option(help="Sum only this column; may be given again. Default: all with integers.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Cap of a micro-batch in tokens.")] = 16384,
    dp: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
    mode: Annotated[str, typer.Option(help="packed, dynamic or padded.")] = "packed",
    algorithm: Annotated[str | None, typer.Option(help="Algorithm of the mode; default: its best.")] = None,
    tp: Annotated[int, typer.Option(min=1)] = 1,
    cp: Annotated[int, typer.Option(min=1)] = 1,
    pp: Annotated[int, typer.Option(min=1)] = 1,
    vpp: Annotated[int, typer.Option(min=1)] = 1,
    sequence_parallel: Annotated[bool, typer.Option(help="Align packs for sequence parallelism.")] = False,
    oversize: Annotated[str, typer.Option(help="Sequences above the cap: error, alone, truncate, drop.")] = "error",
    first: Annotated[int | None, typer.Option(min=1, help="Plan only the first N sequences.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the plan into this file.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Padded, dynamic and packed side by side.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Plan one step over LENGTHS and say what it costs."""
    if plot is not None:
        from roll_batching.observe.plan_picture import check_picture, draw_plan

        check_picture(plot)
    table = read_columns(lengths, column or ())
    columns = list(table)
    sizes = sum_columns(table, lengths)[:first]
    packed = PlanConstraints(
        dp_size=dp,
        max_tokens=max_tokens,
        tp_size=tp,
        cp_size=cp,
        pp_size=pp,
        vpp_size=vpp,
        sequence_parallel=sequence_parallel,
        oversize=oversize,
    )
    width = min(int(sizes.max()), packed.usable_tokens)
    constraints = _as_mode(packed, mode, algorithm, width)
    made = plan_step(sizes, constraints)
    reports: dict[str, Any] = {mode: made.report.to_dict()}
    if compare:
        for other in ("padded", "dynamic", "packed"):
            if other != mode:
                reports[other] = plan_step(sizes, _as_mode(packed, other, None, width)).report.to_dict()
    if plot is not None:
        draw_plan(made, plot)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "lengths": str(lengths),
                    "columns": columns,
                    "fingerprint": made.fingerprint,
                    "constraints": constraints.to_dict(),
                    "reports": reports,
                    "plot": None if plot is None else str(plot),
                }
            )
        )
        return
    if len(columns) > 1:
        typer.echo(f"length = {' + '.join(columns)}")
    _print_table({name: reports[name] for name in ("padded", "dynamic", "packed") if name in reports}, made)
    if plot is not None:
        typer.echo(f"picture: {plot}")


def _as_mode(packed: PlanConstraints, mode: str, algorithm: str | None, width: int) -> PlanConstraints:
    """The same layout and cap in another mode; padded means rows as wide as the longest sequence."""
    return replace(packed, mode=mode, algorithm=algorithm, padded_length=width if mode == "padded" else None)


def _print_table(reports: dict[str, dict[str, Any]], plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = (
        ("micro-batches per rank", "num_micro_batches", "{:,}"),
        ("real tokens", "real_tokens", "{:,}"),
        ("computed tokens", "computed_tokens", "{:,}"),
        ("padding", "padding_share", "{:.1%}"),
        ("all padded to the longest", "tokens_before", "{:,}"),
        ("removed of that", "share_removed", "{:.1%}"),
        ("fill of the cap", "fill", "{:.1%}"),
        ("rank imbalance", "imbalance", "{:.2%}"),
        ("lockstep imbalance", "lockstep_imbalance", "{:.2%}"),
        ("fillers", "fillers", "{:,}"),
        ("truncated", "truncated", "{:,}"),
        ("dropped", "dropped", "{:,}"),
    )
    table = Table(title=f"{plan.report.samples:,} sequences on {plan.constraints.dp_size} ranks")
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")
    for label, key, form in rows:
        table.add_row(label, *(form.format(report[key]) for report in reports.values()))
    Console().print(table)
