"""What one rank holds over the passes of a step, as a picture."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from roll_batching.rehearsal.margins import GIB
from roll_batching.rehearsal.report import KINDS
from roll_batching.rehearsal.task import RankReport

_COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#c44e52")


def draw_memory(report: RankReport, path: str | Path, *, title: str, gpu_memory: float) -> None:
    """Draws the timeline of `report` into the file `path`: memory by kind over the operations of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    moments = range(len(report.timeline))
    kinds = [kind for kind in KINDS if any(held.get(kind) for _, held in report.timeline)]
    heights = [[held.get(kind, 0) / GIB for _, held in report.timeline] for kind in kinds]
    colours = [_COLOURS[KINDS.index(kind)] for kind in kinds]
    figure, axes = pyplot.subplots(figsize=(11, 5))
    axes.stackplot(moments, heights, labels=kinds, colors=colours, step="post", linewidth=0)
    axes.axhline(gpu_memory / GIB, color="black", linestyle="--", linewidth=1)
    top = gpu_memory / GIB * 1.02
    for phase, members in groupby(enumerate(report.timeline), key=lambda pair: pair[1][0]):
        places = [at for at, _ in members]
        axes.axvline(places[0], color="white", linewidth=0.6, alpha=0.6)
        if len(places) > len(report.timeline) / 40:
            axes.text(places[0], top, f" {phase}", fontsize=8, rotation=20, va="bottom")
    axes.set(xlabel="operations of a step", ylabel="GiB", xlim=(0, len(moments)), ylim=(0, gpu_memory / GIB * 1.2))
    axes.set_title(title, fontsize=10, pad=8)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
