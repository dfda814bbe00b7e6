"""Copies of settings as plain data: of Python objects in bounded time and memory, and without secrets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Problem
from roll_batching.jobs.config.key_paths import field_at, given_keys, settings_at
from roll_batching.secret_names import REDACTED, redact, redact_forms
from roll_batching.settings.yaml_values import DEEPEST, MOST_VALUES


def plain_copy(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of `data`, in which sections and lists are new objects and other values the same.

    Raises ConfigFileError for a section inside itself, for too many values and for too deep nesting.
    """
    copied = _Copy().value(dict(data), ())
    assert isinstance(copied, dict)
    return copied


@dataclass
class _Copy:
    """One copy, which ends with an error at a limit."""

    inside: list[object] = field(default_factory=list)
    """The sections and lists around the value that is being copied."""
    values: int = 0
    """Number of values so far."""

    def value(self, value: Any, path: KeyPath) -> Any:
        self.values += 1
        if self.values > MOST_VALUES:
            _refuse(path[:1], f"holds more than {MOST_VALUES:,} values; a job needs a few hundred: use fewer")
        if not isinstance(value, dict | list | tuple):
            return value
        if any(value is outer for outer in self.inside):
            _refuse(path, "is a section or a list inside itself; write out what it should hold")
        if len(path) > DEEPEST:
            _refuse(path[:1], f"more than {DEEPEST} sections or lists inside each other; no setting lies that deep")
        self.inside.append(value)
        copied: Any
        if isinstance(value, dict):
            copied = {key: self.value(item, (*path, key)) for key, item in value.items()}
        else:
            copied = [self.value(item, (*path, index)) for index, item in enumerate(value)]
            copied = tuple(copied) if isinstance(value, tuple) else copied
        self.inside.pop()
        return copied


def _refuse(path: KeyPath, message: str) -> None:
    raise ConfigFileError([Problem(path, message)])


# ---- secrets


def without_secrets(data: Mapping[str, Any], prefix: KeyPath = ()) -> dict[str, Any]:
    """`data`, plain settings of a job, with `REDACTED` for secrets. Keys of the schema (eos_token) are not secrets."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        path = (*prefix, key)
        if is_free(path):
            result[key] = redact(value, name=key)
        else:
            result[key] = without_secrets(value, path) if isinstance(value, dict) else redact_forms(value)
    return result


def withheld_problems(data: Mapping[str, Any]) -> list[Problem]:
    """One problem per value of `data` that `without_secrets` has hidden."""
    text = "was not saved with the run, since its name or value looks like a secret's: set it, or remove its line"
    return [Problem(path, text) for top, value in given_keys(data) for path in _withheld(top, value)]


def is_free(path: KeyPath) -> bool:
    """Whether `path` lies in a map whose keys the user chooses."""
    if field_at(path) is not None or settings_at(path) is not None:
        return False
    above = (path[:end] for end in range(1, len(path)))
    return any(field_at(part) is not None and settings_at(part) is None for part in above)


def _withheld(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Paths of the hidden texts in `value`, which lies at `path`."""
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _withheld((*path, key), item)
    elif isinstance(value, str) and REDACTED in value:
        yield path
