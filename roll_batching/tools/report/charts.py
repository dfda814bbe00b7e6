"""Charts and tables of the page: charts are plain data for plotly.js, with escaped labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roll_batching.tools.report.run_files import Row, escaped

BLUE, ORANGE, GREEN, GREY, PURPLE, RED = "#2563a8", "#d9622b", "#2e8b6f", "#8793a1", "#7a4fa3", "#b3273d"
INK = "#1f2933"
COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY, "#a37b1d", "#3aa0b8")
DASHES = ("solid", "dot", "dash", "dashdot", "longdash")
_LABEL = 60
"""Most characters of a label."""

Trace = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One chart of the page."""

    title: str
    traces: list[Trace]
    y: str
    """Title of the y axis: quantity and unit."""
    note: str = ""
    """A sentence below the title."""
    x: str = "step"
    percent: bool = False
    """Whether y is a share, shown in percent."""
    from_zero: bool = False
    is_scientific: bool = False
    """Whether ticks are written like 2e-5."""
    height: int = 300
    layout: dict[str, Any] = field(default_factory=dict)
    """Further keys of plotly's layout."""
    is_wide: bool = False

    def spec(self) -> dict[str, Any]:
        """The figure for plotly.js: `data` and `layout`."""
        y: dict[str, Any] = {"title": {"text": escaped(self.y)}}
        if self.percent:
            largest = max((abs(value) for trace in self.traces for value in trace.get("y", ())), default=0.0)
            # Decimals of the ticks of an axis that ends near the largest share.
            digits = min(max(1 - math.floor(math.log10(largest * 100)), 0), 9) if largest > 0 else 0
            y["tickformat"] = f".{digits}%"
        if self.is_scientific:
            y["exponentformat"] = "e"
        if self.from_zero:
            y["rangemode"] = "tozero"
        layout = {"xaxis": {"title": {"text": escaped(self.x)}}, "yaxis": y, "height": self.height}
        return {"data": self.traces, "layout": layout | self.layout}


def column(rows: Iterable[Row], key: str) -> tuple[Floats, Floats]:
    """Steps and values of a column, where it has values: float64 [n] each."""
    points = [(row.step, row.values[key]) for row in rows if key in row.values]
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def line(
    rows: Sequence[Row],
    key: str,
    name: str,
    color: str,
    *,
    dash: str = "solid",
    has_band: bool = True,
    spread: str | None = None,
) -> list[Trace]:
    """Traces of a column: the band, if there is one, and the line. Empty without values.

    The band of a short curve is one standard deviation, from the column `spread`. The band of a long curve holds the
    middle 80% of the steps in a window.
    """
    steps, values = column(rows, key)
    if not len(steps):
        return []
    curve = smooth(steps, values)
    low, high = curve.low, curve.high
    if low is None and spread is not None and has_band:
        at, deviations = column(rows, spread)
        if np.array_equal(at, steps):
            low, high = values - deviations, values + deviations
    label = escaped(name, _LABEL)
    traces: list[Trace] = []
    if has_band and low is not None and high is not None and len(low) > 1:
        traces.append(
            {
                "type": "scatter",
                "x": _listed([*curve.steps, *curve.steps[::-1]]),
                "y": _listed([*high, *low[::-1]]),
                "fill": "toself",
                "fillcolor": _transparent(color, 0.16),
                "line": {"width": 0},
                "mode": "lines",
                "hoverinfo": "skip",
                "legendgroup": label,
                "showlegend": False,
                "name": label,
            }
        )
    trace: Trace = {
        "type": "scatter",
        "x": _listed(curve.steps),
        "y": _listed(curve.means),
        "mode": "lines" if len(curve.steps) > 1 else "markers",
        "line": {"color": color, "width": 1.8, "dash": dash},
        "name": label,
        "legendgroup": label,
    }
    return [*traces, trace]


def points(rows: Sequence[Row], x_key: str, y_key: str, name: str, color: str) -> list[Trace]:
    """Markers joined by a thin line: column `y_key` over column `x_key`, such as held-out rewards over steps."""
    pairs = [(row.values[x_key], row.values[y_key]) for row in rows if {x_key, y_key} <= row.values.keys()]
    if not pairs:
        return []
    steps, values = zip(*pairs, strict=True)
    return [
        {
            "type": "scatter",
            "x": _listed(steps),
            "y": _listed(values),
            "mode": "lines+markers",
            "line": {"color": color, "width": 1, "dash": "dot"},
            "marker": {"size": 7 if len(pairs) <= 60 else 4},
            "name": escaped(name, _LABEL),
        }
    ]


def areas(steps: Floats, parts: Sequence[tuple[str, Floats, str]], group: str) -> list[Trace]:
    """Areas on top of each other: (name, values float64 [n], colour) from the bottom up; all-zero parts left out."""
    traces = []
    for name, values, color in parts:
        if not len(steps) or not values.any():
            continue
        curve = smooth(steps, values)
        traces.append(
            {
                "type": "scatter",
                "x": _listed(curve.steps),
                "y": _listed(curve.means),
                "mode": "lines",
                "stackgroup": group,
                "line": {"color": color, "width": 0.5},
                "fillcolor": _transparent(color, 0.75),
                "name": escaped(name, _LABEL),
            }
        )
    return traces


def window_note(counts: Iterable[int]) -> str:
    """Sentence that explains the means and bands of curves with `counts` steps; empty if all curves are short."""
    windows = sorted({window_of(count) for count in counts} - {1})
    if not windows:
        return ""
    steps = " and ".join(str(window) for window in windows)
    return f"Lines are means over {steps} steps; bands hold the middle 80% of the steps in the window."


def _listed(values: Iterable[Any]) -> list[float]:
    """Values with 6 significant digits; whole numbers from 1e5 on as int, which keeps all digits."""
    return [float(f"{value:.6g}") if abs(value) < 1e5 or value % 1 else int(value) for value in map(float, values)]


def _transparent(color: str, opacity: float) -> str:
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


# ---- smoothing


MOST_RAW = 80
"""Most steps of a curve that shows every step."""
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


# ---- parts of the page


@dataclass(frozen=True)
class Table:
    """A table of texts, which the page escapes."""

    head: Sequence[str]
    records: Sequence[Sequence[str]]
    title: str = ""
    marked: frozenset[int] = frozenset()
    """Records that are emphasised: settings that differ between two runs."""


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    title: str
    note: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    lists: Sequence[tuple[str, Sequence[str]]] = ()
    """Titles and items of lists."""
    has_rollouts: bool = False
    absent: Sequence[str] = field(default=())
    """Sentences on what the section leaves out."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.charts or self.tables or self.lists or self.has_rollouts)
