"""Lines of JSON objects that may be cut, broken or endless: what can be read, and how many lines could not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_batching.files import open_regular

LONGEST_LINE = 2**24
"""Bytes of a line; a longer one is not read."""


@dataclass(frozen=True)
class JsonLines:
    """The objects of a file, in order."""

    objects: list[dict[str, Any]]
    total: int
    """Lines of the file that are not empty."""
    broken: int
    """Lines among those looked at that are no JSON object."""
    first_broken: int
    """Number of the first such line, from 1; 0: none."""
    is_cut: bool
    """Whether the last line has no end: a run is writing it, or was killed."""


def read_json_lines(path: Path, most: int | None = None) -> JsonLines:
    """Read `path`; of more than `most` lines, `most` that are spread evenly. Raises OSError."""
    total = sum(1 for _ in _lines(path))
    chosen: Set[int] | None = None
    if most is not None and total > most:
        chosen = {index * total // most for index in range(most)}
    objects: list[dict[str, Any]] = []
    broken = first_broken = 0
    is_cut = False
    for index, (number, line) in enumerate(_lines(path)):
        if chosen is not None and index not in chosen:
            continue
        value = _parsed(line)
        if value is not None:
            objects.append(value)
        elif line is not None and not line.endswith(b"\n"):
            is_cut = True
        else:
            broken, first_broken = broken + 1, first_broken or number
    return JsonLines(objects, total, broken, first_broken, is_cut)


def _parsed(line: bytes | None) -> dict[str, Any] | None:
    if line is None:
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Numbers and contents of the lines that are not empty; None for one that is too long."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
                while rest := file.readline(LONGEST_LINE):
                    if rest.endswith(b"\n"):
                        break
                yield number, None
            elif line.strip():
                yield number, line
