"""Reports of a rehearsal: text, JSON and a plot of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from roll_batching.jobs.config.rl_rules import uses_critic
from roll_batching.jobs.observe.plan_picture import save_figure
from roll_batching.tools.rehearsal.advice import Limit, TriedChange, largest_fitting_caps
from roll_batching.tools.rehearsal.job import GIB, Rehearsal, StageReport, StepTotals, totals_of
from roll_batching.tools.rehearsal.task import CRITIC, RankReport

_STATES = ("weights", "gradients", "optimizer")
KINDS = (*_STATES, *(CRITIC + kind for kind in _STATES), "reference", "teacher", "inputs", "activations")
_LARGEST = 5
"""Number of holders of the peak in the text."""
_PHASES = 7
"""Number of phases in the summary."""
_COLOURS = (
    "#4c72b0",
    "#dd8452",
    "#55a868",
    "#a1b8dc",
    "#f0c3a8",
    "#a9d3b5",
    "#8172b3",
    "#da8bc3",
    "#937860",
    "#c44e52",
)


def advice_lines(
    rehearsal: Rehearsal, limits: Sequence[Limit], ways: Sequence[TriedChange], gpu_memory: float
) -> Iterator[str]:
    """Yields the lines of advice: settings that fit, as overrides for the command line."""
    if rehearsal.fits(gpu_memory):
        for limit in limits:
            beyond = "larger values were not tried" if limit.too_large is None else f"{limit.too_large:,} does not fit"
            yield f"{limit.key} is {limit.value:,}: {limit.fits or limit.value:,} fits, {beyond}"
        return
    yield ""
    yield f"to fit {_gib(gpu_memory)} GiB, set one of these; each was rehearsed:"
    change, any_fits = largest_fitting_caps(rehearsal, limits, gpu_memory), False
    if change is not None:
        any_fits = True
        need = max(limit.need for limit in limits)
        yield f"    {change}"
        yield f"        needs {_gib(need)} GiB; " + "; ".join(
            f"{limit.key.rsplit('.', 1)[1]} is {limit.value:,}, and {limit.too_large:,} does not fit"
            for limit in limits
        )
    for way in ways:
        if way.need <= gpu_memory:
            any_fits = True
            yield f"    {way.change}"
            yield f"        needs {_gib(way.need)} GiB"
    if not any_fits:
        yield "    none of the tried settings fits: use more GPUs per replica, larger GPUs, or shorter samples"
    for limit in limits:
        if limit.fits is None:
            yield f"no {limit.key} fits: the smallest value, one longest sample, needs {_gib(limit.need)} GiB"
    for way in ways:
        if way.need > gpu_memory:
            yield f"does not fit, {_gib(way.need)} GiB: {way.change}"


def summary_lines(rehearsal: Rehearsal, gpu_memory: float) -> Iterator[str]:
    """Yields the verdict and the peak of each phase; `lines_of` has the details."""
    yield from _verdict(rehearsal, gpu_memory)
    worst, stages = rehearsal.worst, rehearsal.stages
    highest = {name: peak.bytes for stage in stages for name, peak in stage.report.peaks.items()}
    for stage in stages:
        highest |= {name: max(peak.bytes, highest[name]) for name, peak in stage.report.peaks.items()}
    shown = sorted(highest, key=highest.__getitem__)[-_PHASES:]
    yield ""
    yield f"  {'peak of a phase, GiB':<24} {worst.name:>18} {'highest stage':>14}"
    for name in (name for name in highest if name in shown):
        peak = worst.report.peaks.get(name)
        yield f"  {name:<24} {'-' if peak is None else _gib(peak.bytes):>18} {_gib(highest[name]):>14}"
    if reads := rehearsal.reads_inside:
        yield f"  {sum(reads.values()):,} host reads inside the schedule stall the device, such as {next(iter(reads))}"
    more = len(highest) - len(shown)
    yield (
        f"  {more} other phases need less; " if more else "  "
    ) + "--verbose lists all that was counted, --advice the largest caps that fit"


def lines_of(rehearsal: Rehearsal, gpu_memory: float) -> Iterator[str]:
    """Yields the lines of the whole report, the verdict first."""
    yield from _verdict(rehearsal, gpu_memory)
    for stage in rehearsal.stages:
        yield ""
        yield from _stage(stage)
    yield ""
    for size in rehearsal.cp_sizes or (None,):
        yield _totals("training", totals_of(rehearsal, size), size)
        if uses_critic(rehearsal.config):
            yield _totals("training of the critic", totals_of(rehearsal, size, critic=True), size)


def _verdict(rehearsal: Rehearsal, gpu_memory: float) -> Iterator[str]:
    worst = rehearsal.worst
    verdict = "fits" if rehearsal.fits(gpu_memory) else "does not fit"
    yield (
        f"{verdict} {_gib(gpu_memory)} GiB: {worst.name} needs {_gib(worst.need)} GiB ({_gib(worst.peak)} counted, in "
        f"{worst.peak_phase}; {_gib(worst.need - worst.peak)} of margins)"
    )
    if rehearsal.fault is not None:
        yield f"the first rollout fails: {rehearsal.fault}"
    ranks = f"{rehearsal.dims} = {rehearsal.dims.world_size} ranks"
    if rehearsal.cp_sizes:
        yield f"{ranks}; each pack has its own context-parallel size, CP:"
    for size in rehearsal.cp_sizes or (None,):
        first = next(stage for stage in rehearsal.stages if stage.cp_size == size)
        tokens = ", ".join(f"{count:,} tokens ({name})" for name, count in first.report.tokens.items())
        yield (f"{ranks}; " if size is None else f"  CP {size}: ") + f"micro-batches of {tokens}"
    yield from rehearsal.stages[0].report.notes


def _stage(stage: StageReport) -> Iterator[str]:
    report = stage.report
    yield f"{stage.name}: rank {report.rank}, {report.parameters / 1e9:,.3f}B parameters"
    kept = ", ".join(f"{kind} {_gib(report.kept[kind])}" for kind in KINDS if kind in report.kept)
    yield f"  persistent           {_gib(sum(report.kept.values()))} GiB: {kept}"
    for peak in report.peaks.values():
        transient = peak.kinds.get("activations", 0) + peak.kinds.get("inputs", 0)
        mark = "  <- peak" if peak.phase == stage.peak_phase else ""
        yield f"  {peak.phase:<20} {_gib(peak.bytes)} GiB, {_gib(transient)} of it transient{mark}"
    highest = report.peaks[stage.peak_phase]
    for holder, size in sorted(highest.holders.items(), key=lambda pair: -pair[1])[:_LARGEST]:
        yield f"      {_gib(size):>8} GiB {holder}"
    for margin in stage.margins:
        yield f"  margin               {_gib(margin.bytes)} GiB: {margin.reason}"
    flops = ", ".join(f"{phase} {count / report.micro_batches / 1e12:,.1f}" for phase, count in report.flops.items())
    yield f"  TFLOP computed per micro-batch: {flops}"
    yield "  collectives of the rehearsed passes, bytes sent by this rank:"
    for key, (calls, size) in report.collectives.items():
        yield f"      {calls:>8,} {_gib(size):>9} GiB  {key}"
    if report.host_reads:
        yield "  host reads:"
    for place, count in report.host_reads.items():
        yield f"      {count:>8,} {place}"


def _totals(name: str, totals: StepTotals, cp_size: int | None) -> str:
    of_what = "micro-batch and replica" if cp_size is None else f"micro-batch of CP {cp_size}"
    text = (
        f"{name}, per {of_what}: {totals.computed / 1e12:,.1f} TFLOP computed, {totals.useful:.1%} "
        f"of it model FLOPs of real tokens; {totals.padding:.1%} of the tokens are padding"
    )
    if (count := totals.micro_batches) is None:
        return text
    return f"{text}; {count:,} in an optimizer step, {count * totals.computed / 1e15:,.2f} PFLOP if all are equal"


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def report_json(rehearsal: Rehearsal, gpu_memory: float) -> dict[str, Any]:
    """The report as a JSON object; sizes in bytes."""
    return {
        "dims": rehearsal.dims.to_dict(),
        "gpu_memory": gpu_memory,
        "fits": rehearsal.fits(gpu_memory),
        "need": rehearsal.worst.need,
        "fault": rehearsal.fault,
        "training": _totals_json(rehearsal),
        **({"critic": _totals_json(rehearsal, critic=True)} if uses_critic(rehearsal.config) else {}),
        "stages": [
            {
                "name": stage.name,
                "cp_size": stage.cp_size,
                "rank": stage.report.rank,
                "parameters": stage.report.parameters,
                "kept": stage.report.kept,
                "peaks": {
                    name: {"bytes": peak.bytes, "kinds": peak.kinds, "holders": peak.holders}
                    for name, peak in stage.report.peaks.items()
                },
                "margins": [{"bytes": margin.bytes, "reason": margin.reason} for margin in stage.margins],
                "flops": stage.report.flops,
                "collectives": stage.report.collectives,
                "host_reads": stage.report.host_reads,
                "micro_batches": stage.report.micro_batches,
                "tokens": stage.report.tokens,
                "notes": list(stage.report.notes),
            }
            for stage in rehearsal.stages
        ],
    }


def _totals_json(rehearsal: Rehearsal, *, critic: bool = False) -> Any:
    """Totals of the training passes; a list, one for each context-parallel size, if packs have different sizes."""
    sizes = rehearsal.cp_sizes
    of_sizes = [{"cp_size": size, **asdict(totals_of(rehearsal, size, critic=critic))} for size in sizes]
    return of_sizes or asdict(totals_of(rehearsal, critic=critic))


def draw_memory(report: RankReport, path: str | Path, *, title: str, gpu_memory: float) -> None:
    """Plot the timeline of `report` into the file `path`: memory by kind over the operations of a step."""
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
        indices = [index for index, _ in members]
        axes.axvline(indices[0], color="white", linewidth=0.6, alpha=0.6)
        if len(indices) > len(report.timeline) / 40:
            axes.text(indices[0], top, f" {phase}", fontsize=8, rotation=20, va="bottom")
    axes.set(xlabel="operations of a step", ylabel="GiB", xlim=(0, len(moments)), ylim=(0, gpu_memory / GIB * 1.2))
    axes.set_title(title, fontsize=10, pad=8)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
    save_figure(figure, path, dpi=110, bbox_inches="tight")
