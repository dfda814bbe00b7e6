"""Numbers as a terminal shows them."""

from __future__ import annotations

_LONGEST = 1e12


def fixed(value: float, digits: int, *, sign: bool = False) -> str:
    """`value` with so many digits after the point; in powers of ten where it would be very long."""
    plus = "+" if sign else ""
    return f"{value:{plus},.{digits}f}" if abs(value) < _LONGEST else f"{value:{plus}.{digits + 1}g}"
