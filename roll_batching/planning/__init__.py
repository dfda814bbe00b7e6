"""Who computes what, when: pure functions of lengths, constraints and a cost model. Needs no torch.

    plan = plan_step(lengths, PlanConstraints(dp_size=8, max_tokens=16384))
    plan.micro_batches[dp_rank][k].samples

Invariants of every plan:

1. every sample is placed exactly once, or listed in `plan.dropped` with its reason;
2. every DP rank has the same number of micro-batches, none of them empty: fillers take the place;
3. with interleaving that number obeys Megatron's rule;
4. no micro-batch computes more than `max_tokens`, alignment included;
5. samples of one group share a micro-batch;

and, for `load_balance`:

6. without a pipeline there are at most as many micro-batches as first-fit-decreasing needs; with one, their
   number has the smallest predicted makespan;
7. cost is balanced for what the layout waits for: rank totals where ranks meet once per step (and then every
   index), every index where they share experts or gather parameters layer by layer, the pipeline's makespan;
   without a pipeline equal costs meet at equal indices;
8. arithmetic is integer and searches have iteration budgets: two machines never disagree.
"""

from roll_batching.planning.batching_spec import BatchingSpec
from roll_batching.planning.constraints import PlanConstraints
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
from roll_batching.planning.packers.bin_packing import pack_bins, packing_metrics
from roll_batching.planning.parallel_dims import ParallelDims
from roll_batching.planning.partition import batch_balance, karmarkar_karp
from roll_batching.planning.plan import MicroBatch, Plan
from roll_batching.planning.plan_arrays import DroppedSample
from roll_batching.planning.planner import plan_step
from roll_batching.planning.report import PlanReport
from roll_batching.planning.role_planner import RolePlanner

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
    "batch_balance",
    "fit_cost",
    "karmarkar_karp",
    "pack_bins",
    "packing_metrics",
    "plan_step",
    "quadratic_cost",
    "token_cost",
]
