"""Texts of a run made safe to show: no control characters, no half surrogates, a limited length."""

from __future__ import annotations

import html
import re
from typing import Any

from roll_batching.secret_names import redact_forms

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
"""Terminal escape sequences: colours, cursor movements, titles."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
"""Characters that a page cannot show, or that reorder its text: control characters but tab and newline, direction
overrides, and halves of surrogate pairs."""
_LARGEST = 1e300


def clean(value: Any, most: int = 2000) -> str:
    """`value` as text: without secrets and escape sequences, unprintable characters replaced, cut after `most`."""
    text = value if isinstance(value, str) else _written(value)
    left_out = len(text) - most
    text = _CONTROLS.sub("\ufffd", _ESCAPES.sub("", redact_forms(text[:most]).replace("\r\n", "\n")))
    return text if left_out <= 0 else f"{text} [... {left_out:,} more characters]"


def escaped(value: Any, most: int = 2000) -> str:
    """`clean(value)` for HTML, and for the labels of charts, which read some tags."""
    return html.escape(clean(value, most))


def number(value: Any) -> float | None:
    """`value` as a finite float; None for anything else, such as NaN, text, booleans and integers beyond 1e300."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and value.bit_length() > 900:
        return None
    result = float(value)
    return result if abs(result) < _LARGEST else None  # NaN is below nothing


def _written(value: Any) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; lists inside themselves
        return f"<{type(value).__name__}>"
