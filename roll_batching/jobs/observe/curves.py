"""The learning curve as a picture: reward, response length, marks and padding, or the loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from roll_batching.files import atomic_file
from roll_batching.jobs.observe.metrics_file import Metrics
from roll_batching.jobs.observe.numbers import fixed

INK, SOFT, GRID = "#1f2933", "#8793a1", "#e4e8ec"
BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9622b", "#2e8b6f", "#aab4be"


def plot_learning_curve(rows: Sequence[Metrics], path: Path, *, title: str) -> None:
    """Draw the rows of phase `rl` into `path` (PNG): reward, response length, marks, padding by mode.

    Columns without values are left out. Without any `rl` row, the training loss and, where it was measured, the
    held-out loss are drawn.
    """
    rl = [r for r in rows if r["phase"] == "rl"]
    spacing = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
    figure = Figure(figsize=(11, 6.6), dpi=150, facecolor="white", layout=spacing)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK)
    if not rl:
        _loss_panel(figure.subplots(), rows)
    else:
        (reward, length), (marks, padding) = figure.subplots(2, 2)
        _reward_panel(reward, rl)
        _length_panel(length, rl)
        _marks_panel(marks, rl)
        _padding_panel(padding, rl)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        figure.savefig(partial)


def _reward_panel(axes: Axes, rows: Sequence[Metrics]) -> None:
    _style(axes, "Reward", percent=False)
    _line(axes, rows, "reward", GREY, "training prompts, each step", width=1.2)
    _smooth(axes, rows, "reward", BLUE, "its mean over 5 steps")
    steps, values = _held_out(rows)
    if steps:
        axes.plot(steps, values, "o", color=ORANGE, markersize=7, label="held-out problems", zorder=5)
        for at in (0, -1):
            axes.annotate(
                fixed(values[at], 2),
                (steps[at], values[at]),
                textcoords="offset points",
                xytext=(4, -14),
                color=ORANGE,
                fontsize=9,
                fontweight="bold",
            )
    shown = [0, *_column(rows, "reward")[1], *values]
    if min(shown) >= 0:
        axes.set_ylim(0, 1.02 if max(shown) <= 1 else None)
    _legend(axes)


def _length_panel(axes: Axes, rows: Sequence[Metrics]) -> None:
    _style(axes, "Response length, tokens", percent=False)
    _line(axes, rows, "response_length_max", GREY, "longest of the step", width=1.2)
    _line(axes, rows, "response_length_mean", BLUE, "mean")
    axes.set_ylim(bottom=0)
    _legend(axes)


def _marks_panel(axes: Axes, rows: Sequence[Metrics]) -> None:
    names = sorted({key for row in rows for key in row if key.startswith("mark/")})
    _style(axes, "Share of answers" if names else "Clipped share of tokens", percent=True)
    for name, color in zip(names or ["clip_fraction"], (GREEN, ORANGE, BLUE, GREY), strict=False):
        _line(axes, rows, name, color, name.removeprefix("mark/").replace("_", " "))
    axes.set_ylim(0, 1.02 if names else None)
    _legend(axes)


def _padding_panel(axes: Axes, rows: Sequence[Metrics]) -> None:
    _style(axes, "Computed tokens that are padding", percent=True)
    for mode, color in (("padded", GREY), ("dynamic", ORANGE), ("packed", BLUE)):
        pairs = [
            (r["step"], 1 - r["tokens"] / r[f"tokens_{mode}"]) for r in rows if r.get(f"tokens_{mode}") is not None
        ]
        if pairs:
            axes.plot(*zip(*pairs, strict=True), color=color, linewidth=1.8, label=mode)
    axes.set_ylim(-0.02, 1.02)
    _legend(axes)


def _loss_panel(axes: Axes, rows: Sequence[Metrics]) -> None:
    _style(axes, "Loss", percent=False)
    _line(axes, rows, "loss", BLUE, "training, each step")
    measured = [(r["eval_updates"], r["eval_loss"]) for r in rows if r.get("eval_loss") is not None]
    if measured:
        axes.plot(*zip(*measured, strict=True), "o-", color=ORANGE, markersize=5, label="held-out texts", zorder=5)
    _legend(axes)


def _style(axes: Axes, title: str, *, percent: bool) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK, pad=8)
    axes.set_xlabel("step", fontsize=9, color=SOFT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=SOFT, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="best")


def _line(axes: Axes, rows: Sequence[Metrics], key: str, color: str, label: str, width: float = 1.8) -> None:
    steps, values = _column(rows, key)
    if steps:
        axes.plot(steps, values, color=color, linewidth=width, label=label)


def _smooth(axes: Axes, rows: Sequence[Metrics], key: str, color: str, label: str) -> None:
    steps, values = _column(rows, key)
    if len(steps) >= 5:
        means = [sum(values[i - 4 : i + 1]) / 5 for i in range(4, len(values))]
        axes.plot(steps[4:], means, color=color, linewidth=2, label=label)


def _column(rows: Sequence[Metrics], key: str) -> tuple[list[int], list[float]]:
    points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
    return [s for s, _ in points], [v for _, v in points]


def _held_out(rows: Sequence[Metrics]) -> tuple[list[int], list[float]]:
    """Numbers of updates, and the held-out rewards after them."""
    points = [(r["eval_updates"], r["eval_reward"]) for r in rows if r.get("eval_reward") is not None]
    return [s for s, _ in points], [v for _, v in points]
