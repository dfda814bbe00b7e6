"""slime with our planner: the schedule of dynamic batches.

Importing this module replaces `build_dp_schedule`, in the actor where slime calls it; any option of slime's that names
a function by its path and is loaded there does so, such as
`--rollout-all-samples-process-path roll_batching.integrations.slime.keep_samples`. Without `--use-dynamic-batch-size`
slime's own schedule is used. Kept of slime: the samples of a rollout share a step, every rank has the same count, a
multiple of `microbatch_group_size_per_vp_stage` under VPP, no micro-batch is empty, a sample above the cap has a
separate micro-batch, trailing rollouts are left out.

Source: slime/utils/dp_schedule.py, slime/ray/rollout.py at 624b824a.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roll_batching.errors import PlanError
from roll_batching.integrations.host_plans import plan_level_totals
from roll_batching.integrations.replacement import Integration, Replacement
from roll_batching.planning import LinearQuadraticCost, PlanConstraints
from roll_batching.planning.cost_model import FIXED_TOKENS

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]
"""Of `build_dp_schedule`: samples by rank, indices into them by micro-batch, counts by step, rollouts by step."""


def build_dp_schedule(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Schedule:
    """The schedule of a rollout; arguments and result are slime's. Raises AssertionError where samples are too few."""
    if not args.use_dynamic_batch_size:
        original = _SLIME.original(_BUILD_DP_SCHEDULE)
        schedule: Schedule = original(
            args,
            train_parallel_config,
            total_lengths,
            global_batch_size=global_batch_size,
            rollout_indices=rollout_indices,
        )
        return schedule
    constraints = constraints_of(args, train_parallel_config)
    return plan_schedule(total_lengths, rollout_indices, global_batch_size, constraints, cost_of(args))


def constraints_of(args: Any, train_parallel_config: dict[str, int]) -> PlanConstraints:
    """The planner's rules for slime's settings."""
    sizes = train_parallel_config
    experts = getattr(args, "expert_model_parallel_size", None) or 1
    return PlanConstraints(
        dp_size=sizes["dp_size"],
        max_tokens=args.max_tokens_per_gpu * sizes["cp_size"],
        pp_size=getattr(args, "pipeline_model_parallel_size", 1),
        num_micro_batches_multiple=sizes["microbatch_group_size_per_vp_stage"] if sizes["vpp_size"] > 1 else 1,
        fillers=False,
        oversize="alone",
        # Experts are exchanged in every layer: ranks meet at every micro-batch, otherwise once per step.
        objective="lockstep" if experts > 1 else "auto",
    )


def cost_of(args: Any) -> LinearQuadraticCost:
    """Cost model of slime's own FLOPs of a sequence (`calculate_fwd_flops`), a polynomial of the second degree.

    The fixed cost of a micro-batch is ours: it decides the number of micro-batches in a pipeline.
    """
    from slime.utils.flops_utils import calculate_fwd_flops

    length = 1024
    flops, flops_of_double = (int(calculate_fwd_flops([size], args)) for size in (length, 2 * length))
    # f(n) = a n + b n^2, so f(2n) - 2 f(n) = 2 b n^2.
    quadratic = max(1, (flops_of_double - 2 * flops) // (2 * length**2))
    linear = (flops - quadratic * length**2) // length
    linear //= quadratic
    return LinearQuadraticCost(linear=linear, quadratic=1, fixed=linear * FIXED_TOKENS)


def plan_schedule(
    lengths: Sequence[int],
    rollout_indices: Sequence[int],
    global_batch_size: int,
    constraints: PlanConstraints,
    cost: LinearQuadraticCost,
) -> Schedule:
    """One plan per step of `global_batch_size` rollouts, in slime's form."""
    samples_of: dict[int, list[int]] = {}
    for sample, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(sample)
    rollouts = list(samples_of.values())
    steps = len(rollouts) // global_batch_size
    if steps < 1:
        raise AssertionError(f"num_rollouts ({len(rollouts)}) < global_batch_size ({global_batch_size})")
    partitions: list[list[int]] = [[] for _ in range(constraints.dp_size)]
    indices: list[list[list[int]]] = [[] for _ in range(constraints.dp_size)]
    counts = []
    for step in range(steps):
        of_step = rollouts[step * global_batch_size : (step + 1) * global_batch_size]
        samples = [sample for rollout in of_step for sample in rollout]
        try:
            plan = plan_level_totals([lengths[sample] for sample in samples], constraints, cost)
        except PlanError as error:
            raise AssertionError(f"step {step}, {len(samples)} samples: {error}") from None
        counts.append(plan.num_micro_batches)
        for rank, micro_batches in enumerate(plan.micro_batches):
            for micro_batch in micro_batches:
                first = len(partitions[rank])
                partitions[rank] += [samples[index] for index in micro_batch.samples]
                indices[rank].append(list(range(first, len(partitions[rank]))))
    return partitions, indices, counts, [global_batch_size] * steps


def keep_samples(args: Any, all_samples: Any, data_source: Any) -> None:
    """Does nothing, for `--rollout-all-samples-process-path`: naming it imports this module where slime plans."""


_BUILD_DP_SCHEDULE = Replacement(
    module="slime.utils.dp_schedule",
    name="build_dp_schedule",
    by=build_dp_schedule,
)

_SLIME = Integration("slime", _BUILD_DP_SCHEDULE, package="slime", distribution="slime", tried=("624b824a",))
patch, unpatch = _SLIME.patch, _SLIME.unpatch
patch()
