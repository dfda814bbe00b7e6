"""Number formatting for the terminal."""

from __future__ import annotations

_LONGEST = 1e12


def fixed(value: float, digits: int, *, sign: bool = False) -> str:
    """`value` with `digits` decimals; in scientific notation from 1e12 on."""
    plus = "+" if sign else ""
    return f"{value:{plus},.{digits}f}" if abs(value) < _LONGEST else f"{value:{plus}.{digits + 1}g}"
