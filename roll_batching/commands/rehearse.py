"""`roll-batching rehearse --config FILE`: memory, FLOPs and collectives of a job without a GPU."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.config import JobConfig, load_config
from roll_batching.jobs.config.auto_caps import parse_bytes


def rehearse(
    config: Annotated[Path, typer.Option(help="YAML file of the job.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change, such as actor_train.use_sequence_packing=false."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks. Default: the devices of device_mapping.")
    ] = None,
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU, such as 80GiB.")] = "80GiB",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="CSV, JSONL, npy or Parquet file with a step's sample lengths; or `data`: the first step of the "
            "job's own file (task sft and dpo). Default: samples of the largest length."
        ),
    ] = None,
    expert_imbalance: Annotated[
        float, typer.Option(min=1.0, help="Tokens of a rank's experts, as a multiple of an equal share.")
    ] = 1.0,
    advice: Annotated[
        bool | None,
        typer.Option(
            "--advice/--no-advice",
            help="Search for the largest caps that fit and, if the job does not fit, for other settings that do. "
            "Default: search if the job does not fit.",
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot memory over a step of the fullest rank into this file.")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print holders, margins, FLOPs, collectives and host reads, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Count memory, FLOPs, collectives and host reads of a job's ranks, without a GPU and without weights."""
    size = bytes_of(gpu_memory)
    if plot is not None:
        from roll_batching.jobs.observe.plan_picture import check_picture

        check_picture(plot, "rehearse")
    job = load_config(config, list(overrides or ()))
    if importlib.util.find_spec("torch") is None:
        raise RollBatchingError("a rehearsal needs torch and megatron-core: pip install 'roll-batching[megatron]'")
    from roll_batching.planning.lengths_io import read_lengths
    from roll_batching.tools.rehearsal.advice import find_limits, largest_fitting_caps, try_changes
    from roll_batching.tools.rehearsal.job import Rehearsal, rehearse_job, rehearse_timeline
    from roll_batching.tools.rehearsal.report import advice_lines, draw_memory, lines_of, report_json, summary_lines

    step_lengths: Any = lengths if lengths in (None, "data") else read_lengths(Path(lengths)).tolist()

    def rehearse_again(changed: JobConfig) -> Rehearsal:
        world = rehearsal.dims.world_size
        return rehearse_job(changed, world_size=world, lengths=step_lengths, expert_imbalance=expert_imbalance)

    rehearsal = rehearse_job(job, world_size=world_size, lengths=step_lengths, expert_imbalance=expert_imbalance)
    if not as_json:
        for line in lines_of(rehearsal, size) if verbose else summary_lines(rehearsal, size):
            typer.echo(line)
    if plot is not None:
        title = f"{rehearsal.worst.name}, {rehearsal.dims}"
        draw_memory(rehearse_timeline(rehearsal), plot, title=title, gpu_memory=size)
    advice = not rehearsal.fits(size) if advice is None else advice
    limits = find_limits(rehearsal, size, rehearse_again) if advice and step_lengths is None else []
    needs_advice = advice and not rehearsal.fits(size)
    change = largest_fitting_caps(rehearsal, limits, size) if needs_advice else None
    ways = try_changes(rehearsal, size, rehearse_again, last_resort=change is None) if needs_advice else []
    if as_json:
        advice_json = {
            "limits": [asdict(limit) for limit in limits],
            "caps_that_fit": None if change is None else change.settings,
            "ways_out": [{"change": way.change.settings, "need": way.need, "fits": way.need <= size} for way in ways],
        }
        typer.echo(json.dumps(report_json(rehearsal, size) | advice_json))
    elif advice:
        for line in advice_lines(rehearsal, limits, ways, size):
            typer.echo(line)
    if not rehearsal.fits(size) or rehearsal.reads_inside or rehearsal.fault is not None:
        raise typer.Exit(1)


def bytes_of(gpu_memory: str) -> int:
    """Bytes that the option --gpu-memory names. Raises ConfigError."""
    try:
        return int(parse_bytes(gpu_memory))
    except ValueError as error:
        raise ConfigError(f"--gpu-memory {error}") from None
