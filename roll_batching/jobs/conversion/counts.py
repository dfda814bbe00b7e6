"""Counts of other frameworks' files in the unit of ours. docs/converted-counts.md has the unit of each."""

from __future__ import annotations

from typing import Any


def optimizer_steps(count: Any, each: int, unit: str) -> tuple[Any, str]:
    """`count` of a framework's units as optimizer steps, of which each unit has `each`; and a text that says so.

    A value that is no whole number is returned as it is: the loader reports it.
    """
    if not isinstance(count, int) or isinstance(count, bool) or each == 1:
        return count, ""
    text = f"{count} x {each} optimizer steps of {unit}"
    return count * each, text if count else ""
