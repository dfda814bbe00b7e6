"""Curves of many steps reduced to what a chart can show: means over windows, with a band of the steps inside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_RAW = 80
"""Most steps that are shown as they are."""
_WINDOWS, _POINTS = 50, 250
"""A longer curve has windows of 1/50 of its steps, and about 250 points."""
BAND = (10, 90)
"""Percentiles of a window's steps between which its band lies."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Points of a curve."""

    steps: Floats
    means: Floats
    low: Floats | None
    """Lower edge of the band; None where each point is one step."""
    high: Floats | None
    window: int
    """Steps of a window; 1: each point is one step."""


def window_of(count: int) -> int:
    """Steps of a window on a curve of `count` steps."""
    return 1 if count <= MOST_RAW else max(count // _WINDOWS, 2)


def smooth(steps: Floats, values: Floats) -> Curve:
    """The curve of `values` (float64 [n]) at `steps` (float64 [n]): raw, or means over centred windows with bands.

    Windows at the ends are shorter.
    """
    count = len(steps)
    window = window_of(count)
    if window == 1:
        return Curve(steps, values, None, None, 1)
    centres = np.unique(np.linspace(0, count - 1, min(count, _POINTS)).astype(int))
    before, after = window // 2, window - window // 2
    parts = [values[max(centre - before, 0) : centre + after] for centre in centres]
    edges = np.array([np.percentile(part, BAND) for part in parts])
    means = np.array([part.mean() for part in parts])
    return Curve(steps[centres], means, edges[:, 0], edges[:, 1], window)
