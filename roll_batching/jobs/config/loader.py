"""A job's settings from a YAML or TOML file and overrides, or from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, NoticeKind, Problem, shortened
from roll_batching.jobs.config.frameworks import framework_of, script_error, with_hint
from roll_batching.jobs.config.job import JobConfig
from roll_batching.jobs.config.job_keys import Task
from roll_batching.jobs.config.plain_data import plain_copy
from roll_batching.jobs.config.toml_source import parse_toml
from roll_batching.jobs.config.validation import check_source
from roll_batching.jobs.config.yaml_source import Source, apply_overrides, read_text, read_yaml, resolve_references


def load_config(path: str | Path, overrides: Sequence[str] = (), *, task: Task | None = None) -> JobConfig:
    """The job of a YAML or TOML file, after overrides such as `max_steps=3`.

    `task` is the task of a file that names none; a file that names another one is an error.

    Raises ConfigFileError (a ConfigError) with every problem: key, file, line, and what to set instead. For a file of
    another framework it begins with the command that converts it.
    """
    if Path(path).suffix.lower() in (".sh", ".bash"):
        raise script_error(read_text(path), str(path))
    toml = Path(path).suffix.lower() == ".toml"
    source = parse_toml(read_text(path), str(path)) if toml else read_yaml(path)
    framework = framework_of(source.data)
    apply_overrides(source, overrides)
    if task is not None and source.data.setdefault("task", task) != task:
        text = f"is {shortened(repr(source.data['task']))}, and the command is `roll-batching {task}`"
        raise ConfigFileError([Problem(("task",), f"{text}; `roll-batching train` runs the task of the file")])
    try:
        resolve_references(source)
        job = check_source(source)
    except ConfigFileError as error:
        if framework is None:
            raise
        raise with_hint(error, framework, str(path)) from None
    _check_overrides(job, source)
    return job


def _check_overrides(config: JobConfig, source: Source) -> None:
    """Raises ConfigFileError for overrides without effect: they are typed for this one run, to change it."""
    unread = [notice for notice in config.notices if notice.kind is NoticeKind.NO_EFFECT]
    typed = [notice for notice in unread if notice.place in source.overrides]
    if typed:
        raise ConfigFileError(Problem(notice.key, f"{notice.text}; leave it out", notice.place) for notice in typed)


def config_from_dict(data: Mapping[str, Any]) -> JobConfig:
    """As `load_config`, for settings in memory."""
    return check_source(Source("settings", plain_copy(data)))
