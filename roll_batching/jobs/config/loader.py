"""A job's settings from a YAML or TOML file and overrides, or from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.diagnostics import NO_EFFECT, ConfigFileError, Problem, shortened
from roll_batching.jobs.config.foreign import framework_of, with_hint
from roll_batching.jobs.config.job import JobConfig
from roll_batching.jobs.config.job_keys import Task
from roll_batching.jobs.config.plain_data import plain_copy
from roll_batching.jobs.config.toml_source import parse_toml
from roll_batching.jobs.config.validation import check_source
from roll_batching.jobs.config.yaml_source import Source, apply_overrides, read_yaml, resolve_references, text_of


def load_config(path: str | Path, overrides: Sequence[str] = (), *, task: Task | None = None) -> JobConfig:
    """The job that the file at `path` describes, YAML or (`.toml`) TOML, after overrides such as `max_steps=3`.

    `task` is what the job does where the file does not say it; it must say no other.

    Raises ConfigFileError (a ConfigError) that names every problem with its key, file and line, and cure; of a file
    that was written for another framework, how to convert it first.
    """
    toml = Path(path).suffix.lower() == ".toml"
    source = parse_toml(text_of(path), str(path)) if toml else read_yaml(path)
    framework = framework_of(source.data)
    apply_overrides(source, overrides)
    if task is not None and source.data.setdefault("task", task) != task:
        text = f"is {shortened(repr(source.data['task']))}, and the command is `roll-batching {task}`"
        raise ConfigFileError([Problem(("task",), f"{text}; `roll-batching train` does what the file says")])
    try:
        resolve_references(source)
        job = check_source(source)
    except ConfigFileError as error:
        if framework is None:
            raise
        raise with_hint(error, framework, str(path)) from None
    _check_overrides(job, source)
    return job


def _check_overrides(job: JobConfig, source: Source) -> None:
    """Raises ConfigFileError for overrides without effect: who types one means something by it."""
    idle = [one for one in job.notices if one.text.startswith(NO_EFFECT) and one.place in source.overrides]
    if idle:
        raise ConfigFileError(
            Problem(tuple(one.path.split(".")), f"{one.text}; leave it out", one.place) for one in idle
        )


def config_from_dict(data: Mapping[str, Any]) -> JobConfig:
    """As `load_config`, for settings that are at hand as plain data."""
    return check_source(Source("settings", plain_copy(data)))
