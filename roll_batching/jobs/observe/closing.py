"""Shows the results of a run at its end: draws the learning curve, and prints closing tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from roll_batching.files import atomic_file
from roll_batching.jobs.observe.progress import fixed
from roll_batching.jobs.observe.run_files import Metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, SOFT, GRID = "#1f2933", "#8793a1", "#e4e8ec"
BLUE, ORANGE, GREEN, GREY = "#2563a8", "#d9622b", "#2e8b6f", "#aab4be"


def plot_learning_curve(rows: Sequence[Metrics], path: Path, *, title: str) -> None:
    """Draws the rows of phase `rl` into `path` (PNG): reward, response length, marks, padding by mode.

    Columns without values are left out. Without any `rl` row, the training loss and, where it was measured, the
    held-out loss are drawn.
    """
    from matplotlib.figure import Figure  # of the extra `plot`
    from matplotlib.layout_engine import ConstrainedLayoutEngine

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
    steps, values = _column(rows, "eval_reward", place="eval_updates")
    if steps:
        axes.plot(steps, values, "o", color=ORANGE, markersize=7, label="held-out problems", zorder=5)
        for index in (0, -1):
            axes.annotate(
                fixed(values[index], 2),
                (steps[index], values[index]),
                textcoords="offset points",
                xytext=(4, -14),
                color=ORANGE,
                fontsize=9,
                fontweight="bold",
            )
    drawn = [0, *_column(rows, "reward")[1], *values]
    if min(drawn) >= 0:
        axes.set_ylim(0, 1.02 if max(drawn) <= 1 else None)
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
    steps, values = _column(rows, "eval_loss", place="eval_updates")
    if steps:
        axes.plot(steps, values, "o-", color=ORANGE, markersize=5, label="held-out texts", zorder=5)
    _legend(axes)


def _style(axes: Axes, title: str, *, percent: bool) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

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
    """Draws means of five rows, each at the last of the five."""
    steps, values = _column(rows, key)
    if len(steps) >= 5:
        means = [sum(values[i - 4 : i + 1]) / 5 for i in range(4, len(values))]
        axes.plot(steps[4:], means, color=color, linewidth=2, label=label)


def _column(rows: Sequence[Metrics], key: str, place: str = "step") -> tuple[list[int], list[float]]:
    """Steps (column `place`) and values of the rows that have a value under `key`."""
    points = [(row[place], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


# ---- summary


MODES = (
    ("full", "padded to the longest length allowed"),
    ("padded", "padded to the longest of the mini-batch"),
    ("dynamic", "dynamic batching"),
    ("packed", "sequence packing"),
)


_NOT_SHOWN = ("eval_updates", "eval_samples")


def summarize(rows: Sequence[Metrics]) -> dict[str, float]:
    """Summarizes a run's `rl` rows (or, without any, its other rows); metrics without values are left out.

    A mark is a boolean that the reward function gives a response, such as `has_answer`.

    - `NAME_before`, `NAME_after`: held-out metrics of the first and the last evaluation. RL: `reward`,
      `response_length_mean`, `mark/X` (share of responses with the mark X), `reward_with/X` and `reward_without/X`
      (mean reward with and without it). Supervised runs: `loss` and the loss's metrics.
    - `tokens`: real tokens trained on; `shared_tokens`: of these, tokens in prefixes that another sample computed.
    - `train_seconds`, `tokens_per_second`.
    - `tokens_MODE`: tokens that the same steps compute in each of `MODES`.
    """
    phase_rows = [r for r in rows if r["phase"] == "rl"] or list(rows)
    evaluated = [r for r in phase_rows if r.get("eval_updates") is not None]
    summary: dict[str, float] = {}
    if evaluated:
        for when, row in (("before", evaluated[0]), ("after", evaluated[-1])):
            for key, value in row.items():
                if key.startswith("eval_") and key not in _NOT_SHOWN and value is not None:
                    summary[f"{key.removeprefix('eval_')}_{when}"] = value
    for key in ("tokens", "shared_tokens", "train_seconds", *(f"tokens_{mode}" for mode, _ in MODES)):
        values = [r[key] for r in phase_rows if r.get(key) is not None]
        if values:
            summary[key] = sum(values)
    if summary.get("train_seconds"):
        summary["tokens_per_second"] = summary["tokens"] / summary["train_seconds"]
    return summary


def show_summary(summary: dict[str, float], console: Console, *, used: str, title: str) -> None:
    """Print the closing tables. `used` is the batching mode of the run."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=True, header_style="bold")
    table.add_column("held-out problems" if "reward_after" in summary else "held-out texts")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name in [key.removesuffix("_before") for key in summary if key.endswith("_before")]:
        if f"{name}_after" not in summary:
            continue
        before, after = summary[f"{name}_before"], summary[f"{name}_after"]
        digits = 1 if max(abs(before), abs(after)) > 10 else 3
        change = fixed(after - before, digits, sign=True)
        table.add_row(_label(name), fixed(before, digits), fixed(after, digits), change)
    if table.row_count:
        console.print(table)

    tokens = Table(title_justify="left", show_header=True, header_style="bold")
    tokens.add_column("tokens that the same training steps compute")
    for column in ("tokens", "of them padding", "against padded"):
        tokens.add_column(column, justify="right")
    reference = summary.get("tokens_padded")
    for mode, label in MODES:
        computed = summary.get(f"tokens_{mode}")
        if computed is not None:
            tokens.add_row(
                label + (" (this run)" if mode == used else ""),
                f"{computed:,.0f}",
                f"{1 - summary['tokens'] / computed:.1%}",
                f"{computed / reference:.2f} x" if reference else "",
            )
    if tokens.row_count:
        console.print(tokens)
    if "tokens_per_second" in summary:
        console.print(
            f"{summary['tokens']:,.0f} real tokens trained on, {summary['tokens_per_second']:,.0f} tokens per second"
        )
    if shared := summary.get("shared_tokens"):
        share = shared / summary["tokens"]
        console.print(f"{shared:,.0f} of them ({share:.0%}) are common prefixes that another sample computed")


def _label(name: str) -> str:
    """The words for a metric of the table: `mark/has_answer` is "share of answers: has answer"."""
    kind, _, subject = name.partition("/")
    label = subject.replace("_", " ")
    known = {
        "mark": f"share of answers: {label}",
        "reward_with": f"reward, {label}: yes",
        "reward_without": f"reward, {label}: no",
        "reward": f"reward: {subject}",  # of a domain
    }
    return known[kind] if subject and kind in known else name.replace("_", " ")
