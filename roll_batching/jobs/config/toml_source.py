"""TOML as a configuration: plain data, with the line of every key."""

from __future__ import annotations

import re
import tomllib

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Place, Problem
from roll_batching.jobs.config.yaml_source import Source

_LINE = re.compile(r"at line (\d+)")
_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\".' ]+?)\s*=")


def parse_toml(text: str, name: str) -> Source:
    """The document `text`; `name` stands for the file in messages. Raises ConfigFileError for what is no TOML."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = _LINE.search(str(error))
        place = Place(name, int(found[1]) if found else None)
        raise ConfigFileError([Problem((), f"is no valid TOML: {error}", place)]) from None
    except RecursionError:
        raise ConfigFileError([Problem((), "is nested too deeply", Place(name))]) from None
    return Source(name, data, _places(text, name))


def _places(text: str, name: str) -> dict[KeyPath, Place]:
    """Where keys were written, as far as lines alone tell it; a key inside an inline table has that table's place."""
    found: dict[KeyPath, Place] = {}
    section: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        if header is not None:
            section = _path(header[1])
            found.setdefault(section, Place(name, number))
        elif key is not None:
            path = section + _path(key[1])
            for end in range(len(section) + 1, len(path) + 1):
                found.setdefault(path[:end], Place(name, number))
    return found


def _path(written: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in written.split("."))
