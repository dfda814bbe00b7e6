"""Assembles the page: one HTML file with its script, style and data inside, which loads nothing from elsewhere.

Texts of a run are untrusted: HTML gets them escaped, the script gets them as JSON in which no tag can end, and writes
them as text. A content security policy admits the page's own scripts by their hashes and forbids all requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import roll_batching
from roll_batching.errors import ConfigError, RollBatchingError
from roll_batching.files import atomic_file, cause, check_replaceable
from roll_batching.tools.report.charts import Section, Table
from roll_batching.tools.report.curves import learning_section
from roll_batching.tools.report.details import (
    environment_section,
    notices_section,
    overview_section,
    rollout_records,
    rollouts_section,
    settings_section,
)
from roll_batching.tools.report.plan_section import plan_section
from roll_batching.tools.report.run_files import RunFiles, clean, escaped, phases_of, read_run
from roll_batching.tools.report.steps import balance_section, staleness_section, time_section, tokens_section

MARK = '<meta name="generator" content="roll-batching report">'
"""Line that marks a file as a report, which a new report may replace."""


def make_sections(runs: Sequence[RunFiles]) -> list[Section]:
    """All sections, in the order of the page; some may be empty."""
    return [
        overview_section(runs),
        *(learning_section(runs, phase) for phase in phases_of(runs)),
        tokens_section(runs),
        balance_section(runs),
        time_section(runs),
        plan_section(runs),
        staleness_section(runs),
        rollouts_section(runs),
        settings_section(runs),
        environment_section(runs),
        notices_section(runs),
    ]


def make_page(runs: Sequence[RunFiles], plotly: str) -> str:
    """The page of one or two runs; `plotly` is the source of plotly.js."""
    sections = make_sections(runs)
    specs: list[dict[str, Any]] = []
    numbered = [(number, section) for number, section in enumerate(sections) if not section.is_empty]
    links = "".join(f'<a href="#s{number}">{escaped(section.title)}</a>' for number, section in numbered)
    body = "\n".join(_section(section, number, specs) for number, section in numbered)
    title = escaped(" and ".join(run.label for run in runs), 200)
    script, style = _asset("report.js"), _asset("report.css")
    records = rollout_records(runs)
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; form-action 'none'; base-uri 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK}
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}: report</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><nav>{links}</nav></header>
<main>
{body}
{_absent(sections)}
</main>
<footer>Written {time.strftime("%Y-%m-%d %H:%M %z")} by roll-batching {escaped(roll_batching.__version__)}.</footer>
<script type="application/json" id="charts">{_json(specs)}</script>
<script type="application/json" id="records">{_json(records)}</script>
<script type="text/plain" id="plotly">{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def _section(section: Section, number: int, specs: list[dict[str, Any]]) -> str:
    """Returns the HTML of a section, and appends the data of its charts to `specs`."""
    parts = [f'<section id="s{number}"><h2>{escaped(section.title)}</h2>']
    if section.note:
        parts.append(f'<p class="note">{escaped(section.note)}</p>')
    if section.charts:
        parts.append('<div class="charts">')
        for chart in section.charts:
            note = f'<p class="note">{escaped(chart.note)}</p>' if chart.note else ""
            parts.append(
                f"<figure{' class=wide' if chart.is_wide else ''}><h3>{escaped(chart.title, 120)}</h3>{note}"
                f'<div class="chart" data-chart="{len(specs)}" style="height:{chart.height}px"></div></figure>'
            )
            specs.append(chart.spec())
        parts.append("</div>")
    parts += [_table(table) for table in section.tables]
    for title, items in section.lists:
        parts.append(f"<h3>{escaped(title)}</h3><ul>{''.join(f'<li>{escaped(item)}</li>' for item in items)}</ul>")
    if section.has_rollouts:
        parts.append('<div id="rollouts"></div>')
    return "\n".join([*parts, "</section>"])


def _table(table: Table) -> str:
    head = "".join(f"<th>{escaped(cell)}</th>" for cell in table.head)
    rows = "".join(
        f"<tr{' class=marked' if number in table.marked else ''}>"
        f"{''.join(f'<td>{escaped(cell)}</td>' for cell in record)}</tr>"
        for number, record in enumerate(table.records)
    )
    title = f"<h3>{escaped(table.title)}</h3>" if table.title else ""
    long = " long" if len(table.records) > 25 else ""
    return f'{title}<div class="table{long}"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _absent(sections: Sequence[Section]) -> str:
    """HTML of the list of contents that the page lacks, each with the reason; empty if it lacks nothing."""
    items = [text for section in sections for text in section.absent]
    items += [
        f"{section.title}: the runs have no data for it."
        for section in sections
        if section.is_empty and not section.absent
    ]
    if not items:
        return ""
    texts = "".join(f"<li>{escaped(item)}</li>" for item in items)
    return f'<section id="absent"><h2>Not on this page</h2><ul>{texts}</ul></section>'


def _json(value: Any) -> str:
    """JSON for a script element: without `<`, so that no text of a run can end the element."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return resources.files("roll_batching.tools.report").joinpath("assets", name).read_text(encoding="utf-8")


# ---- files


MOST_RUNS = 2
_HEAD = 4096
"""Bytes at the beginning of a report, among which its mark lies."""


def write_report(folders: Sequence[Path], output: Path | None) -> tuple[Path, list[RunFiles]]:
    """Write the report of one or two runs; returns its path, and the runs as read.

    `output`: default `report.html` in the folder of the first run, or `report-NAME.html` beside a run NAME.
    Raises ConfigError for a wrong number of folders, without plotly, and if the file exists and is not a report;
    RollBatchingError if a folder is not a run's or the page cannot be written.
    """
    if not 1 <= len(folders) <= MOST_RUNS:
        raise ConfigError(f"a report shows one run, or two side by side, and {len(folders)} are given: leave some out")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ConfigError(f"{folders[0]} and {folders[1]} are the same folder: give two runs, or one")
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError("a report needs the package plotly: pip install 'roll-batching[report]'") from None
    plotly = str(get_plotlyjs())
    runs = [read_run(folder, label) for folder, label in zip(folders, _labels(folders), strict=True)]
    name = "report.html"
    if len(folders) > 1:
        name = f"report-{re.sub(r'[^A-Za-z0-9._-]', '_', folders[1].resolve().name)[:80]}.html"
    path = output or folders[0] / name
    cure = "Set --output to another file" if output is None else "Choose another file, or move it away"
    check_replaceable(path, "report", lambda content: MARK.encode() in content[:_HEAD], cure)
    page = make_page(runs, plotly)
    try:
        with atomic_file(path) as partial:
            partial.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RollBatchingError(f"{path} cannot be written: {cause(error)}. Set --output to another place") from None
    return path, runs


def _labels(folders: Sequence[Path]) -> list[str]:
    """Names of the runs: the names of their folders, with A and B in front if they are equal."""
    names = [clean(folder.resolve().name, 40) or "run" for folder in folders]
    if len(set(names)) < len(names):
        return [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    return names
