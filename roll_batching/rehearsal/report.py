"""A rehearsal in words and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from roll_batching.rehearsal.advice import Limit, WayOut, lowered
from roll_batching.rehearsal.job import Rehearsal, StageReport
from roll_batching.rehearsal.margins import GIB
from roll_batching.rehearsal.totals import StepTotals, totals_of

KINDS = ("weights", "gradients", "optimizer", "reference", "inputs", "activations")
_LARGEST = 5


def advice_lines(found: Rehearsal, limits: Sequence[Limit], ways: Sequence[WayOut], gpu_memory: float) -> Iterator[str]:
    """What to change, line by line; settings as they go behind the command, or into the file."""
    if found.fits(gpu_memory):
        for limit in limits:
            beyond = "more was not tried" if limit.too_large is None else f"{limit.too_large:,} does not"
            yield f"{limit.key} is {limit.value:,}: {limit.fits or limit.value:,} fits, {beyond}"
        return
    yield ""
    yield f"to fit {_gib(gpu_memory)} GiB, set one of these; each was rehearsed:"
    change, helped = lowered(found, limits, gpu_memory), False
    if change is not None:
        helped = True
        need = max(limit.need for limit in limits)
        yield f"    {change}"
        yield f"        needs {_gib(need)} GiB; " + "; ".join(
            f"{limit.key.rsplit('.', 1)[1]} is {limit.value:,}, and {limit.too_large:,} does not fit"
            for limit in limits
        )
    for way in ways:
        if way.need <= gpu_memory:
            helped = True
            yield f"    {way.change}"
            yield f"        needs {_gib(way.need)} GiB"
    if not helped:
        yield "    nothing that was tried: it takes more GPUs per replica, GPUs of more memory, or shorter samples"
    for limit in limits:
        if limit.fits is None:
            yield f"no {limit.key} fits: at its least, one longest sample, it is {_gib(limit.need)} GiB"
    for way in ways:
        if way.need > gpu_memory:
            yield f"not enough, {_gib(way.need)} GiB: {way.change}"


def lines_of(found: Rehearsal, gpu_memory: float) -> Iterator[str]:
    """The report, line by line: the verdict first."""
    yield _verdict(found, gpu_memory)
    if found.fault is not None:
        yield f"the job fails when it samples: {found.fault}"
    tokens = found.stages[0].report.tokens
    yield f"{found.dims} = {found.dims.world_size} ranks; micro-batches of " + ", ".join(
        f"{count:,} tokens ({name})" for name, count in tokens.items()
    )
    yield from found.stages[0].report.notes
    for stage in found.stages:
        yield ""
        yield from _stage(stage)
    yield ""
    yield _totals(totals_of(found))


def _stage(stage: StageReport) -> Iterator[str]:
    report = stage.report
    yield f"{stage.name}: rank {report.rank}, {report.parameters / 1e9:,.3f}B parameters"
    kept = ", ".join(f"{kind} {_gib(report.kept[kind])}" for kind in KINDS if kind in report.kept)
    yield f"  from step to step   {_gib(sum(report.kept.values()))} GiB: {kept}"
    for peak in report.peaks.values():
        passing = peak.kinds.get("activations", 0) + peak.kinds.get("inputs", 0)
        mark = "  <- peak" if peak.phase == stage.peak_phase else ""
        yield f"  {peak.phase:<19} {_gib(peak.bytes)} GiB, {_gib(passing)} of it come and go{mark}"
    highest = report.peaks[stage.peak_phase]
    for words, size in sorted(highest.holders.items(), key=lambda pair: -pair[1])[:_LARGEST]:
        yield f"      {_gib(size):>8} GiB {words}"
    for margin in stage.margins:
        yield f"  margin              {_gib(margin.bytes)} GiB: {margin.reason}"
    flops = ", ".join(f"{phase} {count / report.micro_batches / 1e12:,.1f}" for phase, count in report.flops.items())
    yield f"  TFLOP computed per micro-batch: {flops}"
    yield "  collectives of the rehearsed passes, bytes handed in by this rank:"
    for words, (calls, size) in report.collectives.items():
        yield f"      {calls:>8,} {_gib(size):>9} GiB  {words}"
    if report.host_reads:
        yield "  host reads:"
    for words, count in report.host_reads.items():
        yield f"      {count:>8,} {words}"


def _totals(totals: StepTotals) -> str:
    words = (
        f"training, per micro-batch and replica: {totals.computed / 1e12:,.1f} TFLOP computed, {totals.useful:.1%} "
        f"of it the model's own on real tokens; {totals.padding:.1%} of the tokens are padding"
    )
    if (count := totals.micro_batches) is None:
        return words
    return f"{words}; {count:,} in an optimizer step, {count * totals.computed / 1e15:,.2f} PFLOP if all are alike"


def _verdict(found: Rehearsal, gpu_memory: float) -> str:
    worst = found.worst
    words = "fits" if found.fits(gpu_memory) else "does not fit"
    return (
        f"{words} {_gib(gpu_memory)} GiB: {worst.name} needs {_gib(worst.need)} GiB ({_gib(worst.peak)} counted, in "
        f"{worst.peak_phase}; {_gib(worst.need - worst.peak)} of margins)"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def plain(found: Rehearsal, gpu_memory: float) -> dict[str, Any]:
    """As plain values, ready for JSON; sizes in bytes."""
    return {
        "dims": found.dims.to_dict(),
        "gpu_memory": gpu_memory,
        "fits": found.fits(gpu_memory),
        "need": found.worst.need,
        "fault": found.fault,
        "training": asdict(totals_of(found)),
        "stages": [
            {
                "name": stage.name,
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
            for stage in found.stages
        ],
    }
