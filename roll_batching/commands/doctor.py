"""`roll-batching doctor`: what works on these machines, what does not, and what to do next."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roll_batching.commands.options import Address, Launcher, print_table, require_torch
from roll_batching.errors import ConfigError
from roll_batching.files import atomic_file, check_replaceable

if TYPE_CHECKING:
    from roll_batching.tools.doctor.session import Session

_MARK = {"written_by": "roll-batching doctor"}
"""First key of the file of --json."""


def doctor(
    folder: Annotated[Path, typer.Option(help="Folder for runs, which all ranks should share.")] = Path("."),
    full: Annotated[
        bool, typer.Option("--full/--quick", help="Larger sizes and more layouts, or under a minute on a CPU.")
    ] = False,
    launcher: Annotated[
        Launcher, typer.Option(help="local: this process is one rank, alone or under torchrun. ray: Ray actors.")
    ] = Launcher.local,
    nproc: Annotated[int | None, typer.Option(min=1, help="With --launcher ray: number of ranks.")] = None,
    address: Address = "local",
    calibrate: Annotated[
        Path | None, typer.Option(help="Only measure rates of devices and links, and write them to this .yaml file.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="With --calibrate: model at whose shapes to measure, as for simulate.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write versions and the values of each rank to this file as JSON.")
    ] = None,
) -> None:
    """Check machines, ranks, kernels, layouts and the folder of runs; alone, under torchrun, or on Ray.

    Exit code 0: no check failed; 1: one did.
    """
    require_torch("the examination")
    is_first = os.environ.get("RANK", "0") == "0"
    if json_file is not None and is_first:
        check_replaceable(json_file, "doctor", lambda content: json.dumps(_MARK)[1:-1].encode() in content[:200])
    if calibrate is None and model is not None:
        raise ConfigError("--model is read with --calibrate only: add it, or leave --model out")
    if calibrate is not None and full:
        raise ConfigError("--calibrate measures the same with --full: leave --full out")
    session: Session | None = None
    if launcher is Launcher.ray:
        if calibrate is not None:
            raise ConfigError("--calibrate measures this process's ranks: start them by torchrun, not --launcher ray")
        records = _examine_on_ray(nproc, folder, full, address)
    elif nproc is not None:
        raise ConfigError("--nproc is read with --launcher ray only: start ranks here by torchrun --nproc-per-node N")
    else:
        from roll_batching.tools.doctor.examination import ANSWERS, checks_of, examine, open_session

        if calibrate is None:
            session = open_session(folder, full=full)
            records = examine(session, checks_of(session.world_size, full=full))
        else:
            session, records = _calibrate(folder, calibrate, model)
    if is_first:
        _print(records)
        if json_file is not None:
            content = {**_MARK, "date": time.strftime("%Y-%m-%d %H:%M:%S %z"), "full": full}
            with atomic_file(json_file) as partial:
                partial.write_text(json.dumps({**content, "checks": records}, indent=1) + "\n")
    if session is not None:
        session.close()
        if not session.passed[ANSWERS]:
            sys.stdout.flush()
            os._exit(1)  # a thread that hangs in a collective cannot be ended
    raise typer.Exit(int(any(record["status"] == "failed" for record in records)))


def _calibrate(folder: Path, file: Path, model: str | None) -> tuple[Session, list[dict[str, Any]]]:
    """Measures rates on all ranks; rank 0 writes them to `file`."""
    from roll_batching.tools.doctor import calibration
    from roll_batching.tools.doctor.examination import calibration_checks, examine, open_session
    from roll_batching.tools.simulation.models import read_architecture

    calibration.require_own_file(file)
    shape = calibration.measured_shape(read_architecture(model) if model else calibration.SMALL_SHAPE)
    session = open_session(folder, full=False)
    records = examine(session, calibration_checks(shape))
    if session.rank == 0 and "cluster" in session.kept:
        calibration.write_rates(session, file, model or "a small one")
    return session, records


def _examine_on_ray(nproc: int | None, folder: Path, full: bool, address: str) -> list[dict[str, Any]]:
    if nproc is None:
        raise ConfigError("--launcher ray needs the number of ranks: add --nproc, such as the number of GPUs")
    if "RANK" in os.environ:
        raise ConfigError("--launcher ray starts the ranks itself, but RANK is set in the environment. Unset it")
    from roll_batching.tools.doctor.on_ray import examine_on_ray

    return examine_on_ray(nproc, folder, full=full, address=address)


def _print(records: Sequence[dict[str, Any]]) -> None:
    rows = [
        (r["name"], r["status"], r["finding"] + (f"\nNext: {r['next']}" if r["next"] else ""), r["catches"])
        for r in records
    ]
    header = ("check", "result", "finding", "would have caught")
    print_table(header, rows, f"Ranks: {len(records[0]['ranks'])}", first="left", others="left")
    statuses = [r["status"] for r in records]
    typer.echo(", ".join(f"{statuses.count(s)} {s}" for s in ("passed", "failed", "not possible here")))
