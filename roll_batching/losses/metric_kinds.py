"""Metrics of a step: kept on the device, read once, joined over micro-batches, ranks and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from roll_batching.errors import LossError
from roll_batching.losses.contract import Max, Mean, Metric, Min, Sum

Kind = Literal["sum", "mean", "max", "min"]
_KINDS: dict[type, Kind] = {Sum: "sum", Mean: "mean", Max: "max", Min: "min"}


@dataclass(frozen=True)
class HostMetric:
    """A metric on the host: its kind, and its number; for a mean, numerator and denominator."""

    kind: Kind
    values: tuple[float, ...]

    def join(self, other: HostMetric) -> HostMetric:
        """The metric over both parts."""
        pairs = zip(self.values, other.values, strict=True)
        if self.kind == "max":
            return HostMetric(self.kind, tuple(max(a, b) for a, b in pairs))
        if self.kind == "min":
            return HostMetric(self.kind, tuple(min(a, b) for a, b in pairs))
        return HostMetric(self.kind, tuple(a + b for a, b in pairs))

    def result(self) -> float:
        """The reported number; 0 for a mean with denominator 0."""
        if self.kind != "mean":
            return self.values[0]
        numerator, denominator = self.values
        return numerator / denominator if denominator else 0.0


def metric_tensors(metric: Metric) -> tuple[torch.Tensor, ...]:
    """The tensors of a metric: numerator and denominator of a mean, else its value."""
    return (metric.numerator, metric.denominator) if isinstance(metric, Mean) else (metric.value,)


def to_host(
    losses: Sequence[torch.Tensor], metrics: Iterable[Mapping[str, Metric]]
) -> tuple[list[float], dict[str, HostMetric]]:
    """(loss per micro-batch, metrics joined over micro-batches), with a single device read.

    Raises `LossError` if a metric has different kinds in different micro-batches.
    """
    flat: list[torch.Tensor] = [loss.double().reshape(()) for loss in losses]
    names: list[tuple[str, Kind, int]] = []
    for micro_batch in metrics:
        for name, metric in micro_batch.items():
            parts = [torch.as_tensor(part).detach().double().reshape(()) for part in metric_tensors(metric)]
            names.append((name, _KINDS[type(metric)], len(parts)))
            flat.extend(parts)
    if not flat:
        return [], {}
    numbers = torch.stack([x.to(flat[0].device) for x in flat]).tolist()
    joined: dict[str, HostMetric] = {}
    at = len(losses)
    for name, kind, width in names:
        part = HostMetric(kind, tuple(numbers[at : at + width]))
        at += width
        if name in joined and joined[name].kind != kind:
            raise LossError(f"the metric {name!r} is a {joined[name].kind} in one micro-batch and a {kind} in another")
        joined[name] = joined[name].join(part) if name in joined else part
    return numbers[: len(losses)], joined


def join_parts(parts: Iterable[Mapping[str, HostMetric]]) -> dict[str, HostMetric]:
    """Metrics joined over `parts` (micro-batches, ranks or optimizer steps); a part may lack some.

    Raises `LossError` if a metric has different kinds in different parts.
    """
    joined: dict[str, HostMetric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in joined and joined[name].kind != metric.kind:
                raise LossError(
                    f"the metric {name!r} is a {joined[name].kind} in one part and a {metric.kind} in another: use "
                    "one name per kind"
                )
            joined[name] = joined[name].join(metric) if name in joined else metric
    return joined


def as_numbers(joined: Mapping[str, HostMetric]) -> dict[str, float]:
    """The reported number of each metric."""
    return {name: metric.result() for name, metric in joined.items()}
