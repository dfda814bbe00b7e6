"""Defaults of other frameworks: what a file leaves unsaid means there what the framework's code says.

A converter fills them in before it translates (`fill_defaults`), and names them in `Draft.defaults`. `settled` then
writes out those that differ from ours, each marked as the framework's default, and is silent about the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def fill_defaults(data: dict[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Puts the defaults of absent keys, by dotted key, into `data`; returns the keys it put, sections included.

    A key below something that is no section (a section that is null, for example) stays absent.
    """
    filled: set[str] = set()
    for key, default in defaults.items():
        here: Any = data
        *sections, last = key.split(".")
        for depth, part in enumerate(sections, 1):
            if isinstance(here, dict) and part not in here:
                here[part] = {}
                filled.add(".".join(sections[:depth]))
            here = here.get(part) if isinstance(here, dict) else None
        if isinstance(here, dict) and last not in here:
            here[last] = copy.deepcopy(default)
            filled.add(key)
    return filled


def section_at(data: Any, *path: str | int) -> dict[str, Any]:
    """The section at `path` of `data`; an empty one that belongs to nothing where there is none."""
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}
