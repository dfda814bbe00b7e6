"""Report of a plan: tokens, fill of the cap, imbalance and gap to the lower bound."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.partition import lockstep_bound, rank_total_bound
from roll_batching.planning.pipeline.ordering import step_cost
from roll_batching.planning.plan_arrays import NANOSECONDS, PlanArrays


@dataclass(frozen=True)
class PlanReport:
    """Figures of a plan, and for comparison of the same samples padded."""

    samples: int
    """Samples placed."""
    real_tokens: int
    """Tokens of placed samples, after truncation."""
    computed_tokens: int
    """Tokens that all ranks compute, including alignment, tail filler and filler micro-batches."""
    shared_tokens: int
    """Tokens of placed samples that another sample of the micro-batch computes."""
    padding_tokens: int
    """Computed tokens that belong to no sample: alignment, tail filler and fillers."""
    padding_share: float
    """Padding / computed tokens, between 0 and 1."""
    tokens_before: int
    """Tokens of all samples padded to `padded_length`, or to the longest sample."""
    share_removed: float
    """1 - computed / before, the figure of ROLL's documentation; below 0 where a step has more fillers than that."""
    fill: float
    """Computed tokens / cap of all micro-batches, without fillers; 1.0 without a cap."""
    imbalance: float
    """Largest rank cost / mean - 1."""
    lockstep_imbalance: float
    """Sum over k of the largest cost at k / mean rank cost - 1."""
    objective: str
    """Cost that decides the time of a step: "rank_total", the costliest rank; "lockstep", the sum over k of the
    costliest rank of a block; "pipeline", the makespan of the slowest block, without communication and fixed cost."""
    lower_bound: float | None
    """No plan of these samples with this K has an objective below (1 + this) x the mean rank cost. The bound follows
    from costs, cap and K; it ignores groups, home ranks, and the warm-up and cool-down of a pipeline."""
    gap: float | None
    """Objective / its lower bound - 1."""
    num_micro_batches: int
    """K, the same on every rank; with a context-parallel size per pack, the largest number of a rank."""
    fillers: int
    """Micro-batches without a sample."""
    truncated: int
    """Truncated samples."""
    dropped: int
    """Dropped samples."""
    predicted_seconds: float | None
    """Predicted time of the step without the optimizer, where each pack has its own context-parallel size (then
    `lower_bound` and `gap` are None); None otherwise, and for plans from bins."""
    fixed_cp_size: int | None
    """The single context-parallel size whose step is predicted to be shortest; None as for `predicted_seconds`, and
    where no single size holds every group below the cap."""
    fixed_seconds: float | None
    """Predicted time of the step with `fixed_cp_size`."""

    def __post_init__(self) -> None:
        assert 0 <= self.padding_tokens <= self.computed_tokens, "a token is a sample's or padding, and computed once"

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def make_report(plan: PlanArrays) -> PlanReport:
    """Report of `plan`. Costs are those of samples, without the fixed cost of micro-batches."""
    constraints = plan.constraints
    real = int(plan.used[plan.samples].sum())
    computed, shared = int(plan.tokens.sum()), int(plan.shared.sum())
    padding = computed - (real - shared)
    width = constraints.padded_length or int(plan.lengths.max())
    before = -(-width // constraints.rectangle_alignment) * constraints.rectangle_alignment * len(plan.samples)
    capacity = int(plan.cp_sizes[~plan.fillers].sum()) // constraints.cp_size * (constraints.max_tokens or 0)
    costs = plan.by_rank(plan.costs)
    total = int(costs.sum())
    mean = total / constraints.dp_size if total else 1.0
    objective, value, bound = _objective(plan) if total and plan.blocks is None else (_meeting(constraints), 1, 1)
    predicted = plan.blocks if plan.blocks is not None and plan.blocks.step_time else None
    fixed = predicted if predicted is not None and predicted.fixed_step_time else None
    return PlanReport(
        samples=len(plan.samples),
        real_tokens=real,
        computed_tokens=computed,
        shared_tokens=shared,
        padding_tokens=padding,
        padding_share=padding / computed,
        tokens_before=before,
        share_removed=1 - computed / before,
        fill=int(plan.tokens[~plan.fillers].sum()) / capacity if capacity else 1.0,
        imbalance=int(costs.sum(axis=1).max()) / mean - 1 if total else 0.0,
        lockstep_imbalance=int(costs.max(axis=0).sum()) / mean - 1 if total else 0.0,
        objective=objective,
        lower_bound=None if plan.blocks is not None else bound / mean - 1,
        gap=None if plan.blocks is not None else value / bound - 1,
        num_micro_batches=plan.num_micro_batches,
        fillers=int(plan.fillers.sum()),
        truncated=int((plan.used[plan.samples] < plan.lengths[plan.samples]).sum()),
        dropped=len(plan.dropped),
        predicted_seconds=None if predicted is None else predicted.step_time / NANOSECONDS,
        fixed_cp_size=None if fixed is None else fixed.fixed_cp_size,
        fixed_seconds=None if fixed is None else fixed.fixed_step_time / NANOSECONDS,
    )


def step_time(plan: PlanArrays, fixed_cost: int) -> int:
    """Cost of the slowest block of ranks, in a pipeline its makespan; `fixed_cost` per micro-batch, or per slice."""
    if plan.slices is not None:
        from roll_batching.planning.pipeline.slices import sliced_time  # few plans have slices

        return sliced_time(plan, plan.slices, fixed_cost)
    costs = plan.costs.reshape(plan.constraints.dp_size, -1) + fixed_cost
    return step_cost(costs, plan.constraints, plan.chunk_shares, group_size=plan.group_size)


def _meeting(constraints: PlanConstraints) -> str:
    """Name of the objective of a layout."""
    if constraints.pp_size > 1:
        return "pipeline"
    return "rank_total" if constraints.lockstep_ranks == 1 else "lockstep"


class _Objective(NamedTuple):
    name: str
    value: int
    lower_bound: int


def _objective(plan: PlanArrays) -> _Objective:
    """The objective of a plan, without the fixed cost of micro-batches, and its lower bound."""
    constraints, count = plan.constraints, plan.num_micro_batches
    ranks, width = constraints.dp_size, constraints.lockstep_ranks
    sample_costs, slots = plan.sample_costs[plan.samples], plan.slots
    cap = constraints.usable_tokens if constraints.mode == "packed" else None
    limited = cap is not None and int(slots.max()) <= cap
    bound = rank_total_bound(sample_costs, slots, ranks, count * constraints.usable_tokens if limited else None)
    if width == ranks:
        bound = max(bound, lockstep_bound(sample_costs, slots, ranks, cap))
    value = step_time(plan, fixed_cost=0)
    if constraints.pp_size > 1:
        shares = plan.chunk_shares or (1.0,) * (constraints.pp_size * constraints.vpp_size)
        costliest = max(sum(shares[stage :: constraints.pp_size]) for stage in range(constraints.pp_size))
        value //= 3  # a makespan counts forward once and backward twice, a sample's cost once
        # The costliest stage bounds the pipeline: its share of the work over that of a mean stage.
        bound = int(bound * (costliest / constraints.vpp_size))
    return _Objective(_meeting(constraints), value, bound)
