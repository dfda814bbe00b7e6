"""Modes "dynamic" and "padded": micro-batches as rectangles of equal rows."""

from __future__ import annotations

import bisect
from collections import deque

import numpy as np
from numpy.typing import NDArray

from roll_batching.errors import PlanError
from roll_batching.planning.arrange import (
    Bin,
    bin_cost,
    home_groups,
    lockstep_groups,
    raise_count,
    split_in_two,
)
from roll_batching.planning.assemble import assemble_units
from roll_batching.planning.bins import group_by_bin
from roll_batching.planning.compiled import compiled
from roll_batching.planning.counts import legal_count
from roll_batching.planning.inputs import Ints, PlanInputs, Units
from roll_batching.planning.plan import Plan

Row = list[list[int]]
"""One shared index: for every rank, the units that it computes there."""


def plan_rectangles(inputs: PlanInputs) -> Plan:
    """A plan of rectangles by the constraints' algorithm."""
    if inputs.constraints.algorithm in ("prefer_closest", "prefer_first"):
        return _plan_from_pool(inputs)
    return _plan_by_shared_index(inputs)


def _limits(inputs: PlanInputs) -> tuple[int | None, int | None]:
    """(cap in tokens, rows), each None where there is none."""
    constraints = inputs.constraints
    cap = constraints.usable_tokens if constraints.max_tokens is not None else None
    return cap, constraints.rows


def _width(inputs: PlanInputs, longest: int) -> int:
    """Row length of a rectangle whose longest aligned row is `longest`."""
    constraints = inputs.constraints
    if constraints.row_limit is None:
        return longest
    alignment = constraints.rectangle_alignment
    return max(longest, -(-constraints.row_limit // alignment) * alignment)


def _plan_by_shared_index(inputs: PlanInputs) -> Plan:
    """ROLL, NeMo-RL and plain padding: all ranks cut their rows at the same positions."""
    constraints = inputs.constraints
    units = inputs.units
    queues = _deal(inputs)
    walk = [[queue[i] if i < len(queue) else -1 for queue in queues] for i in range(max(map(len, queues)))]
    micro_batches = _cut(inputs, walk)
    target = legal_count(len(micro_batches), constraints)
    lengths = [_width(inputs, _longest(units, rows)) for rows in micro_batches]
    # The split keeps the parent's length under shared shapes (ROLL's rule), the halves stay in order.
    while len(micro_batches) < target:
        splittable = [i for i, rows in enumerate(micro_batches) if len(rows) > 1]
        if not splittable:
            break
        largest = max(splittable, key=lambda i: (_rows(units, micro_batches[i]) * lengths[i], -i))
        rows = micro_batches[largest]
        half = (len(rows) + 1) // 2
        parts = [rows[:half], rows[half:]]
        micro_batches[largest : largest + 1] = parts
        lengths[largest : largest + 1] = [
            lengths[largest] if constraints.shared_shapes else _width(inputs, _longest(units, part)) for part in parts
        ]
    fillers = target - len(micro_batches)
    micro_batches.extend([] for _ in range(fillers))
    lengths.extend(0 for _ in range(fillers))
    order: list[int] = []
    offsets = [0]
    for rank in range(constraints.dp_size):
        for rows in micro_batches:
            order.extend(row[rank] for row in rows if row[rank] >= 0)
            offsets.append(len(order))
    row_length = np.tile(np.array(lengths, dtype=np.int64), constraints.dp_size)
    return assemble_units(
        inputs,
        np.array(order, dtype=np.int64),
        np.array(offsets, dtype=np.int64),
        target,
        row_length=row_length if constraints.shared_shapes else None,
    )


def _deal(inputs: PlanInputs) -> list[list[int]]:
    """The units of every rank, in the order in which they are cut."""
    constraints = inputs.constraints
    units = inputs.units
    dp_size = constraints.dp_size
    count = len(units)
    if constraints.mode == "padded":
        order = np.arange(count)
    else:
        lengths = inputs.used[units.samples]
        longest = lengths if count == len(lengths) else np.maximum.reduceat(lengths, units.offsets[:-1])
        order = np.argsort(longest if constraints.algorithm == "roll" else -longest, kind="stable")
    if np.any(units.home >= 0):
        return [[int(unit) for unit in order if units.home[unit] == rank] for rank in range(dp_size)]
    if constraints.mode == "padded":
        # Contiguous blocks, as a batch in the given order is sharded.
        return [block.tolist() for block in np.array_split(order, dp_size)]
    return [order[rank::dp_size].tolist() for rank in range(dp_size)]


def _cut(inputs: PlanInputs, walk: list[list[int]]) -> list[Row]:
    """Extend the current micro-batch row by row while every rank's rectangle stays below the limits."""
    units = inputs.units
    cap, row_limit = _limits(inputs)
    micro_batches: list[Row] = []
    current: Row = []
    rows = np.zeros(inputs.constraints.dp_size, dtype=np.int64)
    longest = 0
    closed = True
    for position in walk:
        here = [unit for unit in position if unit >= 0]
        added = np.array([units.rows[unit] if unit >= 0 else 0 for unit in position], dtype=np.int64)
        length = max(int(units.longest[unit]) for unit in here)
        alone = bool(units.alone[here].any())
        grown = rows + added
        widest = _width(inputs, max(longest, length))
        fits = (cap is None or int(grown.max()) * widest <= cap) and (
            row_limit is None or int(grown.max()) <= row_limit
        )
        if closed or alone or not fits:
            micro_batches.extend([[]])
            current = micro_batches[-1]
            grown, longest = added, 0
        current.append(position)
        rows, longest, closed = grown, max(longest, length), alone
    return _separate(inputs, micro_batches, cap)


def _separate(inputs: PlanInputs, micro_batches: list[Row], cap: int | None) -> list[Row]:
    """Part the ranks of a position where the shared rectangle itself is above the limits.

    One position holds one unit of every rank; with groups of different sizes, or one unit above the cap,
    the largest rows times the largest length can exceed the cap although every unit alone does not.
    """
    units = inputs.units
    result: list[Row] = []
    for rows in micro_batches:
        position = rows[0]
        here = [unit for unit in position if unit >= 0]
        width = _width(inputs, max(int(units.longest[unit]) for unit in here))
        height = max(int(units.rows[unit]) for unit in here)
        fits = cap is None or height * width <= cap
        if len(rows) > 1 or len(here) == 1 or (fits and not units.alone[here].any()):
            result.append(rows)
            continue
        for rank, unit in enumerate(position):
            if unit >= 0:
                result.append([[unit if r == rank else -1 for r in range(len(position))]])
    return result


def _longest(units: Units, rows: Row) -> int:
    return max(int(units.longest[unit]) for row in rows for unit in row if unit >= 0)


def _rows(units: Units, rows: Row) -> int:
    per_rank = zip(*rows, strict=True)
    return max(sum(int(units.rows[unit]) for unit in rank if unit >= 0) for rank in per_rank)


def _plan_from_pool(inputs: PlanInputs) -> Plan:
    """prefer_closest and prefer_first: micro-batches first, ranks afterwards."""
    constraints = inputs.constraints
    units = inputs.units
    if constraints.shared_shapes:
        raise PlanError(
            f"shared_shapes=True needs ranks that cut at the same positions; "
            f"algorithm={constraints.algorithm!r} "
            'forms micro-batches freely, choose "roll" or "nemo_rl"'
        )
    form = _prefer_closest if constraints.algorithm == "prefer_closest" else _prefer_first
    dp_size = constraints.dp_size

    def grow(bins: list[Bin], target: int) -> list[Bin]:
        return raise_count(bins, target, lambda b: bin_cost(units, b), lambda b: split_in_two(units, b))

    if np.any(units.home >= 0):
        per_rank = [form(inputs, np.flatnonzero(units.home == rank)) for rank in range(dp_size)]
        target = legal_count(max(map(len, per_rank)), constraints)
        bins = [members for rank in per_rank for members in grow(rank, target)]
        table = home_groups(np.array([bin_cost(units, b) for b in bins]), dp_size)
    else:
        bins = form(inputs, np.arange(len(units)))
        target = legal_count(-(-len(bins) // dp_size), constraints)
        bins = grow(bins, target * dp_size)
        table = lockstep_groups(np.array([bin_cost(units, b) for b in bins]), dp_size)
    chosen = [bins[i] for i in table.reshape(-1)]
    offsets = np.concatenate([[0], np.cumsum([len(members) for members in chosen])]).astype(np.int64)
    order = np.array([unit for members in chosen for unit in members], dtype=np.int64)
    return assemble_units(inputs, order, offsets, target)


def _prefer_first(inputs: PlanInputs, pool: Ints) -> list[Bin]:
    """The oldest unit opens a micro-batch; then, again and again, the oldest that fits joins it."""
    units = inputs.units
    cap, _ = _limits(inputs)
    assert cap is not None
    if not len(pool):
        return []
    bins = _oldest_that_fit(units.longest[pool], units.rows[pool], units.alone[pool], cap)
    return [pool[members].tolist() for members in group_by_bin(bins, np.arange(len(pool)))]


@compiled
def _oldest_that_fit(longest: Ints, rows: Ints, alone: NDArray[np.bool_], cap: int) -> Ints:
    """The micro-batch of every unit, numbered as they open."""
    count = len(longest)
    bins = np.full(count, -1, dtype=np.int64)
    after = np.arange(1, count + 1)  # the next unit that is not placed, as far as known
    opened = 0
    for opener in range(count):
        if bins[opener] >= 0:
            continue
        bins[opener] = opened
        widest = longest[opener]
        height = rows[opener]
        before = opener
        unit = after[opener]
        while unit < count and not alone[opener] and (height + 1) * widest <= cap:
            if bins[unit] >= 0:
                after[before] = after[unit]
            else:
                grown = height + rows[unit]
                wider = max(widest, longest[unit])
                if grown * wider <= cap and not alone[unit]:
                    bins[unit] = opened
                    height = grown
                    widest = wider
                    after[before] = after[unit]
                else:
                    before = unit
            unit = after[unit]
        opened += 1
    return bins


def _prefer_closest(inputs: PlanInputs, pool: Ints) -> list[Bin]:
    """The oldest unit opens a micro-batch; then joins, again and again, the one that keeps it smallest.

    That is the unit with the smallest `max(longest, L) * rows` below the cap; of equals the one closest to
    the longest so far, then the oldest (cosmos-rl's rule).
    """
    units = inputs.units
    cap, _ = _limits(inputs)
    assert cap is not None
    by_shape: dict[tuple[int, int], deque[int]] = {}
    for unit in pool.tolist():
        by_shape.setdefault((int(units.longest[unit]), int(units.rows[unit])), deque()).append(unit)
    by_rows: dict[int, list[int]] = {}
    for length, rows in sorted(by_shape):
        by_rows.setdefault(rows, []).append(length)
    taken: set[int] = set()
    bins: list[Bin] = []
    for seed in pool.tolist():
        if seed in taken:
            continue
        members = [seed]
        _take(by_shape, by_rows, seed, units)
        taken.add(seed)
        rows, longest = int(units.rows[seed]), int(units.longest[seed])
        while not units.alone[seed]:
            best: tuple[int, int, int] | None = None
            for height, lengths in by_rows.items():
                # Of one height only the neighbours of `longest` can be best: everything at or below it
                # costs the same, above it the shortest is cheapest.
                at = bisect.bisect_right(lengths, longest)
                for length in lengths[max(at - 1, 0) : at + 1]:
                    score = max(longest, length) * (rows + height)
                    unit = by_shape[length, height][0]
                    key = (score, abs(length - longest), unit)
                    if score <= cap and not units.alone[unit] and (best is None or key < best):
                        best = key
            if best is None:
                break
            unit = best[2]
            _take(by_shape, by_rows, unit, units)
            taken.add(unit)
            members.append(unit)
            rows += int(units.rows[unit])
            longest = max(longest, int(units.longest[unit]))
        bins.append(members)
    return bins


def _take(by_shape: dict[tuple[int, int], deque[int]], by_rows: dict[int, list[int]], unit: int, units: Units) -> None:
    shape = (int(units.longest[unit]), int(units.rows[unit]))
    by_shape[shape].remove(unit)
    if not by_shape[shape]:
        lengths = by_rows[shape[1]]
        del lengths[bisect.bisect_left(lengths, shape[0])]
        del by_shape[shape]
