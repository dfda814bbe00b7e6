"""Reads the folder of a run without trusting it: files may be missing, cut, or written at the same time."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from roll_batching.errors import PlanError, RollBatchingError
from roll_batching.files import cause, open_regular
from roll_batching.jobs.observe.run_files import METRICS, PLAN, ROLLOUTS, RUN_INFO, LastPlan, read_plan
from roll_batching.jobs.run.folder import CONFIG
from roll_batching.secret_names import redact, redact_forms

MOST_ROLLOUTS = 1000
"""Most responses on a page, spread evenly over rollouts.jsonl."""
_MOST_SETTINGS = 3000
_DEEPEST = 20
_MOST_LOGS, _LOG_TAIL, _MOST_NOTICES = 64, 2**18, 200
_LARGEST_FILE = 2**26
"""Bytes of a config.yaml, run_info.json or last_plan.json that is read."""


@dataclass(frozen=True)
class Row:
    """One row of metrics.jsonl: its finite numbers."""

    phase: str
    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class RunFiles:
    """A run, as far as its files can be read."""

    folder: Path
    label: str
    """Name of the run on the page."""
    rows: list[Row]
    nulls: dict[str, int]
    """Number of rows in which a column is null or not finite, by column."""
    rollouts: JsonLines | None
    settings: dict[str, str]
    """Settings of config.yaml by dotted key."""
    environment: dict[str, str]
    notices: list[str]
    """Notices of the configuration, then those in the logs."""
    last_plan: LastPlan | None
    problems: list[str] = field(default_factory=list)
    """Sentences on files and lines that could not be read."""

    @property
    def phases(self) -> list[str]:
        """Names of the phases, in the order of the rows."""
        return list(dict.fromkeys(row.phase for row in self.rows))

    def of_phase(self, phase: str) -> list[Row]:
        """The rows of a phase."""
        return [row for row in self.rows if row.phase == phase]


def phases_of(runs: Sequence[RunFiles]) -> list[str]:
    """All phases of the runs: reinforcement learning first, then the others in the order of the rows."""
    return sorted(dict.fromkeys(phase for run in runs for phase in run.phases), key=lambda phase: phase != "rl")


def read_run(folder: Path, label: str) -> RunFiles:
    """Read the folder of a run. Raises RollBatchingError when it has no metrics.jsonl that can be read."""
    problems: list[str] = []
    rows, nulls = _read_rows(folder, problems)
    info = _read_info(folder / RUN_INFO, problems)
    environment = info.get("environment")
    notices = info.get("notices")
    return RunFiles(
        folder=folder,
        label=label,
        rows=rows,
        nulls=nulls,
        rollouts=_read_rollouts(folder / ROLLOUTS, problems),
        settings=_read_settings(folder / CONFIG, problems),
        environment=_flat(environment) if isinstance(environment, dict) else {},
        notices=[
            *(clean(notice) for notice in (notices if isinstance(notices, list) else [])[:_MOST_NOTICES]),
            *_logged_notices(folder / "logs", problems),
        ],
        last_plan=_read_plan(folder / PLAN, problems),
        problems=problems,
    )


def _read_rows(folder: Path, problems: list[str]) -> tuple[list[Row], dict[str, int]]:
    path = folder / METRICS
    if not folder.is_dir():
        raise RollBatchingError(f"{folder} is not a folder: give the folder of a run (output_dir/exp_name)")
    try:
        lines = read_json_lines(path)
    except FileNotFoundError:
        raise RollBatchingError(
            f"{folder} is not the folder of a run, or the run has finished no step: it has no {METRICS}"
        ) from None
    except OSError as error:
        raise RollBatchingError(f"{path} cannot be read: {cause(error)}") from None
    rows, nulls, unnamed = [], dict[str, int](), 0
    for values in lines.objects:
        step, phase = values.get("step"), values.get("phase")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**53 or not isinstance(phase, str):
            unnamed += 1
            continue
        numbers = {clean(key, 100): number(value) for key, value in values.items() if key not in ("step", "phase")}
        for key, value in numbers.items():
            if value is None:
                nulls[key] = nulls.get(key, 0) + 1
        rows.append(Row(clean(phase, 40), step, {key: value for key, value in numbers.items() if value is not None}))
    if not rows:
        raise RollBatchingError(f"{path} holds no row of metrics: has the run finished a step?")
    _say_lines(path.name, lines, problems)
    if unnamed:
        problems.append(f"{path.name}: lines without a step and a phase, which are left out: {unnamed:,}")
    return rows, nulls


def _read_rollouts(path: Path, problems: list[str]) -> JsonLines | None:
    try:
        lines = read_json_lines(path, MOST_ROLLOUTS)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {cause(error)}")
        return None
    _say_lines(path.name, lines, problems)
    return lines if lines.objects else None


def _say_lines(name: str, lines: JsonLines, problems: list[str]) -> None:
    if lines.broken:
        problems.append(
            f"{name}: lines that cannot be read and are left out: {lines.broken:,}; the first is line "
            f"{lines.first_broken:,}"
        )
    if lines.is_cut:
        problems.append(f"{name}: the last line is incomplete: the run is writing it, or was killed")


def _text_of(path: Path, problems: list[str]) -> str | None:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            problems.append(f"{path.name} is larger than {_LARGEST_FILE // 2**20} MiB and is left out")
            return None
        with open_regular(path) as file:
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {cause(error)}")
        return None


def _read_settings(path: Path, problems: list[str]) -> dict[str, str]:
    text = _text_of(path, problems)
    if text is None:
        return {}
    try:
        values = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not YAML: {clean(error, 200)}")
        return {}
    return _flat(values) if isinstance(values, dict) else {}


def _read_info(path: Path, problems: list[str]) -> dict[str, Any]:
    text = _text_of(path, problems)
    if text is None:
        return {}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        problems.append(f"{path.name} is not a JSON object")
        return {}
    return values


def _read_plan(path: Path, problems: list[str]) -> LastPlan | None:
    text = _text_of(path, problems)
    if text is None:
        return None
    try:
        return read_plan(text)
    except PlanError as error:
        problems.append(f"{path.name}: {clean(error, 300)}")
        return None


def _flat(values: dict[Any, Any]) -> dict[str, str]:
    """Settings by dotted key, without secrets. Their number is limited: aliases can make a short file endless."""
    leaves = islice(_leaves(values, ()), _MOST_SETTINGS)
    return {key: redact(value, name=key.rpartition(".")[2]) for key, value in leaves}


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields (dotted key, text) of each value below `value`; a list of plain values is one text."""
    if isinstance(value, dict) and value and len(path) < _DEEPEST:
        for key, item in value.items():
            yield from _leaves(item, (*path, clean(key, 100)))
    elif isinstance(value, list | dict) and any(
        isinstance(item, list | dict) for item in (value.values() if isinstance(value, dict) else value)
    ):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        if len(path) >= _DEEPEST:
            yield ".".join(path), "..."
            return
        for key, item in items:
            yield from _leaves(item, (*path, clean(key, 100)))
    else:
        yield ".".join(path), clean("" if value is None else value, 500)


def _logged_notices(folder: Path, problems: list[str]) -> list[str]:
    """Lines of the ranks' logs that are notices, each once."""
    notices: dict[str, None] = {}
    for path in islice(sorted(folder.glob("rank_*.log")), _MOST_LOGS):
        try:
            with open_regular(path) as file:
                file.seek(0, 2)  # to the end; then back by `_LOG_TAIL`
                file.seek(max(file.tell() - _LOG_TAIL, 0))
                tail = file.read().decode("utf-8", errors="replace")
        except OSError as error:
            problems.append(f"{path.name} cannot be read: {cause(error)}")
            continue
        for line in tail.splitlines():
            if line.startswith("notice: ") and len(notices) < _MOST_NOTICES:
                notices.setdefault(clean(line.removeprefix("notice: ")))
    return list(notices)


# ---- texts that are safe to show


_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Terminal escape sequences: colours, cursor movements, titles."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Characters that a page cannot show, or that reorder its text: control characters but tab and newline, direction
overrides, and halves of surrogate pairs."""
_LARGEST = 1e300


def clean(value: Any, most: int = 2000) -> str:
    """`value` as text: without secrets and escape sequences, unprintable characters replaced, cut after `most`."""
    text = value if isinstance(value, str) else _written(value)
    left_out = len(text) - most
    text = _CONTROLS.sub("\ufffd", _ESCAPES.sub("", redact_forms(text[:most]).replace("\r\n", "\n")))
    return text if left_out <= 0 else f"{text} [... {left_out:,} more characters]"


def escaped(value: Any, most: int = 2000) -> str:
    """`clean(value)` for HTML, and for the labels of charts, which read some tags."""
    return html.escape(clean(value, most))


def number(value: Any) -> float | None:
    """`value` as a finite float; None for anything else, such as NaN, text, booleans and integers beyond 1e300."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and value.bit_length() > 900:
        return None
    result = float(value)
    return result if abs(result) < _LARGEST else None  # comparisons with NaN are false


def _written(value: Any) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists inside themselves
        return f"<{type(value).__name__}>"


# ---- lines of JSON


LONGEST_LINE = 2**24
"""Bytes of a line; a longer one is not read."""


@dataclass(frozen=True)
class JsonLines:
    """The objects of a file, in order."""

    objects: list[dict[str, Any]]
    total: int
    """Lines of the file that are not empty."""
    broken: int
    """Number of the read lines that are not a JSON object."""
    first_broken: int
    """Line number of the first broken line, from 1; 0: none."""
    is_cut: bool
    """Whether the last line has no end: a run is writing it, or was killed."""


def read_json_lines(path: Path, most: int | None = None) -> JsonLines:
    """Read the JSON objects of `path`, one a line; of a longer file, `most` lines spread evenly. Raises OSError."""
    total = sum(1 for _ in _lines(path))
    chosen: Set[int] | None = None
    if most is not None and total > most:
        chosen = {index * total // most for index in range(most)}
    objects: list[dict[str, Any]] = []
    broken = first_broken = 0
    is_cut = False
    for index, (number, line) in enumerate(_lines(path)):
        if chosen is not None and index not in chosen:
            continue
        value = _parsed(line)
        if value is not None:
            objects.append(value)
        elif line is not None and not line.endswith(b"\n"):
            is_cut = True
        else:
            broken, first_broken = broken + 1, first_broken or number
    return JsonLines(objects, total, broken, first_broken, is_cut)


def _parsed(line: bytes | None) -> dict[str, Any] | None:
    if line is None:
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number, content) of every line that is not empty; the content of a line that is too long is None."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                while rest := file.readline(LONGEST_LINE):
                    if rest.endswith(b"\n"):
                        break
                yield number, None
            elif line.strip():
                yield number, line
