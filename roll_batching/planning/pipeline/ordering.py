"""Order of micro-batches with a small makespan under Megatron's pipeline schedules."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled, draw, next_random, seed_state
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.pipeline.schedule import StaticSchedule, group_size_of, static_schedule
from roll_batching.planning.search_budget import SEARCH_BUDGET

Shares = tuple[float, ...]
"""Cost of each model chunk, in the order of the layers, over the mean of all."""


def pipeline_makespan(
    costs: ArrayLike,
    *,
    stages: int,
    chunks: int = 1,
    group_size: int | None = None,
    shares: Shares | None = None,
) -> int:
    """Time from the first forward to the end of the last backward pass, in units of `costs` / chunks.

    `costs` (int[K]) is the forward time of each micro-batch on one stage, in the order of execution; backward
    takes twice as long; communication is free. Interleaving splits a stage's work evenly over `chunks`. With `shares`
    a chunk takes its share of that instead.
    """
    values = _as_costs(costs)
    return slowest_makespan(values[None], stages=stages, chunks=chunks, group_size=group_size, shares=shares)


def slowest_makespan(
    table: Ints, *, stages: int, chunks: int = 1, group_size: int | None = None, shares: Shares | None = None
) -> int:
    """Largest `pipeline_makespan` of several pipelines; `table` (int64[n, K]) has the costs of one per row."""
    schedule = static_schedule(stages, table.shape[1], chunks, group_size)
    return int(_slowest(times_of_chunks(table, shares), *_operations(schedule, shares)))


def block_maxima(costs: Ints, width: int) -> Ints:
    """Largest of each `width` ranks (int64[dp / width, K]) of costs by rank and index (int64[dp, K])."""
    maxima: Ints = costs.reshape(-1, width, costs.shape[1]).max(axis=1)
    return maxima


def step_cost(
    costs: Ints, constraints: PlanConstraints, shares: Shares | None, *, group_size: int | None = None
) -> int:
    """Cost of a step: that of the slowest block of ranks that meet. `costs` (int64[dp, K]) are of micro-batches.

    In a pipeline `slowest_makespan`, where `costs` are forward times; else the sum of the largest cost at each index.
    """
    maxima = block_maxima(costs, constraints.lockstep_ranks)
    if constraints.pp_size == 1:
        return int(maxima.sum(axis=1).max())
    group_size = group_size or group_size_of(costs.shape[1], constraints)
    stages, chunks = constraints.pp_size, constraints.vpp_size
    return slowest_makespan(maxima, stages=stages, chunks=chunks, group_size=group_size, shares=shares)


def times_of_chunks(costs: Ints, shares: Shares | None) -> Ints:
    """Forward times by model chunk, int64[..., chunks, K], of costs int64[..., K]; one row without `shares`."""
    rows = costs[..., None, :]
    if shares is not None:
        # An elementwise product of float64: equal on every machine.
        rows = np.rint(rows * np.asarray(shares, dtype=np.float64)[:, None]).astype(np.int64)
    return np.ascontiguousarray(rows)


def _operations(schedule: StaticSchedule, shares: Shares | None) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Columns of a schedule for the compiled functions; the second is the row of `times_of_chunks`."""
    row = np.zeros_like(schedule.chunk) if shares is None else schedule.chunk
    return schedule.micro_batch, row, schedule.backward, schedule.previous, schedule.awaited


def order_for_pipeline(
    costs: ArrayLike,
    *,
    stages: int,
    chunks: int = 1,
    group_size: int | None = None,
    seed: int = 0,
    tries: int = SEARCH_BUDGET.max_orders,
    start: Ints | None = None,
    shares: Shares | None = None,
) -> Ints:
    """An order of the micro-batches (int64[K], positions into `costs`) with a small makespan.

    Starts from `start` (default: `small_at_ends`) and is never worse. Tries all orders if there are at most `tries`
    (up to 8 micro-batches by default). Otherwise threshold accepting: swaps and moves, with a threshold for longer
    makespans that falls to zero. `shares` as for `pipeline_makespan`.
    """
    values = _as_costs(costs)
    start = small_at_ends(values) if start is None else start
    if len(values) < 2 or stages == 1:
        return start
    schedule = static_schedule(stages, len(values), chunks, group_size)
    tries = min(tries, SEARCH_BUDGET.max_order_operations // len(schedule.previous))
    # For thousands of micro-batches the factorial itself would take long.
    if len(values) <= SEARCH_BUDGET.max_permuted and math.factorial(len(values)) <= tries:
        return _try_all(times_of_chunks(values, shares), start, *_operations(schedule, shares))
    threshold = int(values.sum()) // (SEARCH_BUDGET.order_threshold_divisor * len(values))
    return _search_order(times_of_chunks(values, shares), start, *_operations(schedule, shares), tries, threshold, seed)


def order_of_indices(
    maxima: Ints,
    constraints: PlanConstraints,
    shares: Shares | None,
    *,
    tries: int = SEARCH_BUDGET.max_orders,
    start: Ints | None = None,
) -> Ints:
    """`order_for_pipeline` of the indices of a plan (int64[K]), given the largest cost at each."""
    return order_for_pipeline(
        maxima,
        stages=constraints.pp_size,
        chunks=constraints.vpp_size,
        group_size=group_size_of(len(maxima), constraints),
        seed=constraints.seed,
        tries=tries,
        start=start,
        shares=shares,
    )


def small_at_ends(costs: Ints) -> Ints:
    """Order of the micro-batches (int64[K]): cheap ones first and last, costly ones in the middle."""
    falling = np.argsort(-costs, kind="stable")
    return np.concatenate([falling[::2][::-1], falling[1::2]]).astype(np.int64)


def _as_costs(costs: ArrayLike) -> Ints:
    values = np.asarray(costs)
    if values.ndim != 1 or len(values) == 0 or values.dtype.kind not in "iu" or np.any(values < 0):
        kind = f"{values.dtype}{list(values.shape)}"
        raise PlanError(f"costs is {kind}: pass a 1-D array of at least one integer, none of them negative")
    return values.astype(np.int64)


@compiled
def makespan_in_order(
    times: Ints, order: Ints, micro_batch: Ints, row: Ints, backward: Ints, previous: Ints, awaited: Ints, end: Ints
) -> int:
    """Makespan of `times` in `order`; the schedule is that of `_operations`. `end` (int64[operations]) is scratch."""
    latest = 0
    for operation in range(len(previous)):
        begin = 0
        if previous[operation] >= 0:
            begin = end[previous[operation]]
        if awaited[operation] >= 0:
            begin = max(begin, end[awaited[operation]])
        end[operation] = begin + (times[row[operation], order[micro_batch[operation]]] << backward[operation])
        latest = max(latest, end[operation])
    return latest


@compiled
def _slowest(tables: Ints, micro_batch: Ints, row: Ints, backward: Ints, previous: Ints, awaited: Ints) -> int:
    order = np.arange(tables.shape[2])
    end = np.empty(len(previous), dtype=np.int64)
    latest = 0
    for number in range(len(tables)):
        latest = max(
            latest, makespan_in_order(tables[number], order, micro_batch, row, backward, previous, awaited, end)
        )
    return latest


@compiled
def _try_all(
    times: Ints, start: Ints, micro_batch: Ints, row: Ints, backward: Ints, previous: Ints, awaited: Ints
) -> Ints:
    """Best of all orders, in lexicographic sequence; `start` if none is better."""
    count = len(start)
    end = np.empty(len(previous), dtype=np.int64)
    best = start.copy()
    best_time = makespan_in_order(times, best, micro_batch, row, backward, previous, awaited, end)
    order = np.arange(count)
    while True:
        time = makespan_in_order(times, order, micro_batch, row, backward, previous, awaited, end)
        if time < best_time:
            best_time = time
            best[:] = order
        # Next permutation: increase the last position that can be increased, and sort the rest.
        pivot = count - 2
        while pivot >= 0 and order[pivot] > order[pivot + 1]:
            pivot -= 1
        if pivot < 0:
            return best
        larger = count - 1
        while order[larger] < order[pivot]:
            larger -= 1
        order[pivot], order[larger] = order[larger], order[pivot]
        order[pivot + 1 :] = order[pivot + 1 :][::-1].copy()


@compiled
def _search_order(
    times: Ints,
    start: Ints,
    micro_batch: Ints,
    row: Ints,
    backward: Ints,
    previous: Ints,
    awaited: Ints,
    tries: int,
    threshold: int,
    seed: int,
) -> Ints:
    """Best order found in `tries` swaps and moves; `threshold` is the first accepted increase of the makespan."""
    count = len(start)
    end = np.empty(len(previous), dtype=np.int64)
    order = start.copy()
    best = start.copy()
    current = makespan_in_order(times, order, micro_batch, row, backward, previous, awaited, end)
    best_time = current
    trial = order.copy()
    state = seed_state(seed)
    for attempt in range(tries):
        state = next_random(state)
        i = draw(state, count)
        kind = state % 3  # 0: a move, 1 and 2: a swap
        state = next_random(state)
        j = draw(state, count)
        if i == j:
            continue
        trial[:] = order
        if kind:
            trial[i], trial[j] = trial[j], trial[i]
        else:
            moved = trial[i]
            step = 1 if j > i else -1
            for place in range(i, j, step):
                trial[place] = trial[place + step]
            trial[j] = moved
        time = makespan_in_order(times, trial, micro_batch, row, backward, previous, awaited, end)
        if time - current <= threshold * (tries - attempt) // tries:
            current = time
            order[:] = trial
            if time < best_time:
                best_time = time
                best[:] = trial
    return best
