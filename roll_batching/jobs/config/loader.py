"""Loads a job's settings from a YAML or TOML file and overrides, or from plain data."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, NoticeKind, Place, Problem, shortened
from roll_batching.jobs.config.frameworks import framework_of, script_error, with_hint
from roll_batching.jobs.config.job import JobConfig, check_source
from roll_batching.jobs.config.job_keys import Task
from roll_batching.jobs.config.plain_data import plain_copy
from roll_batching.jobs.config.yaml_source import Source, apply_overrides, read_text, read_yaml, resolve_references


def load_config(path: str | Path, overrides: Sequence[str] = (), *, task: Task | None = None) -> JobConfig:
    """Loads the job of a YAML or TOML file, after overrides such as `max_steps=3`.

    `task` is the task of a file that names none; a file that names another one is an error.

    Raises ConfigFileError (a ConfigError) with every problem: key, file, line, and what to set instead. For a file of
    another framework it begins with the command that converts it.
    """
    if Path(path).suffix.lower() in (".sh", ".bash"):
        raise script_error(read_text(path), str(path))
    is_toml = Path(path).suffix.lower() == ".toml"
    source = parse_toml(read_text(path), str(path)) if is_toml else read_yaml(path)
    framework = framework_of(source.data)  # of the file as it is written, before overrides
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
    """Checks settings in memory and returns their job; errors are those of `load_config`."""
    return check_source(Source("settings", plain_copy(data)))


# ---- TOML


_LINE = re.compile(r"at line (\d+)")
_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\".' ]+?)\s*=")


def parse_toml(text: str, name: str) -> Source:
    """Parses `text`; `name` is the file's name in messages. Raises ConfigFileError for invalid TOML."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _LINE.search(str(error))
        place = Place(name, int(match[1]) if match else None)
        raise ConfigFileError([Problem((), f"is not valid TOML: {error}", place)]) from None
    except RecursionError:
        raise ConfigFileError([Problem((), "is nested too deeply", Place(name))]) from None
    return Source(name, data, _places(text, name))


def _places(text: str, name: str) -> dict[KeyPath, Place]:
    """Places of keys by line. A key of an inline table has the place of that table."""
    places: dict[KeyPath, Place] = {}
    section: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            section = _path(header[1])
            places.setdefault(section, Place(name, number))
        elif key is not None:
            path = section + _path(key[1])
            for end in range(len(section) + 1, len(path) + 1):
                places.setdefault(path[:end], Place(name, number))
    return places


def _path(written: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in written.split("."))
