"""From a model of a few layers to one of many: what a rank holds and does is a constant and a share per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roll_batching.rehearsal.task import PhasePeak, RankReport


def at_layers(few: RankReport, more: RankReport, layers: tuple[int, int, int]) -> RankReport:
    """The report of a rank with `layers[2]` layers, from those of the same rank with `layers[0]` and `layers[1]`."""
    below, above, wanted = layers
    share = (wanted - below) / (above - below)

    def line(a: float, b: float) -> float:
        return a + (b - a) * share

    def lines(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {key: max(line(a.get(key, 0), b.get(key, 0)), 0) for key in (*a, *(key for key in b if key not in a))}

    def peak(phase: str) -> PhasePeak:
        a, b = few.peaks[phase], more.peaks[phase]
        return PhasePeak(
            phase=phase,
            bytes=line(a.bytes, b.bytes),
            kinds=lines(a.kinds, b.kinds),
            holders=lines(a.holders, b.holders),
        )

    calls = lines({k: v[0] for k, v in few.collectives.items()}, {k: v[0] for k, v in more.collectives.items()})
    sizes = lines({k: v[1] for k, v in few.collectives.items()}, {k: v[1] for k, v in more.collectives.items()})
    reads = lines(dict(few.host_reads), dict(more.host_reads))
    return replace(
        more,
        parameters=line(few.parameters, more.parameters),
        kept=lines(few.kept, more.kept),
        peaks={phase: peak(phase) for phase in more.peaks if phase in few.peaks},
        flops=lines(few.flops, more.flops),
        collectives={key: (round(calls[key]), sizes[key]) for key in calls},
        host_reads={key: round(count) for key, count in reads.items()},
        training=replace(more.training, model_flops=line(few.training.model_flops, more.training.model_flops)),
        seconds=few.seconds + more.seconds,
    )
