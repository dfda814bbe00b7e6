"""Writes a report: reads the runs, and puts the page where no other file is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.files import atomic_file, cause, check_replaceable
from roll_batching.tools.report.page import MARK, make_page
from roll_batching.tools.report.run_files import RunFiles, read_run
from roll_batching.tools.report.text import clean

MOST_RUNS = 2
_HEAD = 4096
"""Bytes of a file in which a report has its mark."""


def write_report(folders: Sequence[Path], output: Path | None) -> tuple[Path, list[RunFiles]]:
    """Write the report of one or two runs; returns its path, and the runs as read.

    `output`: default `report.html` in the folder of the first run, or `report-NAME.html` beside a run NAME.
    Raises ConfigError for arguments that do not fit, without plotly, and when the file is there and is no report;
    RollBatchingError when a folder is not a run's or the page cannot be written.
    """
    if not 1 <= len(folders) <= MOST_RUNS:
        raise ConfigError(f"a report shows one run, or two side by side, and {len(folders)} are given")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError(f"{folders[0]} and {folders[1]} are the same folder: give two runs, or one")
    plotly = _plotly()
    runs = [read_run(folder, label) for folder, label in zip(folders, _labels(folders), strict=True)]
    path = output or folders[0] / _default_name(folders)
    cure = "Set --output to another file" if output is None else "Choose another file, or move it away"
    check_replaceable(path, "report", lambda content: MARK.encode() in content[:_HEAD], cure)
    page = make_page(runs, plotly)
    try:
        with atomic_file(path) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RollBatchingError(f"{path} cannot be written: {cause(error)}. Set --output to another place") from None
    return path, runs


def _plotly() -> str:
    """The source of plotly.js."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("a report needs the package plotly: pip install 'roll-batching[report]'") from None
    return str(get_plotlyjs())


def _labels(folders: Sequence[Path]) -> list[str]:
    """Names of the runs: of their folders, told apart where they are equal."""
    names = [clean(folder.resolve().name, 40) or "run" for folder in folders]
    if len(set(names)) < len(names):
        return [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    return names


def _default_name(folders: Sequence[Path]) -> str:
    if len(folders) == 1:
        return "report.html"
    return f"report-{re.sub(r'[^A-Za-z0-9._-]', '_', folders[1].resolve().name)[:80]}.html"
