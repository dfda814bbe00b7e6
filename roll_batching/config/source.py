"""Reading YAML with the place of every key, overrides from the command line, and `${...}` references."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from roll_batching.config.problems import ConfigFileError, Place, Problem

KeyPath = tuple[str | int, ...]

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads `1e-6` as a number, which YAML 1.1 takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass
class Source:
    """A YAML document as plain data, with the place where each key was written."""

    name: str
    data: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, path: KeyPath) -> Place:
        """Where `path` was written; for a key that is absent, where its nearest parent was."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Place(self.name, 1)


def read_yaml(path: str | Path) -> Source:
    """Reads the file at `path`. Raises ConfigFileError (missing file, bad YAML, a key written twice)."""
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigFileError([Problem((), "no such file; check the path after --config", Place(name))]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError([Problem((), f"cannot be read: {error}", Place(name))]) from None
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> Source:
    """As `read_yaml`, for text that is at hand; `name` stands for the file in messages."""
    problems: list[Problem] = []
    places: dict[KeyPath, Place] = {}
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        data = _value(loader, node, (), name, places, problems) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise ConfigFileError([Problem((), f"is not valid YAML: {message}", Place(name, line))]) from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        problems.append(Problem((), "the file must hold keys and values at its top level", Place(name, 1)))
    if problems:
        raise ConfigFileError(problems)
    return Source(name, data, places)


def _value(
    loader: _Loader,
    node: yaml.Node,
    path: KeyPath,
    name: str,
    places: dict[KeyPath, Place],
    problems: list[Problem],
) -> Any:
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, child in enumerate(node.value):
            places[(*path, index)] = Place(name, child.start_mark.line + 1)
            items.append(_value(loader, child, (*path, index), name, places, problems))
        return items
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    written = [key.value for key, _ in node.value if key.value != "<<"]
    for key in dict.fromkeys(word for word in written if written.count(word) > 1):
        lines = [child.start_mark.line + 1 for child, _ in node.value if child.value == key]
        text = f"is written {len(lines)} times (first in line {lines[0]}); keep one"
        problems.append(Problem((*path, key), text, Place(name, lines[-1])))
    loader.flatten_mapping(node)
    result: dict[str, Any] = {}
    for key_node, child in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else str(loader.construct_object(key_node))
        places[(*path, key)] = Place(name, key_node.start_mark.line + 1)
        result[key] = _value(loader, child, (*path, key), name, places, problems)
    return result


def apply_overrides(source: Source, overrides: Sequence[str]) -> None:
    """Sets `a.b.c=value` in the source; the value is YAML. Raises ConfigFileError naming bad overrides."""
    problems: list[Problem] = []
    for text in overrides:
        try:
            _override(source, text)
        except ValueError as error:
            problems.append(Problem((), str(error), Place(f"override '{text}'")))
    if problems:
        raise ConfigFileError(problems)


def _override(source: Source, text: str) -> None:
    key, equals, written = text.partition("=")
    parts = key.strip().removeprefix("--").split(".")
    if not equals or not all(parts):
        raise ValueError("an override is written path.to.key=value")
    try:
        value = yaml.load(written, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"the value {written!r} is not valid YAML: {error}") from None
    place = Place(f"override '{text}'")
    here: Any = source.data
    path: KeyPath = ()
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        step: str | int = int(part) if isinstance(here, list) and part.isdigit() else part
        path = (*path, step)
        if isinstance(here, list):
            if not isinstance(step, int) or step >= len(here):
                raise ValueError(f"{'.'.join(parts[:number])} is a list of {len(here)} items; {part!r} is not one")
        elif not isinstance(here, dict):
            raise ValueError(f"{'.'.join(parts[:number])} is {here!r}, which has no key {part!r}")
        elif not last and here.get(part) is None:
            here[part] = {}
        if last:
            here[step] = value
            for old in [known for known in source.places if known[: len(path)] == path]:
                del source.places[old]
            source.places[path] = place
        else:
            source.places.setdefault(path, place)
            here = here[step]


def resolve_references(source: Source) -> None:
    """Replaces `${path.to.key}` by that key's value. Raises ConfigFileError for bad references."""
    problems: list[Problem] = []

    def look_up(path: KeyPath, reference: str, trail: tuple[str, ...]) -> Any:
        if reference in trail:
            raise ValueError(f"${{{reference}}} refers to itself through {' -> '.join((*trail, reference))}")
        here: Any = source.data
        for part in reference.split("."):
            if not isinstance(here, dict) or part not in here:
                raise ValueError(f"${{{reference}}} names no key of this file")
            here = here[part]
        return replace(path, here, (*trail, reference))

    def replace(path: KeyPath, value: Any, trail: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {key: guarded((*path, key), item, trail) for key, item in value.items()}
        if isinstance(value, list):
            return [guarded((*path, index), item, trail) for index, item in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return look_up(path, whole[1], trail)
        return _REFERENCE.sub(lambda found: str(look_up(path, found[1], trail)), value)

    def guarded(path: KeyPath, value: Any, trail: tuple[str, ...]) -> Any:
        try:
            return replace(path, value, trail)
        except ValueError as error:
            problems.append(Problem(path, str(error), source.place(path)))
            return None

    source.data = {key: guarded((key,), value, ()) for key, value in source.data.items()}
    if problems:
        raise ConfigFileError(problems)
