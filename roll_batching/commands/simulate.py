"""`roll-batching simulate`: predicted step time of a job or of a file of lengths, its timeline, and sweeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from roll_batching.commands.options import MOST_RANKS, MOST_SPLITS, Clusters, Slices, print_table, slices_of
from roll_batching.errors import ConfigError, DataError, LayoutError, PlanError
from roll_batching.files import atomic_file, cause, check_replaceable
from roll_batching.jobs.config import load_config
from roll_batching.planning import PlanConstraints
from roll_batching.planning.batching_spec import Oversize
from roll_batching.planning.lengths_io import MOST_TOKENS, read_lengths
from roll_batching.settings import ArchitectureConfig

if TYPE_CHECKING:
    from roll_batching.planning.arrays import Ints
    from roll_batching.planning.pack_times import Cluster
    from roll_batching.tools.simulation import Scenario, SimulatedStep
    from roll_batching.tools.simulation.scenario import SweepResult

_MARK = {"written_by": "roll-batching simulate"}
"""First key of the file of --json."""


def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change in --config, such as actor_train.use_sequence_packing=false."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of a job.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="CSV, JSONL, npy or Parquet file with the sample lengths of one step; with --config also `data`: the "
            "first step of the job's own file (task sft and dpo)."
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(help="Column to sum; may be repeated. Default: columns named like tokens or lengths."),
    ] = None,
    first: Annotated[int | None, typer.Option(min=1, help="Simulate only the first N sequences.")] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="With --config: number of ranks. Default: those of device_mapping.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Without --config: qwen3-1.7b, qwen3-8b, qwen3-32b, a model directory, or a YAML file."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_TOKENS, help="Cap of a micro-batch; with --dynamic-cp, of a rank (16384)."),
    ] = None,
    dp: Annotated[int | None, typer.Option(min=1, max=MOST_RANKS, help="Data-parallel ranks. Default: 8.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, max=MOST_SPLITS, help="Tensor-parallel size. Default: 1.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, max=MOST_SPLITS, help="Context-parallel size. Default: 1.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, max=MOST_SPLITS, help="Pipeline stages. Default: 1.")] = None,
    vpp: Annotated[
        int | None, typer.Option(min=1, max=MOST_SPLITS, help="Model chunks per pipeline stage. Default: 1.")
    ] = None,
    ep: Annotated[int | None, typer.Option(min=1, max=MOST_SPLITS, help="Expert-parallel size. Default: 1.")] = None,
    slices: Slices = None,
    sequence_parallel: Annotated[
        bool | None, typer.Option("--sequence-parallel", help="Divide activations over tensor-parallel ranks.")
    ] = None,
    dynamic_cp: Annotated[
        bool | None,
        typer.Option(
            "--dynamic-cp", help="A context-parallel size per pack, over all --dp ranks; single sizes are shown beside."
        ),
    ] = None,
    max_cp: Annotated[
        int | None, typer.Option(min=2, max=MOST_RANKS, help="Largest size of a pack with --dynamic-cp.")
    ] = None,
    oversize: Annotated[
        str | None, typer.Option(help="Sequences above the cap: error, alone, slice, truncate, drop.")
    ] = None,
    cluster: Clusters = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Sizes to try, such as pp=1,2,4; repeated: all combinations. max_tokens, cp, tp, pp, vpp, slices."
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the timeline to this file.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write figures and timeline to this file as JSON.")
    ] = None,
) -> None:
    """Predict the time of one optimizer step: passes, exchange, bubbles. Nothing is run, memory is not counted."""
    from roll_batching.tools.simulation.models import describe_cluster, read_cluster

    if plot is not None:
        from roll_batching.jobs.observe.plan_picture import check_picture

        _as_config_error(check_picture, plot, "simulate")
    if json_file is not None:
        check_replaceable(json_file, "simulate", lambda content: json.dumps(_MARK)[1:-1].encode() in content[:200])
    layout = {
        "max_tokens": max_tokens,
        "dp": dp,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "vpp": vpp,
        "ep": ep,
        "slices": slices,
        "sequence_parallel": sequence_parallel,
        "dynamic_cp": dynamic_cp,
        "max_cp": max_cp,
        "oversize": oversize,
        "model": model,
    }
    given = {name: value for name, value in layout.items() if value is not None}
    rates, name = read_cluster(*(cluster or ())), describe_cluster(*(cluster or ()))
    if lengths is None:
        raise ConfigError("--lengths is missing: give a file with the sample lengths of one step, such as a CSV")
    notes: list[str] = []
    if config is not None:
        if given:
            name = next(iter(given)).replace("_", "-")
            raise ConfigError(f"--{name} and --config exclude each other: change the job by an override key=value")
        own = rates if cluster else None
        scenario, notes = _of_job(config, overrides or (), lengths, column or (), first, world_size, own)
        name = name if cluster or scenario.cluster == rates else "the rates of strategy_config.cluster"
    else:
        if overrides:
            raise ConfigError(f"{overrides[0]!r} changes a setting of a job: add --config, or use options")
        if world_size is not None:
            raise ConfigError("--world-size is read with --config only: without it, ranks are dp x tp x cp x pp")
        sizes = _as_config_error(read_lengths, Path(lengths), column or ())[:first]
        scenario = _as_config_error(_of_options, sizes, given, rates)
    if sweep:
        _show_sweep(scenario, sweep, plot, json_file)
    else:
        _show_step(scenario, name, plot, json_file)
    for note in notes:
        typer.echo(f"note: {note}")


def _as_config_error(function: Any, *arguments: Any) -> Any:
    """Result of `function`; errors about arguments of the command line are configuration errors."""
    try:
        return function(*arguments)
    except (DataError, PlanError, LayoutError) as error:
        raise ConfigError(str(error)) from error


def _of_options(lengths: Ints, given: dict[str, Any], cluster: Cluster) -> Scenario:
    """The step that the options describe."""
    from roll_batching.tools.simulation.models import MODELS, read_architecture
    from roll_batching.tools.simulation.scenario import Scenario

    if "model" not in given:
        raise ConfigError(f"--model is missing: give one of {', '.join(MODELS)}, a model directory, or a YAML file")
    architecture: ArchitectureConfig = read_architecture(given["model"])
    is_dynamic, ranks = "dynamic_cp" in given, given.get("dp", 8)
    largest = given.get("max_cp")
    if largest is not None and not is_dynamic:
        raise ConfigError("--max-cp is read with --dynamic-cp only: add it, or leave --max-cp out")
    constraints = PlanConstraints(
        dp_size=ranks,
        max_tokens=given.get("max_tokens", 16384),
        tp_size=given.get("tp", 1),
        cp_size=given.get("cp", 1),
        pp_size=given.get("pp", 1),
        vpp_size=given.get("vpp", 1),
        ep_size=given.get("ep", 1),
        sequence_parallel=given.get("sequence_parallel", False),
        oversize=cast(Oversize, given.get("oversize", "error")),
        max_cp_size=1 if not is_dynamic else largest or ranks & -ranks,
        pipeline_slices=slices_of(given.get("slices")),
        smallest_slice=cluster.slice_tokens,
    )
    return Scenario(
        lengths=lengths,
        constraints=constraints,
        architecture=architecture,
        cluster=cluster,
        largest_cp_size=largest,
    )


def _of_job(
    config: Path,
    overrides: Sequence[str],
    lengths: str,
    columns: Sequence[str],
    first: int | None,
    world_size: int | None,
    cluster: Cluster | None,
) -> tuple[Scenario, list[str]]:
    """The step of a job, and notes on it. `cluster`: None for that of the job."""
    from roll_batching.tools.simulation.scenario import notes_of_job, scenario_of_job

    job = load_config(config, list(overrides))
    if lengths == "data":
        from roll_batching.planning.arrays import as_lengths
        from roll_batching.tools.rehearsal.lengths import lengths_of_data

        megatron = job.actor_train.strategy_args.strategy_config
        world = world_size or job.world_size or megatron.model_size
        sizes = as_lengths(lengths_of_data(job, job.dp_size(world)))[:first]
    else:
        sizes = _as_config_error(read_lengths, Path(lengths), columns)[:first]
    scenario = _as_config_error(scenario_of_job, job, sizes, world_size, cluster)
    return scenario, notes_of_job(job, scenario)


def _show_step(scenario: Scenario, cluster: str, plot: Path | None, json_file: Path | None) -> None:
    from roll_batching.tools.simulation.report import (
        LEFT_OUT,
        RANK_HEADER,
        figures_of,
        lines_of,
        pipeline_lines,
        rank_rows,
        single_size_lines,
        timeline_of,
    )
    from roll_batching.tools.simulation.scenario import compare_pipelines, simulate_single_sizes

    step: SimulatedStep = _as_config_error(scenario.simulate)
    for line in lines_of(scenario, step, cluster):
        typer.echo(line)
    result = {"step": figures_of(step), "timeline": timeline_of(step) if json_file is not None else []}
    if scenario.constraints.has_cp_per_pack:
        single, reasons = _as_config_error(simulate_single_sizes, scenario)
        for line in single_size_lines(step, single, reasons):
            typer.echo(line)
        result["single_cp_sizes"] = {size: figures_of(other) for size, other in single.items()}
    elif scenario.constraints.pp_size > 1 and scenario.constraints.mode == "packed":
        compared: dict[str, SimulatedStep] = _as_config_error(compare_pipelines, scenario)
        for line in pipeline_lines(compared):
            typer.echo(line)
        result["pipelines"] = {name: figures_of(other) for name, other in compared.items()}
    rows, left_out = rank_rows(step)
    print_table(RANK_HEADER, rows, "data-parallel ranks; shares of the step")
    if left_out:
        typer.echo(f"{left_out:,} ranks between the slowest and the fastest are not shown")
    typer.echo(LEFT_OUT)
    if plot is not None:
        from roll_batching.tools.simulation.report import draw_timeline

        draw_timeline(step, plot)
        typer.echo(f"picture: {plot}")
    _write(json_file, result)


def _show_sweep(scenario: Scenario, texts: Sequence[str], plot: Path | None, json_file: Path | None) -> None:
    from roll_batching.tools.simulation.report import LEFT_OUT, SWEEP_FIGURES, figures_of, sweep_rows
    from roll_batching.tools.simulation.scenario import parse_sweep, run_sweep

    if plot is not None:
        raise ConfigError("--plot draws one step: leave --sweep out, and give the sizes to draw")
    values = parse_sweep(texts)
    swept: list[SweepResult] = run_sweep(scenario, values)
    title = f"{len(scenario.lengths):,} sequences on {scenario.constraints.world_size:,} devices, predicted"
    print_table((*values, *SWEEP_FIGURES), sweep_rows(swept), title)
    impossible = [one for one in swept if one.step is None]
    for one in impossible:
        typer.echo(f"impossible: {one.name}: {one.reason}")
    typer.echo(LEFT_OUT)
    result = [
        {"sizes": dict(one.changes), "reason": one.reason or None}
        | ({} if one.step is None else {"step": figures_of(one.step)})
        for one in swept
    ]
    _write(json_file, {"sweep": result})
    if len(impossible) == len(swept):
        raise ConfigError("no combination of the sweep is possible; the reasons are above")


def _write(file: Path | None, value: dict[str, Any]) -> None:
    if file is None:
        return
    try:
        with atomic_file(file) as partial:
            partial.write_text(json.dumps(_MARK | value))
    except OSError as error:
        raise ConfigError(f"--json {file} cannot be written: {cause(error)}") from None
    typer.echo(f"figures: {file}")
