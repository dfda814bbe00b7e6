"""`roll-batching plan --dynamic-cp`: a context-parallel size per pack against every single size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import typer

from roll_batching.errors import ConfigError, PlanError
from roll_batching.planning import Plan, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.arrays import Ints
from roll_batching.planning.lengths_io import LengthFile
from roll_batching.planning.pack_times import Cluster, PackTimes
from roll_batching.planning.planner import plan_single_sizes
from roll_batching.settings.model import ArchitectureConfig, describe_model
from roll_batching.settings.model_cost import architecture_pack_times
from roll_batching.tools.simulation.clusters import cluster_of

ASSUMED_NAME = "Qwen3-8B"
ASSUMED = ArchitectureConfig(
    vocab_size=151936,
    hidden_size=4096,
    num_layers=36,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=12288,
)
"""The shape that predicts times where no model is given."""


@dataclass(frozen=True)
class ComparedSizes:
    """Plans of one step, and what predicts their times."""

    model: str
    """Name of the model's shape."""
    is_assumed: bool
    """Whether no model was given."""
    times: PackTimes
    per_pack: Plan
    one_size: dict[int, Plan]
    """Plan of each single size that holds every sequence."""

    @property
    def best_size(self) -> int | None:
        """The single size with the shortest predicted step; None where no single size holds every sequence."""
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
    shape = ASSUMED if model is None else _shape_of(model)
    times = architecture_pack_times(shape, tp_size=rules.tp_size, pp_size=rules.pp_size, cluster=_cluster_of(rates))
    return ComparedSizes(
        model=ASSUMED_NAME if model is None else model,
        is_assumed=model is None,
        times=times,
        per_pack=plan_step(lengths, rules, times=times, prefixes=prefixes),
        one_size=plan_single_sizes(lengths, rules, times=times, prefixes=prefixes),
    )


def _shape_of(name: str) -> ArchitectureConfig:
    found = describe_model(name)
    if found is None:
        raise ConfigError(f"--model {name!r} is neither a model directory here nor in Hugging Face's cache")
    if found.problems:
        raise ConfigError(f"--model {name}: {'; '.join(found.problems)}")
    return ArchitectureConfig.model_validate(found.architecture)


def _cluster_of(rates: Sequence[str]) -> Cluster:
    """The cluster of `KEY=VALUE` texts. Raises `ConfigError`."""
    values: dict[str, float] = {}
    for rate in rates:
        key, separator, text = rate.partition("=")
        if not separator:
            raise ConfigError(f"--cluster {rate!r}: write KEY=VALUE, such as matmul_rate=5.9e14")
        try:
            values[key] = int(text) if text.isdecimal() else float(text)
        except ValueError:
            raise ConfigError(f"--cluster {rate!r}: {text!r} is not a number") from None
    return cluster_of(values, "--cluster")


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
    typer.echo(_source_of_times(compared))
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
    from rich.console import Console
    from rich.table import Table

    plan, best = compared.per_pack, compared.best_size
    rules = plan.constraints
    table = Table(title=f"{plan.report.samples:,} sequences on {rules.dp_size} ranks, {rules.max_tokens:,} tokens each")
    for name in ("size", "predicted s", "/ best", "tokens", "padding", "micro-batches"):
        table.add_column(name, justify="left" if name == "size" else "right")
    least = compared.seconds(compared.one_size[best]) if best is not None else None

    def add(name: str, row: Plan) -> None:
        seconds, report = compared.seconds(row), row.report
        ratio = "" if least is None else f"{seconds / least:.3f}"
        figures = (f"{report.computed_tokens:,}", f"{report.padding_share:.1%}", f"{report.num_micro_batches:,}")
        table.add_row(name, f"{seconds:.4g}", ratio, *figures)

    for size, row in compared.one_size.items():
        add(f"{size}, best single" if size == best else str(size), row)
    add("per pack", plan)
    Console().print(table)
    if missing := [str(size) for size in rules.legal_cp_sizes if size not in compared.one_size]:
        typer.echo(f"sizes that do not hold every sequence: {', '.join(missing)}")
    packs = _packs_by_size(plan)
    typer.echo("packs by size: " + ", ".join(f"{count:,} of size {size}" for size, count in packs.items()))
    typer.echo("size: context-parallel size of every pack; per pack: each has its own")
    typer.echo("predicted s: seconds of a step without the optimizer; / best: over those of the best single size")
    typer.echo("tokens: computed by all ranks, padding and fillers included; micro-batches: the most of a rank")


def _source_of_times(compared: ComparedSizes) -> str:
    times = compared.times
    shape = f"{times.num_layers} layers, hidden size {times.hidden_size:,}"
    model = (
        f"the shape of {compared.model} ({shape}), which is assumed: give --model for another"
        if compared.is_assumed
        else f"the shape of {compared.model} ({shape})"
    )
    rates = "default rates, estimates for H100s" if times.cluster == Cluster() else "the rates of --cluster"
    return f"times are predicted, not measured: {model}; {rates}"
