"""TOML files as plain data with the line of every key."""

from __future__ import annotations

import re
import tomllib

from roll_batching.jobs.config.diagnostics import ConfigFileError, KeyPath, Place, Problem
from roll_batching.jobs.config.yaml_source import Source

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
