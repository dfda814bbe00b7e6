"""Draws a plan: one row per rank, one box per micro-batch, its sequences inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from roll_batching.errors import ConfigError, DataError
from roll_batching.files import atomic_file, cause, check_replaceable
from roll_batching.planning import MicroBatch, Plan

MOST_DRAWN_RANKS = 32
"""Most ranks whose sequences are drawn; more are drawn as maps of fill and cost."""


_MARK = "roll-batching picture"
_MARKED: Mapping[str, str] = {"png": "Software", "svg": "Creator", "pdf": "Creator", "ps": "Creator", "eps": "Creator"}
"""By format, the field of its metadata that holds the mark. matplotlib writes no metadata into other formats."""


def check_picture(path: str | Path, command: str) -> None:
    """Raises ConfigError without matplotlib or if `path` is no picture of ours, DataError for an unknown suffix."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError(f"{path}: pictures need matplotlib: pip install 'roll-batching[plot]'") from None

    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        suffixes = ", ".join(f".{suffix}" for suffix in sorted(formats))
        raise DataError(f"{path} has no suffix of an image format: use one of {suffixes}")
    check_replaceable(path, command, lambda content: _MARK.encode() in content)


def draw_plan(plan: Plan, path: str | Path, *, title: str = "") -> Path:
    """Draws `plan` into `path`, whose suffix selects the format (such as .png); returns the path.

    Few ranks: bars of computed tokens, divided into sequences, coloured by length, fillers hatched; a frame around the
    ranks that compute a pack together, with its context-parallel size. Many ranks: two maps, ranks by micro-batches, of
    fill and of cost. Raises `ConfigError` if it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    report = plan.report
    head = title or f"{report.samples:,} sequences, {_counts(plan)}"
    foot = (
        f"fill {report.fill:.1%}   padding {report.padding_share:.1%}   rank imbalance {report.imbalance:.2%}   "
        f"lockstep imbalance {report.lockstep_imbalance:.2%}   fillers {report.fillers}"
    )
    if report.predicted_seconds is not None:
        foot += f"   predicted {report.predicted_seconds:.4g} s"
        if report.fixed_seconds is not None:
            foot += f", with the best single size ({report.fixed_cp_size}) {report.fixed_seconds:.4g} s"
    if plan.constraints.dp_size <= MOST_DRAWN_RANKS:
        figure = _draw_packs(plan, plt)
    else:
        figure = _draw_maps(plan, plt)
    figure.suptitle(head, fontsize=13, x=0.01, ha="left")
    figure.text(0.01, 0.008, foot, fontsize=9, color="0.3")
    return save_figure(figure, path, dpi=130)


def save_figure(figure: Any, path: str | Path, *, dpi: int, **options: Any) -> Path:
    """Write a figure of matplotlib with `options` of savefig, close it, and return the path.

    The file has a mark, by which `check_picture` knows it. Raises `ConfigError` if it cannot be written.
    """
    import matplotlib.pyplot as plt

    target = Path(path)
    try:
        with atomic_file(target) as partial:
            field = _MARKED.get(target.suffix[1:].lower())
            figure.savefig(partial, dpi=dpi, metadata=None if field is None else {field: _MARK}, **options)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {cause(error)}") from None
    finally:
        plt.close(figure)
    return target


def _counts(plan: Plan) -> str:
    """The numbers of ranks and of micro-batches of a rank, in words."""
    counts = [len(rank) for rank in plan.micro_batches]
    if min(counts) == max(counts):
        return f"{len(counts)} ranks x {counts[0]} micro-batches"
    return f"{len(counts)} ranks, {min(counts)} to {max(counts)} micro-batches of a rank"


def _frame(axis, mb: MicroBatch, left: float):  # type: ignore[no-untyped-def]
    """Draw a frame around the ranks of a block, with its size."""
    from matplotlib.patches import Rectangle

    corner = (left, mb.ranks.start - 0.47)
    size = (mb.tokens / mb.cp_size, mb.cp_size - 0.06)
    axis.add_patch(Rectangle(corner, *size, fill=False, edgecolor="black", linewidth=1.4, zorder=3))
    label = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    middle = (left + size[0] / 2, corner[1] + size[1] / 2)
    axis.text(*middle, f"CP {mb.cp_size}", ha="center", va="center", fontsize=8, bbox=label)


def _draw_packs(plan: Plan, plt):  # type: ignore[no-untyped-def]
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    ranks, count = plan.constraints.dp_size, plan.num_micro_batches
    width = int(plan.by_rank(plan.tokens).max())
    gap = max(width // 12, 1)
    lengths = plan.used[plan.samples]
    norm = LogNorm(max(int(lengths.min()), 1), max(int(lengths.max()), int(lengths.min()) + 1))
    colours = plt.get_cmap("viridis")
    figure, (axis, cost_axis) = plt.subplots(
        1,
        2,
        figsize=(min(4 + 1.3 * count, 26), 1.8 + 0.42 * ranks),
        width_ratios=[max(count, 3), 1],
        sharey=True,
        layout="constrained",
    )
    figure.get_layout_engine().set(rect=(0, 0.06, 1, 0.9))
    boxes = {"y": [], "left": [], "width": [], "colour": []}  # type: ignore[var-annotated]
    for rank in range(ranks):
        for k, mb in enumerate(plan.micro_batches[rank]):
            left, share = k * (width + gap), len(mb.ranks)
            axis.barh(rank, mb.tokens / share, left=left, height=0.8, color="0.93", edgecolor="0.6", linewidth=0.5)
            if share > 1 and rank == mb.ranks.start:
                _frame(axis, mb, left)
            if mb.is_filler:
                axis.barh(rank, width, left=left, height=0.8, fill=False, hatch="////", edgecolor="0.7", linewidth=0)
            starts = left + (np.cumsum(mb.slots) - mb.slots) / share
            for start, length, shared in zip(starts, mb.lengths, mb.shared, strict=True):
                boxes["y"].append(rank)
                boxes["left"].append(start)
                boxes["width"].append(int(length - shared) / share)
                boxes["colour"].append(colours(norm(int(length))))
    axis.barh(
        boxes["y"],
        boxes["width"],
        left=boxes["left"],
        height=0.8,
        color=boxes["colour"],
        edgecolor="white",
        linewidth=0.3,
    )
    if plan.constraints.max_tokens:
        for k in range(count):
            axis.axvline(k * (width + gap) + plan.constraints.max_tokens, color="crimson", lw=0.6, ls=":")
    axis.set_xticks([k * (width + gap) + width / 2 for k in range(count)], [str(k) for k in range(count)])
    axis.set_yticks(range(ranks), [str(rank) for rank in range(ranks)])
    axis.invert_yaxis()
    of_rank = " of a rank" if plan.blocks is not None else ""
    axis.set_xlabel(f"micro-batch (tokens{of_rank}; dotted: the cap)")
    axis.set_ylabel("DP rank")
    axis.spines[["top", "right"]].set_visible(False)
    figure.colorbar(ScalarMappable(norm, colours), ax=axis, label="tokens of a sequence", pad=0.01)
    totals = plan.by_rank(plan.costs).sum(axis=1)
    cost_axis.barh(range(ranks), totals / max(totals.mean(), 1), height=0.8, color="steelblue")
    cost_axis.axvline(1, color="crimson", lw=0.8)
    cost_axis.set_xlabel("cost / mean")
    cost_axis.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_maps(plan: Plan, plt):  # type: ignore[no-untyped-def]
    tokens = plan.by_rank(plan.tokens) / (plan.constraints.max_tokens or int(plan.tokens.max()))
    costs = plan.by_rank(plan.costs)
    costs = costs / max(costs.mean(), 1)
    maps = [(tokens, "fill (tokens / cap)", "viridis"), (costs, "cost / mean micro-batch", "magma")]
    if plan.blocks is not None:
        sizes = plan.by_rank(plan.cp_sizes * plan.cp_sizes)  # a rank's share of a value is value / size
        maps.append((np.log2(np.maximum(sizes, 1)), "log2 of the context-parallel size", "cividis"))
    ratios = [4.0] * len(maps) + [1.4]
    figure, axes = plt.subplots(
        1, len(ratios), figsize=(7 + 4 * len(maps), 8), width_ratios=ratios, layout="constrained"
    )
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.93))
    for axis, (table, label, colours) in zip(axes, maps, strict=False):
        image = axis.imshow(table, aspect="auto", interpolation="nearest", cmap=colours)
        figure.colorbar(image, ax=axis, label=label, location="bottom", shrink=0.8)
        axis.set_xlabel("micro-batch")
        axis.set_ylabel("DP rank")
    totals = costs.sum(axis=1)
    axes[-1].plot(totals / totals.mean(), range(len(totals)), color="steelblue", lw=1)
    axes[-1].axvline(1, color="crimson", lw=0.8)
    axes[-1].invert_yaxis()
    axes[-1].set_xlabel("rank cost / mean")
    axes[-1].spines[["top", "right"]].set_visible(False)
    return figure
