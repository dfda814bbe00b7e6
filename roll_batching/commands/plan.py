"""`roll-batching plan LENGTHS`: plan sequence lengths of a file, compare modes, draw the plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from roll_batching.commands.options import MOST_RANKS, MOST_SPLITS, Clusters, Slices, print_table, slices_of
from roll_batching.commands.plan_sizes import compare_sizes, show_sizes
from roll_batching.errors import ConfigError, DataError, PlanError
from roll_batching.planning import Plan, PlanConstraints, SharedPrefixes, plan_step
from roll_batching.planning.arrays import Ints
from roll_batching.planning.batching_spec import Oversize
from roll_batching.planning.lengths_io import MOST_TOKENS, read_length_file
from roll_batching.planning.registry import ALGORITHMS

TABLE_ROWS = (
    (
        "micro-batches per rank",
        "num_micro_batches",
        "{:,}",
        "forward and backward passes of one step, equal on all ranks",
    ),
    ("real tokens", "real_tokens", "{:,}", "tokens of the sequences"),
    ("shared tokens", "shared_tokens", "{:,}", "of them computed for another sequence that begins alike (--group)"),
    ("computed tokens", "computed_tokens", "{:,}", "the other real tokens, padding and fillers on all ranks"),
    ("padding", "padding_share", "{:.1%}", "share of computed tokens that are not real tokens"),
    (
        "all padded to the longest",
        "tokens_before",
        "{:,}",
        "computed tokens if every sequence were padded to the longest",
    ),
    ("removed of that", "share_removed", "{:z.1%}", "share of those tokens that this plan does not compute"),
    ("fill of the cap", "fill", "{:.1%}", "computed tokens / (micro-batches x cap), without fillers"),
    (
        "rank imbalance",
        "imbalance",
        "{:.2%}",
        "cost of the costliest rank above the mean, for ranks that wait once per step",
    ),
    (
        "lockstep imbalance",
        "lockstep_imbalance",
        "{:.2%}",
        "the same for ranks that wait at every micro-batch, as with expert parallelism",
    ),
    (
        "objective",
        "objective",
        "{}",
        "when ranks wait for each other: rank_total, once per step; lockstep, at every micro-batch; pipeline",
    ),
    (
        "above its lower bound",
        "gap",
        "{:.3%}",
        "most that another plan with as many micro-batches could gain",
    ),
    ("fillers", "fillers", "{:,}", "micro-batches without a sequence, where there are too few sequences for all ranks"),
    ("truncated", "truncated", "{:,}", "sequences above the cap that were cut (--oversize truncate)"),
    ("dropped", "dropped", "{:,}", "sequences above the cap that were dropped (--oversize drop)"),
)
"""Printed table: label, key of the report, format, and meaning."""

EPILOG = "\n\n".join(
    [
        *(
            f"{mode.capitalize()} mode: {'; '.join(f'{entry.name} ({entry.summary})' for entry in registry)}."
            for mode, registry in ALGORITHMS.items()
        ),
        "Or your own packer: package.module:function.",
    ]
)
"""Values of --algorithm, for the end of the help text."""


def plan(
    lengths: Annotated[Path, typer.Argument(help="CSV, JSONL, npy or Parquet file with one sequence per row.")],
    column: Annotated[
        list[str] | None,
        typer.Option(help="Column to sum; may be repeated. Default: columns named like tokens or lengths."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=MOST_TOKENS, help="Cap of a micro-batch in tokens.")] = 16384,
    dp: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Data-parallel ranks.")] = 8,
    mode: Annotated[str, typer.Option(help="packed, dynamic or padded.")] = "packed",
    algorithm: Annotated[str | None, typer.Option(help="Algorithm of the mode, see below; default: the first.")] = None,
    tp: Annotated[int, typer.Option(min=1, max=MOST_SPLITS, help="Tensor-parallel size; aligns packs.")] = 1,
    cp: Annotated[int, typer.Option(min=1, max=MOST_SPLITS, help="Context-parallel size; aligns sequences.")] = 1,
    pp: Annotated[int, typer.Option(min=1, max=MOST_SPLITS, help="Pipeline stages; the makespan is minimized.")] = 1,
    vpp: Annotated[int, typer.Option(min=1, max=MOST_SPLITS, help="Model chunks per pipeline stage.")] = 1,
    ep: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_SPLITS,
            help="Expert-parallel size; ranks that share experts wait for each other at every micro-batch.",
        ),
    ] = 1,
    slices: Slices = None,
    pack_shapes: Annotated[int | None, typer.Option(min=1, help="Pad packs to one of this many lengths.")] = None,
    sequence_parallel: Annotated[bool, typer.Option(help="Align packs for sequence parallelism.")] = False,
    oversize: Annotated[
        str, typer.Option(help="Sequences above the cap: error, alone, slice, truncate, drop.")
    ] = "error",
    first: Annotated[int | None, typer.Option(min=1, help="Plan only the first N sequences.")] = None,
    group: Annotated[
        str | None, typer.Option(help="Column of integers: sequences with one value begin with the same --prefix.")
    ] = None,
    prefix: Annotated[
        str | None, typer.Option(help="Column of the tokens that a group has in common; packs compute them once.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the plan to this file.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare padded, dynamic and packed.")] = False,
    dynamic_cp: Annotated[
        bool,
        typer.Option(
            "--dynamic-cp",
            help="A context-parallel size per pack, compared with every single size in predicted seconds. --dp counts "
            "all ranks that share the data, and --max-tokens is the cap of one rank.",
        ),
    ] = False,
    max_cp: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="--dynamic-cp: largest size, a power of two that divides --dp. Default: the largest there is.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="--dynamic-cp: model whose shape predicts the times: qwen3-1.7b, qwen3-8b (default), qwen3-32b, a "
            "Hugging Face model directory, or a YAML file."
        ),
    ] = None,
    cluster: Clusters = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print what each row of the table means.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Plan one step for the sequence lengths in LENGTHS, and print its padding and balance."""
    try:
        if plot is not None:
            from roll_batching.jobs.observe.plan_picture import check_picture

            check_picture(plot, "plan")
        if not dynamic_cp and (max_cp is not None or model is not None or cluster):
            raise ConfigError(
                "--max-cp, --model and --cluster are read with --dynamic-cp only: add --dynamic-cp, or leave them out"
            )
        if dynamic_cp and compare:
            raise ConfigError("--dynamic-cp compares sizes and --compare modes: leave one of them out")
        if (group is None) != (prefix is None):
            raise ConfigError("--group and --prefix belong together: give both columns, or neither")
        table = read_length_file(lengths, column or (), [name for name in (group, prefix) if name is not None])
        sizes = table.lengths[:first]
        prefixes = None
        if group is not None and prefix is not None:
            prefixes = SharedPrefixes.of_groups(table.others[group][:first], table.others[prefix][:first], sizes)
        packed = PlanConstraints(
            dp_size=dp,
            max_tokens=max_tokens,
            tp_size=tp,
            cp_size=cp,
            pp_size=pp,
            vpp_size=vpp,
            ep_size=ep,
            sequence_parallel=sequence_parallel,
            pipeline_slices=slices_of(slices),
            pack_shapes=pack_shapes,
            oversize=cast(Oversize, oversize),
        )
        if dynamic_cp:
            sizes_compared = compare_sizes(
                sizes,
                _with_mode(packed, mode, algorithm, max_tokens),
                max_cp,
                model=model,
                rates=cluster or (),
                prefixes=prefixes,
            )
            show_sizes(sizes_compared, lengths, table, plot=plot, as_json=as_json)
            return
        chosen, reports = _make_plans(sizes, packed, mode, algorithm, compare, prefixes)
        if plot is not None:
            from roll_batching.jobs.observe.plan_picture import draw_plan

            draw_plan(chosen, plot)
    except (DataError, PlanError) as error:
        raise ConfigError(str(error)) from error
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "lengths": str(lengths),
                    "columns": table.columns,
                    "left_out": dict(table.left_out),
                    "fingerprint": chosen.fingerprint,
                    "constraints": chosen.constraints.to_dict(),
                    "reports": reports,
                    "plot": None if plot is None else str(plot),
                }
            )
        )
        return
    typer.echo(f"length = {' + '.join(table.columns)}")
    if chosen.slices is not None:
        typer.echo(f"slices: {chosen.slices.counts.sum():,} of {len(chosen.tokens):,} packs")
    for name, reason in table.left_out.items():
        typer.echo(f"left out: {name or 'a column without a name'} ({reason})")
    modes = [name for name in ("padded", "dynamic", "packed") if name in reports]
    rows = [(label, *(form.format(reports[name][key]) for name in modes)) for label, key, form, _ in TABLE_ROWS]
    print_table(("", *modes), rows, f"{chosen.report.samples:,} sequences on {dp} ranks", first="left")
    lines = (f"{label}: {meaning}" for label, _, _, meaning in TABLE_ROWS)
    typer.echo("\n".join(lines) if explain else "--explain tells what each row means")
    if plot is not None:
        typer.echo(f"picture: {plot}")


def _make_plans(
    sizes: Ints,
    packed: PlanConstraints,
    mode: str,
    algorithm: str | None,
    compare: bool,
    prefixes: SharedPrefixes | None,
) -> tuple[Plan, dict[str, Any]]:
    """Plan in `mode`, and reports by mode; with `compare`, of all modes. Packs alone share `prefixes`."""
    width = min(int(sizes.max()), packed.usable_tokens)
    chosen = plan_step(sizes, _with_mode(packed, mode, algorithm, width), prefixes=prefixes)
    reports = {mode: chosen.report.to_dict()}
    for other in ("padded", "dynamic", "packed") if compare else ():
        if other != mode:
            shared = prefixes if other == "packed" else None
            reports[other] = plan_step(sizes, _with_mode(packed, other, None, width), prefixes=shared).report.to_dict()
    return chosen, reports


def _with_mode(packed: PlanConstraints, mode: str, algorithm: str | None, width: int) -> PlanConstraints:
    """`packed` in another mode; in mode padded, rows are as long as the longest sequence (`width`)."""
    changes: dict[str, Any] = {"mode": mode, "algorithm": algorithm}
    if mode != "packed":
        changes |= {"pipeline_slices": 1, "pack_shapes": None}  # of packs alone
    return replace(packed, **changes, padded_length=width if mode == "padded" else None)
