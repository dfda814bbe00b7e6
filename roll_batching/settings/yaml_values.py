"""Parses YAML into plain data, in bounded time and memory for any text.

A few lines of YAML can expand to billions of values (aliases of aliases), to a value inside itself, or to Python
objects (tags). The result here is a tree of sections, lists and plain values of limited size.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file to a value."""

LONGEST_TEXT = 256 * 1024
"""Most characters of a file or override. A large job has a few thousand."""
MOST_CHARACTERS = 1024 * 1024
"""Most characters of all values after aliases and references are expanded."""
MOST_VALUES = 20_000
"""Most values, sections and lists after aliases and references are expanded."""
DEEPEST = 32
"""Most nested sections. The schema has six."""

_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + kind for kind in ("str", "int", "float", "bool", "null", "timestamp")}
_ONLY_YAML_1_1 = re.compile(r"[-+]?(0[0-7_]+|[0-9_]+(:[0-9_.]+)+)")
"""Octal and base-60 numbers of YAML 1.1, which are decimal numbers or text in YAML 1.2."""
_CANNOT_CONSTRUCT = (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError)
"""Exceptions of PyYAML's constructors for text that does not fit its tag."""


@dataclass(frozen=True)
class Fault:
    """One error: the key's path, a message, and the line, counted from 1."""

    path: KeyPath
    message: str
    line: int


class YamlFaults(Exception):
    """A text that is no valid settings, with all its faults."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__(faults)
        self.faults = faults


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML that exceeds one of the limits."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that limits nesting and reads `1e-6` as a number, which is text in YAML 1.1."""

    nested = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.nested += 1
        if self.nested > DEEPEST:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise _Refused(problem=_too_deep(), problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self.nested -= 1
        return node


_Loader.add_implicit_resolver(
    _TAG + "float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_values(text: str) -> tuple[Any, dict[KeyPath, int]]:
    """Parses a YAML text; returns its value (None if empty) and the line of every key and list item, from 1 on.

    Keys are strings; values are strings, numbers within 64 bits, booleans and None. Raises YamlFaults.
    """
    if len(text) > LONGEST_TEXT:
        limit = f"more than the limit of {LONGEST_TEXT:,}: split the file, or move data out of it"
        raise YamlFaults([Fault((), f"has {len(text):,} characters, {limit}", 1)])
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        reader = _Reader(loader)
        data = None if node is None else reader.value(node, ())
    except yaml.reader.ReaderError as error:
        message = f"is not valid YAML: the character U+{error.character:04X} cannot stand in it; remove it"
        raise YamlFaults([Fault((), message, text.count("\n", 0, error.position) + 1)]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        message = " ".join(part for part in (error.context, error.problem) if part)
        message = message if isinstance(error, _Refused) else f"is not valid YAML: {message}"
        raise YamlFaults([Fault((), message, line)]) from None
    except (ValueError, OverflowError):  # a %YAML directive or an escape with an endless number
        raise YamlFaults(
            [Fault((), "is not valid YAML: a number in a directive or an escape is too long", 1)]
        ) from None
    finally:
        if loader is not None:
            loader.dispose()
    if reader.faults:
        raise YamlFaults(reader.faults)
    return data, reader.lines


def text_fault(text: str) -> str | None:
    """Why `text` cannot be a name, path or variable, or None if it can."""
    if "\0" in text:
        return "holds a NUL character; remove it"
    if any("\ud800" <= character <= "\udfff" for character in text):
        return "holds half of a surrogate pair; write the character itself"
    return None


@dataclass
class _Reader:
    """Converts the nodes of PyYAML to plain values. Aliases lead to the same node several times."""

    loader: _Loader
    lines: dict[KeyPath, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    values: int = 0
    characters: int = 0
    inside: list[yaml.Node] = field(default_factory=list)

    def value(self, node: yaml.Node, path: KeyPath) -> Any:
        self._count(node, 1)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        with self._within(node):
            mapping = isinstance(node, yaml.MappingNode)
            if node.tag != _TAG + ("map" if mapping else "seq"):
                self._fault(path, f"the tag {_short(node.tag)} is not read; remove it", node)
                return None
            return self._mapping(node, path) if mapping else self._sequence(node, path)

    def _sequence(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        items = []
        for index, child in enumerate(node.value):
            self.lines[(*path, index)] = _line(child)
            items.append(self.value(child, (*path, index)))
        return items

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        result = {}
        for key, (key_node, child) in self._entries(node, path).items():
            self.lines[(*path, key)] = _line(key_node)
            result[key] = self.value(child, (*path, key))
        return result

    def _entries(self, node: yaml.Node, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """The entries of a mapping by key: written entries precede those that `<<` merges."""
        written: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        inherited: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        counts: Counter[str] = Counter()
        for key_node, child in node.value:
            if key_node.tag == _TAG + "merge":
                inherited = {**self._merged(key_node, child, path), **inherited}
                continue
            key = self._key(key_node, path)
            if key is None:
                continue
            counts[key] += 1
            written[key] = key_node, child
        for key in (key for key, times in counts.items() if times > 1):
            lines = [_line(key_node) for key_node, _ in node.value if key_node.value == key]
            text = f"is written {len(lines)} times (first in line {lines[0]}); keep one"
            self.faults.append(Fault((*path, key), text, lines[-1]))
        return {**inherited, **written}

    def _merged(self, key_node: yaml.Node, node: yaml.Node, path: KeyPath) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        parents = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for parent in parents:
            if not isinstance(parent, yaml.MappingNode):
                self._fault(path, "`<<` takes an alias of a section, or a list of such", key_node)
                continue
            with self._within(parent):
                entries = self._entries(parent, path)
            self._count(parent, 1 + len(entries))
            merged = {**entries, **merged}  # as YAML has it, the first of several sections precedes
        return merged

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._fault(path, "a key must be plain text, not a list or a section", node)
            return None
        reason = text_fault(node.value)
        if reason is not None:
            self._fault(path, f"the key {_short(node.value)} {reason}", node)
            return None
        self.characters += len(node.value)
        return str(node.value)

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        self.characters += len(node.value)
        if node.tag not in _PLAIN_TAGS:
            self._fault(path, f"the tag {_short(node.tag)} is not read; remove it", node)
            return None
        try:
            value = self.loader.construct_object(node)
        except _CANNOT_CONSTRUCT:
            kind = node.tag.removeprefix(_TAG)
            self._fault(path, f"{_short(node.value)} cannot be read as {kind}; put text into quotes", node)
            return None
        if isinstance(value, str):
            reason = text_fault(value)
        elif isinstance(value, date):
            reason = f"{node.value} is read as a date; put it into quotes"
        elif isinstance(value, int | float) and _ONLY_YAML_1_1.fullmatch(node.value):
            reason = f"YAML 1.1 reads {_short(node.value)} as {value}; write {value}, or put text into quotes"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            reason = "is a whole number beyond 64 bits; put text into quotes"
        else:
            reason = None
        if reason is not None:
            self._fault(path, reason, node)
        return value

    @contextmanager
    def _within(self, node: yaml.Node) -> Iterator[None]:
        if any(node is outer for outer in self.inside):
            raise _Refused(problem="an anchor's value holds an alias of itself", problem_mark=node.start_mark)
        if len(self.inside) == DEEPEST:
            raise _Refused(problem=_too_deep(), problem_mark=node.start_mark)
        self.inside.append(node)
        yield
        self.inside.pop()

    def _count(self, node: yaml.Node, values: int) -> None:
        self.values += values
        if self.values > MOST_VALUES or self.characters > MOST_CHARACTERS:
            top_level = (self.inside[1:2] or [node])[0]  # inside[0] is the whole file
            raise _Refused(problem=too_large("aliases (*name)"), problem_mark=top_level.start_mark)

    def _fault(self, path: KeyPath, message: str, node: yaml.Node) -> None:
        self.faults.append(Fault(path, message, _line(node)))


def too_large(cause: str) -> str:
    """The error for settings that exceed the limits after `cause` is expanded."""
    return (
        f"holds more than {MOST_VALUES:,} values or {MOST_CHARACTERS:,} characters once {cause} are expanded; "
        "a job needs a few hundred values: use fewer or smaller ones"
    )


def _too_deep() -> str:
    return f"more than {DEEPEST} sections or lists inside each other; no setting lies that deep"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
