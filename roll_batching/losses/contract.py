"""The contract of a loss: an object that declares its inputs and returns a normalised scalar per micro-batch.

    class MyLoss:
        needs = {"log_probs"}     # or {"log_probs", "entropy"}, {"logits"}, or {"values"} of a critic
        masks = ("response_mask",)
        def token_loss(self, tokens: TokenView) -> LossOutput: ...

It has exactly one of these methods:

- `token_loss` gets the whole pack, flat (`TokenView`);
- `sequence_loss` gets one sequence with its logits (`SequenceView`). `gather_cp = True` requests whole sequences under
  context parallelism, `needs = {"logits"}` views without log-probs and entropies.

Optional:

- `candidates`: with "candidate_log_probs" in `needs`, the name of a next_token field [tokens, k] of token ids;
- `sums`: names of fields whose totals over the step the loss divides by;
- `rollouts = True`: the loss averages over rollouts, by the sample field `rollout_ids`;
- `check(batch, micro_batches)`: called before the step with this rank's samples on the host; its errors are raised on
  every rank;
- `prepare(local_batch, layout, seed)`: called on all ranks with this rank's samples of an RL step after their log-probs
  are computed; returns them with additional fields. May be collective.

The objectives of this package are such objects; so is a strategy subclass that defines one of the methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from roll_batching.errors import LossError
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import ROLLOUT_IDS

VALUES = "values"
"""The output of a model with a value head (a critic); other models do not compute it."""
CANDIDATES = "candidate_log_probs"
"""Log-probs of the tokens that a field names at each position."""
NEEDS = frozenset({"log_probs", "entropy", "logits", VALUES, CANDIDATES})


@dataclass(frozen=True)
class Sum:
    """A metric that adds up over micro-batches and data-parallel ranks."""

    value: torch.Tensor


@dataclass(frozen=True)
class Mean:
    """A metric that is the sum of numerators over the sum of denominators."""

    numerator: torch.Tensor
    denominator: torch.Tensor


@dataclass(frozen=True)
class Max:
    """A metric that is the largest value of the step."""

    value: torch.Tensor


@dataclass(frozen=True)
class Min:
    """A metric that is the smallest value of the step."""

    value: torch.Tensor


Metric = Sum | Mean | Max | Min


@dataclass(frozen=True)
class LossOutput:
    """A micro-batch's share of the loss, divided by counts over the whole step, and its metrics."""

    loss: torch.Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The checked declarations of a loss object."""

    needs: frozenset[str]
    masks: tuple[str, ...]
    sums: tuple[str, ...]
    candidates: str | None
    """Name of the field of token ids for `candidate_log_probs`."""
    by_sequence: bool
    gather_cp: bool
    check: Callable[[SampleBatch, Sequence[npt.NDArray[np.int64]]], None] | None
    """Called before the step with this rank's samples and the indices of each micro-batch."""
    prepare: Callable[[SampleBatch, Any, int], SampleBatch] | None
    """Called with this rank's samples of an RL step, its parallel layout, and a seed equal on all ranks."""
    name: str
    """Name of the loss's class."""
    heads: int = 0
    """Heads of multi-token prediction whose losses the step adds, over the tokens of the first mask."""
    rollouts: bool = False
    """Whether the loss averages over rollouts."""

    @property
    def prepare_hint(self) -> str:
        """End of an error about a missing field: says to call `prepare`, which may add it. Only jobs call it alone."""
        if self.prepare is None:
            return ""
        return (
            f". {self.name} has a `prepare`, which adds fields: in a loop of your own call "
            "local = loss.prepare(local, strategy.layout, seed) on all ranks before train_step, with one seed for all"
        )

    def require_prepared(self, batch: SampleBatch) -> None:
        """Raises `LossError` where the batch lacks a declared field and `prepare` may not have been called."""
        more = ([] if self.candidates is None else [self.candidates]) + [ROLLOUT_IDS] * self.rollouts
        names = (*self.masks, *self.sums, *more)
        missing = [name for name in names if name not in batch.schema]
        if missing and self.prepare is not None:
            raise LossError(f"the batch lacks {', '.join(missing)}, which {self.name} declares{self.prepare_hint}")

    @property
    def description(self) -> str:
        """The declarations as text, equal on ranks that run the same loss."""
        method = "sequence_loss" if self.by_sequence else "token_loss"
        counts = f"masks {self.masks}, sums {self.sums}" + (", by rollout" if self.rollouts else "")
        return f"{self.name}.{method} of {sorted(self.needs)}, {counts}"


def head_count(number: int) -> str:
    """The key of `StepCounts.tokens` under which the labels of head `number` (from 1 on) are counted."""
    return f"mtp_{number}"


def loss_spec(loss: Any, heads: int = 0) -> LossSpec:
    """Reads and checks a loss object's declarations. `heads` is the number of heads of the model that it trains.

    Raises `LossError` for a loss with none or both of the methods, and for invalid declarations.
    """
    if inspect.isclass(loss):
        raise LossError(f"loss is the class {loss.__name__}: pass an instance, {loss.__name__}(...)")
    name = type(loss).__name__
    methods = [m for m in ("token_loss", "sequence_loss") if callable(getattr(loss, m, None))]
    if len(methods) != 1:
        raise LossError(
            f"{name} defines {' and '.join(methods) or 'neither token_loss nor sequence_loss'}: a loss defines exactly "
            "one of token_loss (a whole pack at once) and sequence_loss (one sequence at a time)"
        )
    needs = getattr(loss, "needs", frozenset({"log_probs"}))
    if not _holds_names(needs) or not needs or not set(needs) <= NEEDS:
        raise LossError(f"{name}.needs is {needs!r}: give a non-empty subset of {sorted(NEEDS)}")
    if VALUES in needs and (len(needs) > 1 or methods[0] == "sequence_loss"):
        raise LossError(f"{name}.needs is {sorted(needs)}: a critic has values alone; give {{'values'}} and token_loss")
    candidates = getattr(loss, "candidates", None) if CANDIDATES in needs else None
    if CANDIDATES in needs and (not isinstance(candidates, str) or methods[0] == "sequence_loss"):
        raise LossError(f"{name} needs {CANDIDATES}: give token_loss, and `candidates`, the name of a field of ids")
    masks = getattr(loss, "masks", ("response_mask",))
    sums = getattr(loss, "sums", ())
    for attribute, value in (("masks", masks), ("sums", sums)):
        if not _holds_names(value):
            raise LossError(f"{name}.{attribute} is {value!r}: give a tuple of field names")
    if not masks:
        raise LossError(f"{name}.masks is empty: name at least one mask field")
    by_sequence = methods[0] == "sequence_loss"
    if by_sequence:
        needs = {"logits", *needs}
    return LossSpec(
        needs=frozenset(needs),
        masks=tuple(masks),
        sums=tuple(sums),
        candidates=candidates,
        by_sequence=by_sequence,
        gather_cp=bool(getattr(loss, "gather_cp", False)),
        check=getattr(loss, "check", None),
        prepare=getattr(loss, "prepare", None),
        name=name,
        heads=heads,
        rollouts=bool(getattr(loss, "rollouts", False)),
    )


def _holds_names(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str) and all(isinstance(x, str) for x in value)


# ---- metrics on the host


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
    # The first read of the device in a step.
    numbers = torch.stack([x.to(flat[0].device) for x in flat]).tolist()
    joined: dict[str, HostMetric] = {}
    start = len(losses)
    for name, kind, width in names:
        part = HostMetric(kind, tuple(numbers[start : start + width]))
        start += width
        if name in joined and joined[name].kind != kind:
            raise LossError(f"the metric {name!r} is a {joined[name].kind} and a {kind}: return one kind under a name")
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
