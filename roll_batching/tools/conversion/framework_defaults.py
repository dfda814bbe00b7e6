"""Fills in the defaults of other frameworks, so that a converted file means what the original meant.

A converter fills them in before it translates (`fill_defaults`) and lists them in `Draft.defaults`. `check_draft`
keeps those that differ from ours, marked as the framework's default, and drops the others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any


def fill_defaults(data: dict[str, Any], defaults: Mapping[str, Any]) -> set[str]:
    """Adds `defaults`, by dotted key, for keys that `data` lacks; returns the added keys and sections.

    A key below a value that is not a section, such as null, stays absent.
    """
    filled: set[str] = set()
    for key, default in defaults.items():
        section: Any = data
        *parents, last = key.split(".")
        for depth, part in enumerate(parents, 1):
            if isinstance(section, dict) and part not in section:
                section[part] = {}
                filled.add(".".join(parents[:depth]))
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and last not in section:
            section[last] = copy.deepcopy(default)
            filled.add(key)
    return filled


def section_at(data: Any, *path: str | int) -> dict[str, Any]:
    """The section at `path` of `data`; where there is none, a new empty one that is not part of `data`."""
    for part in path:
        data = data.get(part) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}
