"""`roll-batching report RUN [RUN]`: one HTML page of a run's folder, or of two side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folder of a run; a second one is shown beside it.", metavar="RUN [RUN]")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="File to write. Default: report.html in RUN; for two runs, report-NAME.html in the first."),
    ] = None,
) -> None:
    """Write one HTML page of a run: curves, tokens, balance, time, last plan, rollouts, settings, notices.

    The page holds its script and data, and loads nothing. An existing file is replaced only if it is a report.
    """
    from roll_batching.tools.report.page import write_report

    path, read = write_report(runs, output)
    for run in read:
        for problem in run.problems:
            typer.echo(f"notice: {run.label}: {problem}", err=True)
    typer.echo(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser")
