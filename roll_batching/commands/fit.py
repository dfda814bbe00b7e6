"""`roll-batching fit --config FILE`: the largest caps of micro-batches, and the fastest layouts, for a GPU's memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from roll_batching.commands.options import print_table, require_torch
from roll_batching.commands.rehearse import bytes_of
from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.jobs.config import JobConfig, load_config
from roll_batching.jobs.config.auto_caps import auto_caps, longest_sample, smallest_cap, with_value


def fit(
    config: Annotated[Path, typer.Option(help="YAML or TOML file of the job.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, as for `train`.")] = None,
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU, such as 80GiB.")] = "80GiB",
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks. Default: the devices of device_mapping.")
    ] = None,
    layouts: Annotated[
        int, typer.Option(min=0, help="Other layouts to rehearse, the fastest in simulation first.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object only.")] = False,
) -> None:
    """Find the largest caps of micro-batches that fit a GPU, and rank layouts by simulated step time.

    No GPU is needed. Searches the caps that are `auto`, or, if none is, all that the job reads.
    """
    require_torch("a rehearsal")
    from roll_batching.tools.rehearsal.advice import Change, layout_changes

    job = _with_auto_caps(load_config(config, list(overrides or ())))
    world = world_size or job.world_size or job.actor_train.strategy_args.strategy_config.model_size
    memory, left_out = bytes_of(gpu_memory), {}
    own, guesses = Change(settings={}), []
    for change in layout_changes(job, world) if layouts else ():
        try:
            changed = change.of(job)
            caps = dict.fromkeys(auto_caps(job.roles), 2 * smallest_cap(changed))
            guesses.append((_seconds(changed.with_resolved_caps(caps), world), change))
        except RollBatchingError as error:
            left_out[str(change)] = str(error)
    guesses.sort(key=lambda pair: pair[0])
    left_out |= {str(change): "slower, simulated with small caps" for _, change in guesses[layouts:]}
    rows: list[dict[str, Any]] = []
    for change in (own, *(change for _, change in guesses[:layouts])):
        try:
            rows.append(_row(job, change, world, memory))
        except RollBatchingError as error:
            left_out[str(change) or "the job's layout"] = str(error)
    rows.sort(key=lambda row: row["seconds"])
    if as_json:
        typer.echo(json.dumps({"world_size": world, "gpu_memory": memory, "layouts": rows, "left_out": left_out}))
    else:
        _show(rows, left_out, f"{world} ranks of {gpu_memory}, simulated and rehearsed")
    if not rows:
        cure = "if memory is the reason above, use more GPUs per replica, larger GPUs, or shorter samples"
        raise ConfigError(f"no layout fits {gpu_memory}, or can be rehearsed: {cure}")


def _show(rows: list[dict[str, Any]], left_out: dict[str, str], title: str) -> None:
    from roll_batching.tools.rehearsal.advice import Change

    table = [
        (f"{number}", row["dims"], f"{row['seconds']:,.3g}", f"{row['need'] / (1 << 30):,.2f}")
        for number, row in enumerate(rows, 1)
    ]
    if rows:
        print_table(("", "layout", "seconds a step", "GiB"), table, title)
    for number, row in enumerate(rows, 1):
        typer.echo(f"{number}: {Change(settings=row['settings'] | row['caps'])}")
    for name, reason in left_out.items():
        typer.echo(f"left out: {name}: {reason}")


def _with_auto_caps(job: JobConfig) -> JobConfig:
    """`job`, with `auto` in place of the caps of all roles if none is `auto`."""
    if auto_caps(job.roles):
        return job
    from roll_batching.settings.batching import PASSES_OF_ROLES

    for name, role in job.roles.items():
        for key in {role.cap_key(kind) for kind in PASSES_OF_ROLES[name]} - {None}:
            job = with_value(job, f"{name}.{key}", "auto")
    if not auto_caps(job.roles):
        raise ConfigError("the job is in padded mode, which has no cap: set use_sequence_packing or dynamic batching")
    return job


def _row(job: JobConfig, change: Any, world: int, memory: int) -> dict[str, Any]:
    """The layout of `change` with its largest caps: overrides, caps, bytes with margins, seconds of a step."""
    from roll_batching.tools.rehearsal.advice import Change
    from roll_batching.tools.rehearsal.caps import engine_memory, find_caps
    from roll_batching.tools.rehearsal.job import rehearse_job

    changed = change.of(job)
    typer.echo(f"rehearsing {change if change.settings else 'the layout of the job'}", err=True)
    found = find_caps(changed, memory - engine_memory(job, memory), partial(rehearse_job, world_size=world))
    typer.echo(f"fits with {Change(settings=found.caps)}", err=True)
    return {
        "dims": str(found.rehearsal.dims),
        "settings": dict(change.settings),
        "caps": dict(found.caps),
        "need": found.rehearsal.worst.need,
        "seconds": _seconds(changed.with_resolved_caps(found.caps), world),
    }


def _seconds(job: JobConfig, world: int) -> float:
    """Simulated seconds of an optimizer step over the longest samples."""
    import numpy as np

    from roll_batching.tools.simulation.scenario import scenario_of_job

    lengths = np.full(job.mini_batch_size(job.dp_size(world)), longest_sample(job), dtype=np.int64)
    return float(scenario_of_job(job, lengths, world).simulate().seconds)
