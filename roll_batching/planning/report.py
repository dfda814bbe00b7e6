"""The figures of one plan, from its flat arrays."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from roll_batching.planning.plan_arrays import PlanArrays


@dataclass(frozen=True)
class PlanReport:
    """What a plan costs, beside the same samples padded."""

    samples: int
    """Samples placed."""
    real_tokens: int
    """Tokens of placed samples, as used."""
    computed_tokens: int
    """Tokens that all ranks compute: alignment, tail fillers, filler micro-batches included."""
    padding_share: float
    """1 - real / computed."""
    tokens_before: int
    """All samples padded: to `padded_length` where given, else to the longest one."""
    share_removed: float
    """1 - computed / before: what the ROLL document reports."""
    fill: float
    """Computed tokens / what all micro-batches (fillers left out) could hold; 1.0 without a cap."""
    imbalance: float
    """Largest rank cost / mean - 1."""
    lockstep_imbalance: float
    """Sum over k of the largest cost at k / mean rank cost - 1."""
    num_micro_batches: int
    """K, the same on every rank."""
    fillers: int
    """Micro-batches without a sample."""
    truncated: int
    dropped: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def make_report(plan: PlanArrays) -> PlanReport:
    """Compute the report of `plan`. Costs are the samples' own, without the fixed part of a micro-batch."""
    constraints = plan.constraints
    real = int(plan.used[plan.samples].sum())
    computed = int(plan.tokens.sum())
    width = constraints.padded_length or int(plan.lengths.max())
    before = -(-width // constraints.rectangle_alignment) * constraints.rectangle_alignment * len(plan.samples)
    used_micro_batches = int(len(plan.tokens) - plan.fillers.sum())
    capacity = used_micro_batches * (constraints.max_tokens or 0)
    costs = plan.costs.reshape(constraints.dp_size, plan.num_micro_batches)
    total = int(costs.sum())
    mean = total / constraints.dp_size if total else 1.0
    return PlanReport(
        samples=len(plan.samples),
        real_tokens=real,
        computed_tokens=computed,
        padding_share=1 - real / computed,
        tokens_before=before,
        share_removed=1 - computed / before,
        fill=int(plan.tokens[~plan.fillers].sum()) / capacity if capacity else 1.0,
        imbalance=int(costs.sum(axis=1).max()) / mean - 1 if total else 0.0,
        lockstep_imbalance=int(costs.max(axis=0).sum()) / mean - 1 if total else 0.0,
        num_micro_batches=plan.num_micro_batches,
        fillers=int(plan.fillers.sum()),
        truncated=int((plan.used[plan.samples] < plan.lengths[plan.samples]).sum()),
        dropped=len(plan.dropped),
    )
