"""`roll-batching rehearse --config FILE`: one rank of every kind of a job, at real sizes, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.config import JobConfig, load_config

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def rehearse(
    config: Annotated[Path, typer.Option(help="YAML file of the job.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change, such as actor_train.use_sequence_packing=false."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks of the job. Default: as many as device_mapping names.")
    ] = None,
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU, such as 80GiB.")] = "80GiB",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="CSV, JSONL, npy or Parquet file of the lengths of a step's samples, or data: the first step of the "
            "job's own file (task sft and dpo). Default: the longest."
        ),
    ] = None,
    expert_imbalance: Annotated[
        float, typer.Option(min=1.0, help="How many times its share of the tokens the experts of a rank get.")
    ] = 1.0,
    advice: Annotated[
        bool, typer.Option(help="Look for the largest cap that fits and, where the job does not, for what would.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory over the step of the fullest rank into this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Rehearse a job: memory, FLOPs, collectives and host reads of its ranks, without a GPU and without weights."""
    size = _bytes(gpu_memory)
    if plot is not None:
        from roll_batching.jobs.observe.plan_picture import check_picture

        check_picture(plot)
    job = load_config(config, list(overrides or ()))
    if importlib.util.find_spec("torch") is None:
        raise RollBatchingError("a rehearsal needs torch and megatron-core: pip install 'roll-batching[megatron]'")
    from roll_batching.planning.lengths_io import read_lengths
    from roll_batching.rehearsal.advice import limits_of, lowered, ways_that_were_tried
    from roll_batching.rehearsal.job import Rehearsal, rehearse_job, timeline_of_worst
    from roll_batching.rehearsal.picture import draw_memory
    from roll_batching.rehearsal.report import advice_lines, lines_of, plain

    given: Any = lengths if lengths in (None, "data") else read_lengths(Path(lengths)).tolist()

    def again(changed: JobConfig) -> Rehearsal:
        world = found.dims.world_size
        return rehearse_job(changed, world_size=world, lengths=given, expert_imbalance=expert_imbalance)

    found = rehearse_job(job, world_size=world_size, lengths=given, expert_imbalance=expert_imbalance)
    if not as_json:
        for line in lines_of(found, size):
            typer.echo(line)
    if plot is not None:
        draw_memory(timeline_of_worst(found), plot, title=f"{found.worst.name}, {found.dims}", gpu_memory=size)
    limits = limits_of(found, size, again) if advice and given is None else []
    sought = advice and not found.fits(size)
    change = lowered(found, limits, size) if sought else None
    ways = ways_that_were_tried(found, size, again, last_resort=change is None) if sought else []
    if as_json:
        told = {
            "limits": [asdict(limit) for limit in limits],
            "caps_that_fit": None if change is None else change.settings,
            "ways_out": [{"change": way.change.settings, "need": way.need, "fits": way.need <= size} for way in ways],
        }
        typer.echo(json.dumps(plain(found, size) | told))
    elif advice:
        for line in advice_lines(found, limits, ways, size):
            typer.echo(line)
    if not found.fits(size) or found.reads_inside or found.fault is not None:
        raise typer.Exit(1)


def _bytes(words: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", words)
    unit = match and _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise ConfigError(f"--gpu-memory {words!r}: give a size such as 80GiB")
    return int(float(match[1]) * unit)
