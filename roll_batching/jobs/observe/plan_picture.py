"""A plan as a picture: one row per rank, one box per micro-batch, its sequences inside."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from roll_batching.errors import DataError
from roll_batching.files import atomic_file
from roll_batching.planning import Plan

MOST_DRAWN_RANKS = 32
"""Most ranks whose sequences are drawn; more are drawn as maps of fill and cost."""


def check_picture(path: str | Path) -> None:
    """Raises DataError when the suffix of `path` is not an image format."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        raise DataError(
            f"{path} has no suffix of an image format: use one of {', '.join(f'.{one}' for one in sorted(formats))}"
        )


def draw_plan(plan: Plan, path: str | Path, *, title: str = "") -> Path:
    """Write a PNG (or what the suffix says) of `plan`; returns the path.

    Few ranks: bars of computed tokens, divided into sequences, coloured by length, fillers hatched. Many
    ranks: two maps, ranks by micro-batches, of fill and of cost.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    report = plan.report
    head = title or (
        f"{report.samples:,} sequences, {plan.constraints.dp_size} ranks x {plan.num_micro_batches} micro-batches"
    )
    foot = (
        f"fill {report.fill:.1%}   padding {report.padding_share:.1%}   rank imbalance {report.imbalance:.2%}   "
        f"lockstep imbalance {report.lockstep_imbalance:.2%}   fillers {report.fillers}"
    )
    if plan.constraints.dp_size <= MOST_DRAWN_RANKS:
        figure = _draw_packs(plan, plt)
    else:
        figure = _draw_maps(plan, plt)
    figure.suptitle(head, fontsize=13, x=0.01, ha="left")
    figure.text(0.01, 0.008, foot, fontsize=9, color="0.3")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as partial:
        figure.savefig(partial, dpi=130)
    plt.close(figure)
    return target


def _draw_packs(plan: Plan, plt):  # type: ignore[no-untyped-def]
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    ranks, count = plan.constraints.dp_size, plan.num_micro_batches
    width = int(plan.by_rank(plan.tokens).max())
    gap = max(width // 12, 1)
    placed = plan.used[plan.samples]
    norm = LogNorm(max(int(placed.min()), 1), max(int(placed.max()), int(placed.min()) + 1))
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
    axis.set_xlabel("micro-batch (tokens; dotted: the cap)")
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
    figure, axes = plt.subplots(1, 3, figsize=(15, 8), width_ratios=[4, 4, 1.4], layout="constrained")
    figure.get_layout_engine().set(rect=(0, 0.03, 1, 0.93))
    for axis, table, label, colours in (
        (axes[0], tokens, "fill (tokens / cap)", "viridis"),
        (axes[1], costs, "cost / mean micro-batch", "magma"),
    ):
        image = axis.imshow(table, aspect="auto", interpolation="nearest", cmap=colours)
        figure.colorbar(image, ax=axis, label=label, location="bottom", shrink=0.8)
        axis.set_xlabel("micro-batch")
        axis.set_ylabel("DP rank")
    totals = costs.sum(axis=1)
    axes[2].plot(totals / totals.mean(), range(len(totals)), color="steelblue", lw=1)
    axes[2].axvline(1, color="crimson", lw=0.8)
    axes[2].invert_yaxis()
    axes[2].set_xlabel("rank cost / mean")
    axes[2].spines[["top", "right"]].set_visible(False)
    return figure
