"""Plans of optimizer steps: which rank computes which samples in which micro-batch.

Pure functions of lengths, constraints and a cost model, without torch:

    plan = plan_step(lengths, PlanConstraints(dp_size=8, max_tokens=16384))
    plan.micro_batches[dp_rank][k].samples

Invariants of every plan:

1. every sample is placed exactly once, or listed in `plan.dropped` with a reason;
2. every DP rank has the same number of micro-batches (K); where samples run short, fillers are added. With a
   context-parallel size per pack (`max_cp_size`), all ranks of a pack compute it at the same index;
3. with interleaving, K obeys Megatron's rule;
4. no micro-batch computes more than `max_tokens`, alignment included;
5. samples of one group share a micro-batch;

and, for `load_balance`:

6. without a pipeline, K is at most what first-fit-decreasing needs; with one, K has the smallest predicted makespan;
7. cost is balanced for the parallel layout: rank totals where ranks wait for each other once per step, and then each
   index; each index where ranks share experts or gather parameters layer by layer; the makespan of a pipeline. Without
   a pipeline, micro-batches of similar cost have equal indices;
8. arithmetic is integer and searches stop after a number of steps, so that two machines make equal plans.

With `pipeline_slices` packs are cut at rising multiples of the layout's alignment, and ranks that meet at every index
have equal numbers of slices there; with "auto" no step is predicted to be longer than that of whole packs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_batching.planning.batching_spec import BatchingSpec
from roll_batching.planning.constraints import ParallelDims, PlanConstraints
from roll_batching.planning.cost_model import (
    DEFAULT_COST,
    CostModel,
    FittedCost,
    FlopsCost,
    LinearQuadraticCost,
    fit_cost,
    quadratic_cost,
    token_cost,
)
from roll_batching.planning.partition import batch_balance, karmarkar_karp
from roll_batching.planning.plan import MicroBatch, Plan
from roll_batching.planning.plan_arrays import DroppedSample
from roll_batching.planning.planner import RolePlanner, plan_step
from roll_batching.planning.prefixes import SharedPrefixes
from roll_batching.planning.report import PlanReport

if TYPE_CHECKING:
    from roll_batching.planning.packers.bin_packing import pack_bins, packing_metrics

__all__ = [
    "DEFAULT_COST",
    "BatchingSpec",
    "CostModel",
    "DroppedSample",
    "FittedCost",
    "FlopsCost",
    "LinearQuadraticCost",
    "MicroBatch",
    "ParallelDims",
    "Plan",
    "PlanConstraints",
    "PlanReport",
    "RolePlanner",
    "SharedPrefixes",
    "batch_balance",
    "fit_cost",
    "karmarkar_karp",
    "pack_bins",
    "packing_metrics",
    "plan_step",
    "quadratic_cost",
    "token_cost",
]


def __getattr__(name: str) -> Any:
    """NeMo-RL's packers load when they are used: most plans need none of them."""
    if name in ("pack_bins", "packing_metrics"):
        from roll_batching.planning.packers import bin_packing

        return getattr(bin_packing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
