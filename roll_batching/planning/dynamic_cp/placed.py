"""Packs of units on blocks of ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlacedPacks:
    """Units of each pack, its first rank and its level (its size is 2^level), in an order that every rank follows."""

    units: list[list[int]]
    first_ranks: list[int]
    levels: list[int]
    step_time: int
    """Predicted nanoseconds of the step."""
