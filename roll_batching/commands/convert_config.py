"""`roll-batching convert-config FILE`: ROLL's and NeMo-RL's files as ours."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.errors import ConfigError
from roll_batching.files import atomic_file
from roll_batching.jobs.conversion import ORIGINS, convert_file, origin_of


class Framework(StrEnum):
    """Whose file it is."""

    roll = "roll"
    nemo_rl = "nemo_rl"


def convert_config(
    source: Annotated[Path, typer.Argument(help="A YAML file of ROLL's or NeMo-RL's.")],
    framework: Annotated[
        Framework | None, typer.Option("--from", help="Whose file it is. Default: told by its sections.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write here instead of printing.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write the lists here, too, as JSON.")] = None,
) -> None:
    """Convert a file: our YAML, below comments that list what is kept, kept with another meaning, and left out."""
    origin = ORIGINS[framework.value] if framework is not None else origin_of(source)
    done = convert_file(source, origin)
    if report is not None:
        _write(report, done.to_json())
    if output is None:
        typer.echo(done.to_yaml(), nl=False)
        return
    _write(output, done.to_yaml())
    refused, unknown = len(done.left_out_as("refused")), len(done.left_out_as("unknown"))
    typer.echo(
        f"wrote {output}: {len(done.kept)} keys kept, {len(done.changed)} kept with another meaning, {refused} left "
        f"out that matter, {unknown} unknown here, {len(done.left_out_as('idle'))} that change nothing"
    )
    for text in done.missing:
        typer.echo(f"to be filled in: {text}")


def _write(path: Path, text: str) -> None:
    try:
        with atomic_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
