"""`roll-batching convert-config FILE`: converts files of ROLL, NeMo-RL, verl and slime."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from roll_batching.errors import ConfigError
from roll_batching.files import atomic_file, check_replaceable
from roll_batching.tools.conversion import ORIGINS, convert_file, origin_of
from roll_batching.tools.conversion.draft import is_json_report, is_unedited_yaml


class Framework(StrEnum):
    """Frameworks whose files can be converted."""

    roll = "roll"
    nemo_rl = "nemo_rl"
    verl = "verl"
    slime = "slime"


_CURE = "Choose another file, or replace it and all edits with --force"


def convert_config(
    source: Annotated[
        Path, typer.Argument(help="YAML file of ROLL, NeMo-RL or verl, or shell script of verl or slime.")
    ],
    framework: Annotated[
        Framework | None, typer.Option("--from", help="Framework of the file. Default: recognised by its content.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Output file. Default: print the result.")] = None,
    report: Annotated[Path | None, typer.Option(help="Also write the lists of keys to this JSON file.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace any file, also one that was edited since its conversion.")
    ] = False,
) -> None:
    """Convert a file to our YAML; comments list keys that are kept, changed in meaning, and left out."""
    if output is not None and report is not None and output.resolve() == report.resolve():
        raise ConfigError(f"--output and --report are both {output}: name two files")
    for path, is_own in ((output, is_unedited_yaml), (report, is_json_report)):
        if path is not None and not force:
            check_replaceable(path, "convert-config", is_own, _CURE)
    origin = ORIGINS[framework.value] if framework is not None else origin_of(source)
    conversion = convert_file(source, origin)
    if report is not None:
        _write(report, conversion.to_json())
    if output is None:
        typer.echo(conversion.to_yaml(), nl=False)
        return
    _write(output, conversion.to_yaml())
    refused, unknown = len(conversion.left_out_as("refused")), len(conversion.left_out_as("unknown"))
    idle = len(conversion.left_out_as("idle"))
    typer.echo(
        f"wrote {output}: {len(conversion.kept)} keys kept, {len(conversion.changed)} kept with another meaning, "
        f"{refused} left out that matter, {unknown} unknown here, {idle} without effect here"
    )
    for text in conversion.missing:
        typer.echo(f"to be filled in: {text}")


def _write(path: Path, text: str) -> None:
    try:
        with atomic_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
