"""What a check found: per run the differences of loss, gradient and metrics, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from roll_batching.loss_check.scenarios import Outcome

TOLERANCE = 1e-4
"""Largest relative difference that is rounding, in fp32; measured: below 3e-6 for the package's losses."""
_ROUNDING = 5e-7
"""Largest absolute difference of loss and metrics that is rounding, in a run of the size 1: sums may cancel."""
EQUAL = "equal"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How a run differs from the first one: in loss, in gradient, and in each metric that changed."""

    changed: str
    """What the run changed."""
    loss: str = EQUAL
    gradient: str = EQUAL
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Difference of each metric that changed, as text, by name."""
    error: str | None = None
    """Why the run has no result."""
    hint: str = ""
    """What usually is the cause."""

    @property
    def ok(self) -> bool:
        """Whether nothing changed."""
        return self.error is None and self.loss == self.gradient == EQUAL and not self.metrics


@dataclass(frozen=True, kw_only=True)
class LossCheck:
    """The result of `check_loss`."""

    name: str
    """Name of the loss's class."""
    loss: float
    metrics: Mapping[str, float]
    gradient_norm: float
    """Loss, metrics and gradient norm of the first run."""
    rows: tuple[Comparison, ...]

    @property
    def ok(self) -> bool:
        """Whether every run has the loss, gradient and metrics of the first one, and these can be compared."""
        return not self.problems and all(row.ok for row in self.rows)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why a comparison with the first run proves nothing: numbers that are not finite, or no gradient."""
        numbers = {"the loss": self.loss, "the gradient norm": self.gradient_norm}
        numbers |= {f"the metric {name}": value for name, value in self.metrics.items()}
        problems = [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if self.gradient_norm == 0:
            problems.append("the gradient is 0, as with a loss that reads no output of the model or counts no token")
        return tuple(problems)

    @property
    def changes(self) -> tuple[str, ...]:
        """Names of runs whose change alters the loss, though it must not."""
        return tuple(row.changed for row in self.rows if not row.ok)

    def __str__(self) -> str:
        metrics = "".join(f", {name} {value:.6g}" for name, value in self.metrics.items())
        lines = [f"{self.name}: loss {self.loss:.6g}, gradient norm {self.gradient_norm:.6g}{metrics}", ""]
        lines += _table(self.rows)
        lines += [f"{row.changed}: {row.error}" for row in self.rows if row.error is not None]
        if self.ok:
            return "\n".join([*lines, "", "The loss is the same in every run."])
        if self.problems:
            lines += ["", f"The runs prove nothing: {'; '.join(self.problems)}. Mend the loss, or give other samples."]
        if not self.changes:
            return "\n".join(lines)
        hints = dict.fromkeys(f"- {row.changed}: usually {row.hint}" for row in self.rows if not row.ok and row.hint)
        return "\n".join([*lines, "", f"The loss depends on {len(self.changes)} of {len(self.rows)} changes.", *hints])


def _table(rows: Sequence[Comparison]) -> list[str]:
    cells = [("changed", "loss", "gradient", "metrics")]
    for row in rows:
        metrics = "; ".join(f"{name} {change}" for name, change in row.metrics.items()) or EQUAL
        cells.append((row.changed, *(("failed", "", "") if row.error else (row.loss, row.gradient, metrics))))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    table = ["  ".join((*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3])) for line in cells]
    return [line.rstrip() for line in table]


def compare(changed: str, hint: str, outcome: Outcome, first: Outcome) -> Comparison:
    """Compares the outcome of a run with the outcome of the first run."""
    if outcome.error is not None:
        return Comparison(changed=changed, error=outcome.error, hint="")
    assert outcome.metrics is not None and first.metrics is not None
    loss_scale = max(abs(first.loss), gradient_norm(first))
    scale = max(loss_scale, *map(abs, first.metrics.values()), 0.0)
    metrics = {}
    for name in [*first.metrics, *(name for name in outcome.metrics if name not in first.metrics)]:
        if name not in outcome.metrics or name not in first.metrics:
            metrics[name] = "missing" if name in first.metrics else "added"
        elif (change := _number(outcome.metrics[name], first.metrics[name], scale)) != EQUAL:
            metrics[name] = change
    return Comparison(
        changed=changed,
        loss=_number(outcome.loss, first.loss, loss_scale),
        gradient=_gradient(outcome, first),
        metrics=metrics,
        hint=hint,
    )


def _number(value: float, first: float, scale: float) -> str:
    """The text of a changed number; `scale` is the size of the first run's numbers."""
    if value == first or (math.isnan(value) and math.isnan(first)):
        return EQUAL
    rounding = _ROUNDING * min(scale, 1.0)
    if abs(value - first) <= max(TOLERANCE * abs(first), rounding):
        return EQUAL
    factor = _factor(value / first) if abs(first) > rounding else ""
    return f"{first:.6g} -> {value:.6g}{factor and f' ({factor})'}"


def _factor(ratio: float) -> str:
    """The text "x 2" or "x 1/2" for a ratio that is a small number or its inverse, else empty."""
    for number, form in ((ratio, "x {}"), (1 / ratio if ratio else 0.0, "x 1/{}")):
        if 1.5 < abs(number) < 64.5 and abs(number / round(number) - 1) < TOLERANCE:
            return form.format(round(number))
    return ""


def _gradient(outcome: Outcome, first: Outcome) -> str:
    """How the gradient differs from the first run's: `EQUAL`, a factor, or the largest difference of a weight."""
    assert outcome.gradients is not None and first.gradients is not None
    if not math.isfinite(gradient_norm(outcome) + gradient_norm(first)):
        return _number(gradient_norm(outcome), gradient_norm(first), 1.0)
    gaps = {
        name: float((outcome.gradients[name] - right).norm() / right.norm().clamp(min=1e-9 * gradient_norm(first)))
        for name, right in first.gradients.items()
        if bool(right.any()) or bool(outcome.gradients[name].any())
    }
    worst = max(gaps, key=lambda name: gaps[name] if gaps[name] == gaps[name] else math.inf, default=None)
    if worst is None or gaps[worst] <= TOLERANCE:
        return EQUAL
    a, b = (torch.cat([x.flatten() for x in run.gradients.values()]) for run in (outcome, first) if run.gradients)
    ratio = float(a @ b / (b @ b)) if bool(b.any()) else math.nan
    if float((a - ratio * b).norm() / a.norm().clamp(min=1e-30)) <= TOLERANCE:
        return _factor(ratio) or f"x {ratio:.4g}"
    return f"off by {gaps[worst]:.1%} ({worst})"


def gradient_norm(outcome: Outcome) -> float:
    """Norm over all gradients."""
    assert outcome.gradients is not None
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in outcome.gradients.values()))
