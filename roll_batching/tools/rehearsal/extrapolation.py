"""Extrapolate reports of two shallow models to a deep one: every figure is linear in the number of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roll_batching.tools.rehearsal.task import PhasePeak, RankReport, TrainingBatch


def extrapolate_layers(few: RankReport, more: RankReport, layers: tuple[int, int, float]) -> RankReport:
    """Report of a rank with `layers[2]` layers, from its reports with `layers[0]` and `layers[1]` layers."""
    shallow, deeper, target = layers
    share = (target - shallow) / (deeper - shallow)

    def extrapolate(a: float, b: float) -> float:
        return a + (b - a) * share

    def by_key(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
        return {
            key: max(extrapolate(a.get(key, 0), b.get(key, 0)), 0) for key in (*a, *(key for key in b if key not in a))
        }

    def peak(phase: str) -> PhasePeak:
        a, b = few.peaks[phase], more.peaks[phase]
        return PhasePeak(
            phase=phase,
            bytes=extrapolate(a.bytes, b.bytes),
            kinds=by_key(a.kinds, b.kinds),
            holders=by_key(a.holders, b.holders),
        )

    def batch(a: TrainingBatch, b: TrainingBatch) -> TrainingBatch:
        return replace(b, model_flops=extrapolate(a.model_flops, b.model_flops))

    calls = by_key({k: v[0] for k, v in few.collectives.items()}, {k: v[0] for k, v in more.collectives.items()})
    sizes = by_key({k: v[1] for k, v in few.collectives.items()}, {k: v[1] for k, v in more.collectives.items()})
    reads = by_key(dict(few.host_reads), dict(more.host_reads))
    return replace(
        more,
        parameters=extrapolate(few.parameters, more.parameters),
        layer_weights=extrapolate(few.layer_weights, more.layer_weights),
        kept=by_key(few.kept, more.kept),
        peaks={phase: peak(phase) for phase in more.peaks if phase in few.peaks},
        flops=by_key(few.flops, more.flops),
        collectives={key: (round(calls[key]), sizes[key]) for key in calls},
        host_reads={key: round(count) for key, count in reads.items()},
        training=batch(few.training, more.training),
        critic=None if few.critic is None or more.critic is None else batch(few.critic, more.critic),
        seconds=few.seconds + more.seconds,
    )
