"""Replaces `${path.to.key}` in values by the value of that key, in bounded time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Place, Problem
from roll_batching.jobs.config.yaml_values import DEEPEST, MOST_CHARACTERS, MOST_VALUES, too_large

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


class _Unresolved(Exception):
    """A reference that cannot be replaced. The other values are still resolved."""


def resolve(data: dict[str, Any], place: Callable[[KeyPath], Place]) -> tuple[dict[str, Any], list[Problem]]:
    """(`data` with references replaced, by None where that fails; the problems of those that fail).

    Raises ConfigFileError when the expanded values are too large.
    """
    resolver = _Resolver(data, place)
    result = {key: resolver.value((key,), value, ()) for key, value in data.items()}
    return result, list(resolver.problems.values())


@dataclass
class _Resolver:
    data: dict[str, Any]
    place: Callable[[KeyPath], Place]
    problems: dict[KeyPath, Problem] = field(default_factory=dict)
    values: int = 0
    characters: int = 0

    def value(self, path: KeyPath, value: Any, trail: tuple[str, ...]) -> Any:
        """`value` at `path` with references replaced; None where that fails."""
        try:
            return self._replace(path, value, trail)
        except _Unresolved as error:
            self.problems.setdefault(path, Problem(path, str(error), self.place(path)))
            return None

    def _replace(self, path: KeyPath, value: Any, trail: tuple[str, ...]) -> Any:
        self._count(path, values=1)
        if len(path) > DEEPEST:
            raise _Unresolved(f"more than {DEEPEST} sections or lists inside each other once references are replaced")
        if isinstance(value, dict):
            return {key: self.value((*path, key), item, trail) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value((*path, index), item, trail) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            self._count(path, characters=len(value) if isinstance(value, str) else 0)
            return value
        match = _REFERENCE.fullmatch(value)
        if match:
            return self._look_up(path, match[1], trail)
        return _REFERENCE.sub(lambda match: self._text(path, match[1], trail), value)

    def _text(self, path: KeyPath, reference: str, trail: tuple[str, ...]) -> str:
        value = self._look_up(path, reference, trail)
        if isinstance(value, dict | list):
            raise _Unresolved(f"${{{reference}}} is a section or a list, which cannot stand inside a text")
        text = str(value)
        self._count(path, characters=len(text))
        return text

    def _look_up(self, path: KeyPath, reference: str, trail: tuple[str, ...]) -> Any:
        if reference in trail:
            raise _Unresolved(f"${{{reference}}} refers to itself through {' -> '.join((*trail, reference))}")
        if len(trail) == DEEPEST:
            raise _Unresolved(f"${{{reference}}} is reached through more than {DEEPEST} references")
        value: Any = self.data
        for part in reference.split("."):
            if not isinstance(value, dict) or part not in value:
                raise _Unresolved(f"${{{reference}}} names no key of this file")
            value = value[part]
        return self._replace(path, value, (*trail, reference))

    def _count(self, path: KeyPath, *, values: int = 0, characters: int = 0) -> None:
        self.values += values
        self.characters += characters
        if self.values > MOST_VALUES or self.characters > MOST_CHARACTERS:
            path = path[:1]
            raise ConfigFileError([Problem(path, too_large("references (${name})"), self.place(path))])
