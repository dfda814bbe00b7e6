"""`roll-batching plan --dynamic-cp`: a context-parallel size per pack against every single size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from roll_batching.commands.options import print_table
from roll_batching.errors import PlanError
from roll_batching.planning import Plan, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.arrays import Ints
from roll_batching.planning.lengths_io import LengthFile
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.planner import plan_single_sizes
from roll_batching.tools.simulation.models import architecture_times, describe_cluster, read_architecture, read_cluster

ASSUMED_NAME = "Qwen3-8B"
ASSUMED = read_architecture("qwen3-8b")
"""The shape that predicts times where no model is given."""


@dataclass(frozen=True)
class ComparedSizes:
    """Plans of one step, and what predicts their times."""

    model: str
    """Name of the model's shape."""
    is_assumed: bool
    """Whether no model was given."""
    times: PackTimes
    rates: str
    """Where the rates come from."""
    per_pack: Plan
    one_size: dict[int, Plan]
    """Plan of each single size that holds every sequence."""

    @property
    def best_size(self) -> int | None:
        """The single size with the shortest predicted step, or None if no single size holds every sequence."""
        return min(self.one_size, key=lambda size: self.seconds(self.one_size[size]), default=None)

    @staticmethod
    def seconds(plan: Plan) -> float:
        """Predicted seconds of the step of `plan`."""
        predicted = plan.report.predicted_seconds
        assert predicted is not None
        return predicted


def compare_sizes(
    lengths: Ints,
    constraints: PlanConstraints,
    max_cp: int | None,
    *,
    model: str | None,
    rates: Sequence[str],
    prefixes: SharedPrefixes | None,
) -> ComparedSizes:
    """Plans of `lengths` with sizes up to `max_cp`, None: the largest that the ranks allow.

    Raises `ConfigError` for a model or rates that cannot be read, and `PlanError` for lengths that cannot be planned.
    """
    ranks = constraints.dp_size
    largest = ranks & -ranks if max_cp is None else max_cp
    if largest == 1:
        raise PlanError(
            f"--dynamic-cp has only the size 1 among {ranks} ranks: the largest size is a power of two that divides "
            "them; give --dp an even number, and --max-cp 2 or more"
        )
    rules = replace(constraints, max_cp_size=largest)
    shape = ASSUMED if model is None else read_architecture(model)
    times = architecture_times(shape, rules, read_cluster(*rates))
    return ComparedSizes(
        model=ASSUMED_NAME if model is None else model,
        is_assumed=model is None,
        times=times,
        rates=describe_cluster(*rates),
        per_pack=plan_step(lengths, rules, times=times, prefixes=prefixes),
        one_size=plan_single_sizes(lengths, rules, times=times, prefixes=prefixes),
    )


def show_sizes(compared: ComparedSizes, file: Path, table: LengthFile, *, plot: Path | None, as_json: bool) -> None:
    """Print the comparison, and draw the plan with a size per pack into `plot`."""
    if plot is not None:
        from roll_batching.jobs.observe.plan_picture import draw_plan

        draw_plan(compared.per_pack, plot)
    if as_json:
        typer.echo(json.dumps(_as_json(compared, file, table, plot)))
        return
    typer.echo(f"length = {' + '.join(table.columns)}")
    for name, reason in table.left_out.items():
        typer.echo(f"left out: {name or 'a column without a name'} ({reason})")
    _print_table(compared)
    times = compared.times
    shape = f"the shape of {compared.model} ({times.num_layers} layers, hidden size {times.hidden_size:,})"
    assumed = ", which is assumed: give --model for another" if compared.is_assumed else ""
    typer.echo(f"times are predicted, not measured: {shape}{assumed}; {compared.rates}")
    if plot is not None:
        typer.echo(f"picture: {plot}")


def _as_json(compared: ComparedSizes, file: Path, table: LengthFile, plot: Path | None) -> dict[str, Any]:
    return {
        "lengths": str(file),
        "columns": table.columns,
        "left_out": dict(table.left_out),
        "fingerprint": compared.per_pack.fingerprint,
        "constraints": compared.per_pack.constraints.to_dict(),
        "model": compared.model,
        "model_is_assumed": compared.is_assumed,
        "cluster": asdict(compared.times.cluster),
        "best_size": compared.best_size,
        "packs_by_size": _packs_by_size(compared.per_pack),
        "reports": {
            "per pack": compared.per_pack.report.to_dict(),
            **{str(size): plan.report.to_dict() for size, plan in compared.one_size.items()},
        },
        "plot": None if plot is None else str(plot),
    }


def _packs_by_size(plan: Plan) -> dict[int, int]:
    """Number of packs of each context-parallel size, without fillers."""
    sizes, counts = np.unique(plan.cp_sizes[~plan.fillers], return_counts=True)
    return dict(zip(sizes.tolist(), counts.tolist(), strict=True))


def _print_table(compared: ComparedSizes) -> None:
    plan, best = compared.per_pack, compared.best_size
    rules = plan.constraints
    least = compared.seconds(compared.one_size[best]) if best is not None else None
    names = {size: f"{size}, best single" if size == best else str(size) for size in compared.one_size}
    rows = []
    for name, row in [*((names[size], row) for size, row in compared.one_size.items()), ("per pack", plan)]:
        seconds, report = compared.seconds(row), row.report
        ratio = "" if least is None else f"{seconds / least:.3f}"
        figures = (f"{report.computed_tokens:,}", f"{report.padding_share:.1%}", f"{report.num_micro_batches:,}")
        rows.append((name, f"{seconds:.4g}", ratio, *figures))
    header = ("size", "predicted s", "/ best", "tokens", "padding", "micro-batches")
    title = f"{plan.report.samples:,} sequences on {rules.dp_size} ranks, {rules.max_tokens:,} tokens each"
    print_table(header, rows, title, first="left")
    if missing := [str(size) for size in rules.legal_cp_sizes if size not in compared.one_size]:
        typer.echo(f"sizes that do not hold every sequence: {', '.join(missing)}")
    packs = _packs_by_size(plan)
    typer.echo("packs by size: " + ", ".join(f"{count:,} of size {size}" for size, count in packs.items()))
    typer.echo("size: context-parallel size of every pack; per pack: each has its own")
    typer.echo("predicted s: seconds of a step without the optimizer; / best: over those of the best single size")
    typer.echo("tokens: computed by all ranks, padding and fillers included; micro-batches: the most of a rank")
