"""`plan_step`: a plan from lengths, for all algorithms.

1. Check the arguments and form units (`build_problem`).
2. Pool the units that may share micro-batches; the algorithm forms the bins of each pool.
3. Raise the number of bins to a legal one, and assign them to ranks and indices.
4. Assemble and check the plan.

"load_balance" does steps 2 and 3 itself, because it balances number and placement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, kind_of
from roll_batching.planning.assemble import assemble, assemble_blocks
from roll_batching.planning.batching_spec import load_algorithm
from roll_batching.planning.compiled import compiled_once
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.cost_model import DEFAULT_COST, CostModel, scaled_costs
from roll_batching.planning.invariants import check_plan
from roll_batching.planning.partition import batch_balance
from roll_batching.planning.pipeline.schedule import legal_count
from roll_batching.planning.placement import (
    Placement,
    PositionPool,
    align_costs,
    order_in_pipeline,
    pools_of_units,
    raise_count,
    spread_fillers,
)
from roll_batching.planning.plan import Plan
from roll_batching.planning.plan_arrays import PlanArrays
from roll_batching.planning.prefixes import SharedPrefixes, part_sizes
from roll_batching.planning.problem import PlanProblem, build_problem
from roll_batching.planning.registry import Algorithm, algorithm_of
from roll_batching.planning.report import step_time

if TYPE_CHECKING:
    from roll_batching.planning.pack_times import PackTimes


B = TypeVar("B", bound=Sized)

LEVEL = 1000
"""A plan within 1/1000 of the mean cost of a rank is level: smaller parts are not tried."""
UNREACHED = 1 << 62
"""More than any step costs."""


def plan_step(
    lengths: ArrayLike,
    constraints: PlanConstraints,
    *,
    cost: Any = None,
    ids: ArrayLike | None = None,
    group_ids: ArrayLike | None = None,
    home_rank: ArrayLike | None = None,
    location: ArrayLike | None = None,
    prefixes: SharedPrefixes | None = None,
    times: PackTimes | None = None,
) -> Plan:
    """Plan one optimizer step (or one forward pass) over `lengths`.

    Args:
        lengths: int[n], tokens of each sample, at least 1.
        constraints: parallel layout, cap and algorithm.
        cost: a cost model (`CostModel`); None: `DEFAULT_COST`.
        ids: int[n], unique global ids; None: 0 to n - 1.
        group_ids: int[n]; samples with equal values share one micro-batch.
        home_rank: int[n], the DP rank where each sample stays; None: any rank.
        location: int[n], the DP rank that holds the data of each sample; not used for planning.
        prefixes: what the samples share; samples of one micro-batch compute it once. None: nothing is shared.
        times: predicted times of packs, by which `max_cp_size` > 1 chooses their context-parallel sizes.

    Equal arguments give equal plans on every machine. Raises `PlanError` when no valid plan exists.
    """
    arrays: dict[str, Any] = {"ids": ids, "group_ids": group_ids, "home_rank": home_rank, "location": location}
    price = DEFAULT_COST if cost is None else cost

    def problem(largest_part: int | None = None) -> PlanProblem:
        return build_problem(lengths, constraints, cost=price, prefixes=prefixes, largest_part=largest_part, **arrays)

    is_checked = isinstance(constraints, PlanConstraints)  # `build_problem` says what others are
    if is_checked and constraints.has_cp_per_pack:
        from roll_batching.planning.dynamic_cp.planner import place_blocks  # only such plans need the search

        checked = problem()
        pack_times = _times_of(checked, times)
        with compiled_once(_kind(checked)):
            packs = place_blocks(checked, pack_times)
        return Plan.of(assemble_blocks(checked, *packs))
    has_trees = prefixes is not None and group_ids is None

    def whole_packs() -> PlanArrays:
        return _plan_trees(problem) if has_trees else _plan(problem())

    if not is_checked or not constraints.cuts_packs:
        return Plan.of(whole_packs())
    given, constraints = constraints, constraints.without_slices
    plan = whole_packs()
    constraints = replace(constraints, pp_size=1)
    few = whole_packs()
    constraints = given
    plans = [replace(one, constraints=given, chunk_shares=plan.chunk_shares) for one in (plan, few)]
    return Plan.of(_sliced(plans, problem(), price))


def cut_packs(plan: Plan, constraints: PlanConstraints, cost: CostModel) -> Plan:
    """The plan of whole packs with slices as `constraints` ask for, else its own; `cost` as for `plan_step`."""
    if not constraints.cuts_packs:
        return plan
    cut = replace(plan, constraints=constraints)
    return Plan.of(_sliced((cut,), build_problem(plan.lengths, constraints, cost=cost), cost))


def _sliced(plans: Sequence[PlanArrays], problem: PlanProblem, cost: CostModel) -> PlanArrays:
    """The fastest of plans of whole packs whose packs are cut into slices, checked.

    The first plan has packs for the schedule of whole packs, the second the fewest, which slices divide.
    """
    from roll_batching.planning.pipeline.slices import SLICE_COUNTS, SliceCosts, best_slices  # few plans have some

    constraints, smallest = problem.constraints, 1
    numbers: Sequence[int] = SLICE_COUNTS
    if constraints.pipeline_slices == "auto":
        smallest = constraints.smallest_slice * constraints.cp_size
    else:
        numbers = (constraints.pipeline_slices,)
    costs = SliceCosts(
        of_lengths=lambda lengths: scaled_costs(lengths, cost, problem.shift),
        fixed=problem.fixed_cost,
        exchange=getattr(cost, "exchange", 0) / (1 << problem.shift),
    )
    with compiled_once("slices"):
        plan = best_slices(plans, numbers, smallest, costs)
    check_plan(plan)
    return plan


def plan_single_sizes(
    lengths: ArrayLike, constraints: PlanConstraints, *, times: PackTimes, prefixes: SharedPrefixes | None = None
) -> dict[int, Plan]:
    """Plans of a step whose packs all have one context-parallel size: by size, those that hold every sample.

    `plan_step` compares a size per pack with them. They have its form, so `report.predicted_seconds` are comparable.
    Raises `PlanError` as `plan_step` does.
    """
    from roll_batching.planning.dynamic_cp.planner import place_single_sizes

    problem = build_problem(lengths, constraints, cost=DEFAULT_COST, prefixes=prefixes)
    checked = _times_of(problem, times)
    with compiled_once(_kind(problem)):
        packs_by_size = place_single_sizes(problem, checked)
    return {size: Plan.of(assemble_blocks(problem, *packs)) for size, packs in packs_by_size.items()}


def _times_of(problem: PlanProblem, times: PackTimes | None) -> PackTimes:
    """`times`; raises `PlanError` if they are none, or of another layout."""
    from roll_batching.planning.pack_times import PackTimes

    if not isinstance(times, PackTimes):
        raise PlanError(
            f"max_cp_size={problem.constraints.max_cp_size} chooses sizes by predicted times of packs, and times is "
            f"{kind_of(times)}: pass PackTimes.of_model(FlopsCost.from_model(...), ...)"
        )
    times.require_layout(problem.constraints)
    return times


def _plan(problem: PlanProblem) -> PlanArrays:
    """Checked arrays of a plan by the algorithm of the constraints."""
    constraints = problem.constraints
    algorithm = algorithm_of(constraints.mode, constraints.algorithm)
    form = load_algorithm(constraints)
    with compiled_once(_kind(problem)):
        placement = form(problem) if algorithm.forms == "placement" else _place(problem, algorithm, form)
    return assemble(problem, placement)


def _plan_trees(cut: Callable[[int | None], PlanProblem]) -> PlanArrays:
    """The fastest plan of trees as large as the cap allows, and of smaller parts of them.

    `cut` makes the problem of parts with a cost of at most its argument. Smaller parts level ranks better, occupy more
    micro-batches where fillers are not allowed, and repeat more. Single samples repeat nothing only where they meet by
    chance, but bound the result: no plan is slower than the one of the same units without sharing.
    """
    problem = cut(None)
    assert problem.prefixes is not None
    ranks, fixed, trees = problem.constraints.dp_size, problem.fixed_cost, problem.units
    best, time = _plan_if_filled(problem)
    mean = int(trees.costs.sum()) // ranks
    mean_unshared = int(problem.prefixes.cost(problem.used[trees.samples]).sum()) // ranks
    tried = {len(trees)}
    for part in part_sizes(trees.costs, mean):
        fixed_costs = fixed * best.num_micro_batches if best is not None else 0
        if time <= mean + mean // LEVEL + fixed_costs:
            break
        smaller = cut(part)
        if len(smaller.units) not in tried and int(smaller.units.costs.sum()) // ranks + fixed_costs < time:
            tried.add(len(smaller.units))
            candidate, candidate_time = _plan_if_filled(smaller)
            if candidate_time < time:
                best, time = candidate, candidate_time
    if time > mean_unshared and len(trees.samples) not in tried:
        candidate, candidate_time = _plan_if_filled(cut(0))
        best = candidate if candidate_time < time else best
    return _plan(cut(0)) if best is None else best


def _plan_if_filled(problem: PlanProblem) -> tuple[PlanArrays | None, int]:
    """A plan and its step time, or None if micro-batches stay empty and fillers are not allowed."""
    try:
        arrays = _plan(problem)
    except PlanError:
        if problem.constraints.fillers:
            raise
        return None, UNREACHED
    return arrays, step_time(arrays, problem.fixed_cost)


def _kind(problem: PlanProblem) -> str:
    """Name shared by plans that run the same compiled functions."""
    constraints = problem.constraints
    width = constraints.lockstep_ranks
    blocks = "all" if width == constraints.dp_size else "one" if width == 1 else "some"
    home = "home" if problem.has_home_ranks else "anywhere"
    return f"{constraints.mode} {constraints.algorithm} {constraints.pp_size > 1} {blocks} {home}"


def _place(problem: PlanProblem, algorithm: Algorithm, form: Any) -> Placement:
    """Placement for an algorithm that forms bins or an order."""
    constraints = problem.constraints
    if algorithm.forms == "order":
        positions = PositionPool(problem, form, in_blocks=algorithm.keeps_order)
        (cuts,), _ = _form_bins([positions], constraints)
        return positions.place(cuts)
    parts, count = _form_bins(pools_of_units(problem, form, keeps_order=algorithm.keeps_order), constraints)
    bins = [members for part in parts for members in part]
    if not algorithm.keeps_order:
        bins = align_costs(bins, problem.units, constraints, has_home_ranks=problem.has_home_ranks)
        if constraints.pp_size > 1:
            bins = order_in_pipeline(bins, problem)
    elif not problem.has_home_ranks:
        bins = spread_fillers(bins, constraints.dp_size)
    return Placement.of_bins(bins, count)


class _Pool(Protocol[B]):
    """Members that may share micro-batches: `UnitPool` or `PositionPool`."""

    @property
    def ranks(self) -> int: ...
    def form(self) -> list[B]: ...
    def weight(self, members: B, /) -> int: ...
    def split(self, members: B, /) -> tuple[B, B]: ...
    def filler(self) -> B: ...


def _form_bins(pools: Sequence[_Pool[B]], constraints: PlanConstraints) -> tuple[list[list[B]], int]:
    """Micro-batches of each pool, raised to the smallest legal number per rank, and that number."""
    formed = [pool.form() for pool in pools]
    needed = max(-(-len(bins) // pool.ranks) for pool, bins in zip(pools, formed, strict=True))
    count = legal_count(needed, constraints)
    raised = [
        raise_count(bins, count * pool.ranks, pool.weight, pool.split, pool.filler)
        for pool, bins in zip(pools, formed, strict=True)
    ]
    return raised, count


# ---- steps of one role


SMALLEST_SAVING = 0.05
"""Share of the tokens below which "auto" shares nothing: more runs of keys and uneven parts cost about as much."""


class Table(Protocol):
    """Ids, lengths and locations of samples, such as `samples.LengthTable`."""

    @property
    def ids(self) -> Ints:
        """int64 `[n]`: global ids."""
        ...

    @property
    def lengths(self) -> Ints:
        """int64 `[n]`: tokens per sample."""
        ...

    @property
    def location(self) -> Ints:
        """int64 `[n]`: DP rank that holds each sample."""
        ...

    @property
    def prefixes(self) -> SharedPrefixes | None:
        """Prefixes that the samples share, or None."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolePlanner:
    """Planner with the settings of a role and the cost model of its model; can be pickled."""

    train: PlanConstraints
    """Constraints of passes with gradients."""
    infer: PlanConstraints
    """Constraints of passes without gradients."""
    cost: CostModel
    share_prefixes: bool | Literal["auto"] = False
    """Whether packs share the prefixes that the table names; "auto": where that saves at least 5% of the tokens."""
    times: PackTimes | None = None
    """Predicted times of packs, for constraints with a context-parallel size per pack."""

    def plan(self, table: Table, *, forward: bool = False, group_ids: Any = None, home_rank: Any = None) -> Plan:
        """Plan the samples of `table`; `forward`: for a pass without gradients. See `plan_step`.

        Raises `PlanError` if `table` is not a length table.
        """
        constraints, lengths, prefixes = self.infer if forward else self.train, _checked(table).lengths, None
        if self.share_prefixes and constraints.mode == "packed" and (shared := table.prefixes) is not None:
            pays = int(shared.shared.sum()) >= SMALLEST_SAVING * int(lengths.sum())
            prefixes = shared if pays or self.share_prefixes is True else None
        return plan_step(
            lengths,
            constraints,
            cost=self.cost,
            ids=table.ids,
            group_ids=group_ids,
            home_rank=home_rank,
            location=table.location,
            prefixes=prefixes,
            times=self.times,
        )

    def balanced_homes(self, table: Table) -> Ints:
        """`home_rank` for `plan`, as in ROLL: see `batch_balance`."""
        return batch_balance(_checked(table).lengths, self.train.dp_size, cost=self.cost)


def _checked(table: Table) -> Table:
    """`table`; raises `PlanError` if it is not a length table."""
    if not all(hasattr(table, name) for name in ("ids", "lengths", "location", "prefixes")):
        raise PlanError(f"table is a {type(table).__name__}: pass a LengthTable, as gather_lengths(batch) returns it")
    return table
