"""Reads YAML files as plain data with the place of every key; applies overrides and replaces `${...}` references."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Place, Problem, shortened
from roll_batching.secret_names import is_secret, redact
from roll_batching.settings.yaml_values import (
    DEEPEST,
    LONGEST_TEXT,
    MOST_CHARACTERS,
    MOST_VALUES,
    YamlFaults,
    read_values,
    text_fault,
    too_large,
)


@dataclass
class Source:
    """Settings as plain data, with the file and line of each key."""

    name: str
    data: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)
    overrides: list[Place] = field(default_factory=list)
    """The overrides of the command line, as places."""
    faults: list[Problem] = field(default_factory=list)
    """References that could not be replaced; reported together with the problems of the other keys."""

    def place(self, path: KeyPath) -> Place:
        """The place of the key at `path`, or of its nearest parent in the file."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(self.name, 1)


def read_yaml(path: str | Path) -> Source:
    """Reads the YAML file at `path`.

    Raises ConfigFileError for an unreadable file, invalid YAML, a key written twice, or too many values.
    """
    return parse_yaml(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """The text of the file at `path`. Raises ConfigFileError."""
    try:
        return _read_file(Path(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigFileError([Problem((), reason or "cannot be read", Place(str(path)))]) from None


def _read_file(file: Path) -> str:
    try:
        status = file.stat()
    except FileNotFoundError:
        raise ValueError("no such file; check its path") from None
    if not stat.S_ISREG(status.st_mode):
        # Every process of a job reads the file again, which a pipe does not allow.
        raise ValueError("is a folder or a device, not a file; write the settings into a file")
    with file.open("rb") as stream:  # a character has at most 4 bytes in UTF-8; `read_values` counts characters
        data = stream.read(4 * LONGEST_TEXT + 1)
    if len(data) > 4 * LONGEST_TEXT:
        raise ValueError(f"has {status.st_size:,} bytes; a file of settings has at most {LONGEST_TEXT:,} characters")
    try:
        return data.decode("utf-8-sig")  # drops the byte order mark that some editors write
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 text (byte {error.start}: {error.reason}); save it as UTF-8") from None


def parse_yaml(text: str, name: str) -> Source:
    """Reads a YAML text; see `read_yaml`. `name` is the file's name in messages."""
    try:
        data, lines = read_values(text)
    except YamlFaults as error:
        raise ConfigFileError(
            Problem(fault.path, fault.message, Place(name, fault.line)) for fault in error.faults
        ) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        message = "the file must hold keys and values at its top level"
        raise ConfigFileError([Problem((), message, Place(name, 1))])
    return Source(name, data, {path: Place(name, line) for path, line in lines.items()})


def apply_overrides(source: Source, overrides: Sequence[str]) -> None:
    """Sets `a.b.c=value` in `source`; the value is YAML. Raises ConfigFileError with all bad overrides."""
    problems: list[Problem] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        shown = redact(value, name=key.rpartition(".")[2], secret=any(map(is_secret, key.split("."))))
        place = Place(f"override '{shortened(key + equals + shown)}'")
        try:
            _apply_override(source, text, place)
            source.overrides.append(place)
        except ValueError as error:
            problems.append(Problem((), str(error), place))
    if problems:
        raise ConfigFileError(problems)


def _apply_override(source: Source, text: str, place: Place) -> None:
    key, equals, written = text.partition("=")
    parts = key.strip().removeprefix("--").split(".")
    if not equals or not all(parts):
        raise ValueError("an override is written path.to.key=value")
    if len(parts) > DEEPEST:
        raise ValueError(f"a path of {len(parts)} keys; no setting lies deeper than {DEEPEST}")
    reason = text_fault(key)
    if reason is not None:
        raise ValueError(f"the key {reason}")
    try:
        value, _ = read_values(written)
    except YamlFaults as error:
        first = error.faults[0]
        raise ValueError(f"its value {first.message}" if not first.path else f"in its value, {first.message}") from None
    _set_value(source, parts, value, place)


def _set_value(source: Source, parts: list[str], value: Any, place: Place) -> None:
    """Sets the value at the path `parts`, whose numbers index lists. Raises ValueError for a path that does not exist.

    Missing sections are added. `place`, the override, becomes the place of the key in messages.
    """
    section: Any = source.data
    path: KeyPath = ()
    for depth, part in enumerate(parts):
        is_last = depth == len(parts) - 1
        # 10 digits and more are no index: `int` would take long for a number of any length.
        key: str | int = int(part) if isinstance(section, list) and part.isdecimal() and len(part) < 10 else part
        path = (*path, key)
        if isinstance(section, list):
            if not isinstance(key, int) or key >= len(section):
                raise ValueError(
                    f"{'.'.join(parts[:depth])} is a list of {len(section)} items; {shortened(part)!r} is not one"
                )
        elif not isinstance(section, dict):
            raise ValueError(
                f"{'.'.join(parts[:depth])} is {shortened(repr(section))}, which has no key {shortened(part)!r}"
            )
        elif not is_last and section.get(part) is None:
            section[part] = {}
        if is_last:
            replaced = [known for known in source.places if known[: len(path)] == path]
            earlier = [source.places[known] for known in replaced if source.places[known] in source.overrides]
            if earlier:
                raise ValueError(f"replaces the {earlier[0]}; keep one of the two")
            section[key] = value
            for below in replaced:
                del source.places[below]
            source.places[path] = place
        else:
            source.places.setdefault(path, place)
            section = section[key]


# ---- references


REFERENCE = re.compile(r"\$\{([^${}]*)\}")


class _Unresolved(Exception):
    """A reference that cannot be replaced. The other values are still resolved."""


def resolve_references(source: Source) -> None:
    """Replaces `${path.to.key}` by the value of that key, in bounded time and memory.

    Where that fails the value is None, and the problem goes into `source.faults`. Raises ConfigFileError when the
    expanded values are too large.
    """
    resolver = _Resolver(source.data, source.place)
    source.data = {key: resolver.value((key,), value, ()) for key, value in source.data.items()}
    source.faults = list(resolver.problems.values())


@dataclass
class _Resolver:
    """Replaces references in `data`, and counts the values and characters that result."""

    data: dict[str, Any]
    place: Callable[[KeyPath], Place]
    problems: dict[KeyPath, Problem] = field(default_factory=dict)
    values: int = 0
    characters: int = 0

    def value(self, path: KeyPath, value: Any, trail: tuple[str, ...]) -> Any:
        """Returns `value`, which lies at `path`, with references replaced, or None if that fails.

        `trail`: the references that led here, to find those that refer to themselves.
        """
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
        match = REFERENCE.fullmatch(value)
        if match:
            return self._look_up(path, match[1], trail)
        return REFERENCE.sub(lambda match: self._text(path, match[1], trail), value)

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
