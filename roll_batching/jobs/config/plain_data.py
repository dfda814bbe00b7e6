"""Copies settings given as Python objects, in bounded time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Problem
from roll_batching.jobs.config.yaml_values import DEEPEST, MOST_VALUES


def plain_copy(data: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the sections and lists of `data`.

    Raises ConfigFileError for a section inside itself, for too many values and for too deep nesting.
    """
    copied = _Copy().value(dict(data), ())
    assert isinstance(copied, dict)
    return copied


@dataclass
class _Copy:
    inside: list[object] = field(default_factory=list)
    values: int = 0

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
