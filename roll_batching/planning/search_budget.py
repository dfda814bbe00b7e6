"""Iteration counts, thresholds and tolerances of the planner's searches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SearchBudget:
    """How long each search of `load_balance` and of the pipeline order runs, and when it stops.

    Searches stop after a number of steps, never after a time, so that two machines find equal plans. A tolerance of
    1/n is the integer n: costs are integers, and so are all comparisons. A step exchanges two units (samples, or groups
    of samples that stay together) or two packs.
    """

    # Threshold accepting: a step that makes the objective worse is accepted up to a threshold, which falls to zero.
    steps_per_threshold: int = 64
    """Steps with one threshold. Larger values save time per step; the threshold falls in fewer stages."""
    totals_threshold_divisors: tuple[int, ...] = (16, 4)
    """Rank totals: the first threshold is 1/n of the gap to the lower bound. The seed chooses between these n."""
    lockstep_threshold_divisor: int = 64
    """Lockstep cost: the first threshold is 1/(this + K x `lockstep_threshold_per_index`) of the gap."""
    lockstep_threshold_per_index: int = 8
    """One step changes one or two of the K indices, so the threshold is divided by a multiple of K."""
    totals_pack_steps: int = 8
    """Rank totals: of `steps_per_threshold`, steps that exchange whole packs."""
    lockstep_pack_steps: int = 4
    """Lockstep cost: of `steps_per_threshold`, steps that exchange whole packs."""
    empty_units_per_pack: int = 2
    """Units of size 0 added to each pack. Exchanging a unit with an empty one moves it to another pack."""

    # Steps of one search.
    steps_per_unit: int = 300
    """Steps per unit."""
    max_steps: int = 300_000
    """Most steps by `steps_per_unit`."""
    few_units: int = 256
    """With fewer units, steps per unit fall in proportion. Up to this many units, results may be refined again."""
    long_steps_per_unit: int = 75
    """Steps per unit where the search lowers the objective itself; counts where it gives more than `max_steps`."""
    long_max_steps: int = 600_000
    """Most steps by `long_steps_per_unit`."""
    lockstep_factor: int = 2
    """Multiplies the long budget where lockstep cost is the only objective: each index is lowered by itself."""
    full_budget_ranks: int = 192
    """With more data-parallel ranks, steps fall in proportion, because each step compares more packs."""

    # Repeating a search with the next seed.
    max_rounds: int = 8
    """Most repetitions of one search."""
    max_steps_of_rounds: int = 600_000
    """Most steps of all repetitions."""
    totals_gap: int = 500
    """Repeat while the largest rank total is more than 1/n above its lower bound."""
    lockstep_gap: int = 50
    """Repeat while the lockstep cost is more than 1/n above its lower bound."""
    progress: int = 50
    """A repetition makes progress if it closes more than 1/n of the gap."""
    patience: int = 2
    """Stop after this many repetitions in a row without progress."""
    start_gap: int = 50
    """Search from the next initial placement while the objective is more than 1/n above its lower bound."""

    # Refinement: the best one or two exchanges between two ranks or packs, found by sorting.
    refine_gap: int = 1_000
    """Refine where the objective is at most 1/n above its lower bound; further away the search does more."""
    refine_max_ranks: int = 8
    """Refine rank totals of at most this many ranks. With more, two of them change the largest total little."""
    refine_max_packs: int = 64
    """Refine the lockstep cost of at most this many packs. The costs of many packs are level without it."""
    refine_max_exchanges: int = 8_192
    """Exchanges compared at once: each unit of the costlier side with its neighbours in size."""
    refine_partners: int = 8
    """Packs that the costliest pack of an index tries to exchange with."""
    refine_totals_rounds: int = 12
    """Most rounds for rank totals."""
    refine_lockstep_rounds: int = 40
    """Most rounds for the lockstep cost."""
    refine_attempts: int = 4
    """Search and refine again up to this many times, for `few_units` and `refine_attempts_ranks`."""
    refine_attempts_ranks: int = 4
    """Most data-parallel ranks for which `refine_attempts` is above 1."""

    # Trade-offs between rank totals and lockstep cost.
    ceiling_margin: int = 4_000
    """Levelling rank totals may raise the largest cost of an index by 1/n."""
    refine_ceiling_margin: int = 256
    """Refining rank totals may raise the largest cost of an index by 1/n."""
    falling_margin: int = 64
    """Levelling rank totals may raise the largest cost of an index by 1/n after a search for lockstep cost."""
    lockstep_loss: int = 50
    """Where level totals leave the lockstep cost more than 1/n above its bound, a second search lowers that first."""
    lockstep_prospect: int = 4
    """The second search goes beyond `falling_margin` if its lockstep loss was below 1/n of the first one's."""
    rank_tolerance: int = 100_000
    """Rank totals are level when none is more than 1/n above the mean."""
    rank_weight: int = 8
    """Weight of cost above the mean, against 1 for lockstep cost, to choose a start when ranks meet once per step."""
    pipeline_allowance: int = 8
    """In a pipeline, rank totals may exceed their mean by 1/(n + dp_size // 8) of the lockstep loss."""

    # Initial placements.
    overflow_steps: int = 200_000
    """Steps that bring an initial placement with fewer packs than first-fit-decreasing below the cap."""
    level_comparisons: int = 4_000_000
    """Comparisons made to level the totals of ranks that exchange packs at one index."""
    level_all_ranks_cells: int = 65_536
    """With more cells (ranks x K), the costliest rank is compared with the cheapest rank only."""

    # Number of micro-batches in a pipeline.
    counts_tried: int = 12
    """Values of K, in equal ratios, that a pipeline compares first."""
    counts_nearby: int = 2
    """How far around the best of them K is varied."""
    counts_finalists: int = 3
    """Values of K that get the full search."""
    count_steps_divisor: int = 16
    """Comparing values of K takes 1/n of a search's steps."""
    count_orders: int = 3_000
    """Orders of micro-batches tried per value of K that is compared."""

    # Order of micro-batches in a pipeline.
    max_orders: int = 60_000
    """Most orders tried."""
    max_order_operations: int = 20_000_000
    """Most forward and backward passes simulated over all orders."""
    max_permuted: int = 11
    """All orders are counted, and tried if `max_orders` allows, for at most this many micro-batches."""
    order_threshold_divisor: int = 4
    """The first threshold is 1/n of the mean cost of a micro-batch."""


SEARCH_BUDGET = SearchBudget()
