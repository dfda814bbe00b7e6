"""From what a caller passes to what algorithms need: checked arrays, slots, costs, inseparable units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roll_batching.errors import PlanError
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.costs import sequence_costs

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class DroppedSample:
    """A sample that the plan leaves out, and why."""

    index: int
    id: int
    length: int
    reason: str


@dataclass(frozen=True)
class Units:
    """What is placed as a whole: single samples, or groups that stay together.

    All arrays have one entry per unit, in the order of each unit's first sample.
    """

    samples: Ints
    """Sample indices, unit by unit, each unit in the given order."""
    offsets: Ints
    """Unit u holds `samples[offsets[u]:offsets[u + 1]]`."""
    slots: Ints
    """Tokens of the unit's slots together (packs) ..."""
    longest: Ints
    """... and its longest row, aligned (rectangles)."""
    rows: Ints
    costs: Ints
    home: Ints
    """The DP rank where the unit must stay, or -1."""
    alone: NDArray[np.bool_]
    """Above the cap, by the policy "alone": shares its micro-batch with nobody."""

    def __len__(self) -> int:
        return len(self.costs)


@dataclass(frozen=True)
class PlanInputs:
    """Checked inputs of one plan; `n` samples."""

    constraints: PlanConstraints
    lengths: Ints
    ids: Ints
    location: Ints | None
    used: Ints
    """Tokens used of every sample (fewer than its length when truncated)."""
    slots: Ints
    costs: Ints
    fixed_cost: int
    units: Units
    dropped: tuple[DroppedSample, ...]


def prepare_inputs(
    lengths: ArrayLike,
    constraints: PlanConstraints,
    *,
    cost: Any,
    ids: ArrayLike | None = None,
    group_ids: ArrayLike | None = None,
    home_rank: ArrayLike | None = None,
    location: ArrayLike | None = None,
) -> PlanInputs:
    """Check and align everything, apply the oversize policy, form the units.

    Raises `PlanError` naming the sample (index and id), its length, the cap and the cure.
    """
    sizes = as_lengths(lengths)
    count = len(sizes)
    identifiers = np.arange(count, dtype=np.int64) if ids is None else _as_ints(ids, "ids", count)
    if ids is not None and len(np.unique(identifiers)) != count:
        values, repeats = np.unique(identifiers, return_counts=True)
        raise PlanError(f"ids must be unique; id {values[repeats > 1][0]} is given {repeats.max()} times")
    short = np.flatnonzero(sizes < 1)
    if len(short):
        raise PlanError(
            f"{_name(short[0], identifiers)} has length {sizes[short[0]]}; every sample needs at least one token"
        )
    home = _ranks(home_rank, "home_rank", count, constraints.dp_size)
    where = _ranks(location, "location", count, constraints.dp_size)
    members, offsets, group_home = _group(count, identifiers, group_ids, home)
    used, alone, dropped_units, reasons = _fit_under_cap(sizes, identifiers, members, offsets, constraints)

    keep = ~dropped_units
    dropped: tuple[DroppedSample, ...] = ()
    if dropped_units.any():
        dropped = tuple(
            DroppedSample(int(i), int(identifiers[i]), int(sizes[i]), reasons[int(unit)])
            for unit in np.flatnonzero(dropped_units)
            for i in members[offsets[unit] : offsets[unit + 1]]
        )
        if not keep.any():
            raise PlanError(
                f'oversize="drop" leaves no sample: all {count} exceed the cap '
                f"(first: {dropped[0].reason}); raise max_tokens"
            )
        flags = np.repeat(keep, np.diff(offsets))
        members = members[flags]
        offsets = np.concatenate([[0], np.cumsum(np.diff(offsets)[keep])]).astype(np.int64)
        group_home, alone = group_home[keep], alone[keep]

    slots = round_up(used, constraints.sequence_alignment)
    scaled = sequence_costs(used, cost)
    single = len(offsets) - 1 == len(members)
    row_length = round_up(used[members], constraints.rectangle_alignment)
    units = Units(
        samples=members,
        offsets=offsets,
        slots=slots[members] if single else np.add.reduceat(slots[members], offsets[:-1]),
        longest=row_length if single else np.maximum.reduceat(row_length, offsets[:-1]),
        rows=np.diff(offsets),
        costs=scaled.values[members] if single else np.add.reduceat(scaled.values[members], offsets[:-1]),
        home=group_home,
        alone=alone,
    )
    return PlanInputs(
        constraints=constraints,
        lengths=sizes,
        ids=identifiers,
        location=where,
        used=used,
        slots=slots,
        costs=scaled.values,
        fixed_cost=scaled.fixed,
        units=units,
        dropped=dropped,
    )


def as_lengths(lengths: ArrayLike) -> Ints:
    """`lengths` as int64[n]; `PlanError` for anything that is not a one-dimensional array of integers."""
    array = np.asarray(lengths)
    if array.ndim != 1 or len(array) == 0:
        raise PlanError(f"lengths must be one-dimensional with at least one sample, got {array.shape}")
    return _as_ints(array, "lengths", len(array))


def round_up(values: Ints, multiple: int) -> Ints:
    """Each value rounded up to a multiple."""
    if multiple == 1:
        return values
    return (values + (multiple - 1)) // multiple * multiple


def _as_ints(values: ArrayLike, name: str, count: int) -> Ints:
    array = np.asarray(values)
    if array.shape != (count,):
        raise PlanError(f"{name} has shape {array.shape}, expected ({count},), one value per sample")
    if array.dtype.kind not in "iu":
        if array.dtype.kind != "f" or not np.all(np.isfinite(array)) or np.any(array != np.floor(array)):
            raise PlanError(f"{name} must be integers, got dtype {array.dtype}")
    if len(array) and not -(2**63) <= int(array.max()) < 2**63:
        raise PlanError(f"{name} must fit into 64 bits with a sign, got {array.max()}")
    return np.array(array, dtype=np.int64)


def _ranks(values: ArrayLike | None, name: str, count: int, dp_size: int) -> Ints | None:
    if values is None:
        return None
    array = _as_ints(values, name, count)
    wrong = np.flatnonzero((array < 0) | (array >= dp_size))
    if len(wrong):
        raise PlanError(
            f"{name}[{wrong[0]}]={array[wrong[0]]} is not a data-parallel rank (dp_size={dp_size}: 0 to {dp_size - 1})"
        )
    return array


def _name(index: int, ids: Ints) -> str:
    return f"sample {int(index)} (id {int(ids[index])})"


def _group(count: int, ids: Ints, group_ids: ArrayLike | None, home: Ints | None) -> tuple[Ints, Ints, Ints]:
    """Members unit by unit, offsets, and each unit's home (or -1)."""
    if group_ids is None:
        return (
            np.arange(count, dtype=np.int64),
            np.arange(count + 1, dtype=np.int64),
            np.full(count, -1, dtype=np.int64) if home is None else home,
        )
    groups = _as_ints(group_ids, "group_ids", count)
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    # Units in the order of their first sample, members in the given order.
    position = np.empty(len(first), dtype=np.int64)
    position[np.argsort(first, kind="stable")] = np.arange(len(first))
    unit_of = position[inverse]
    members = np.argsort(unit_of, kind="stable").astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(unit_of, minlength=len(first)))]).astype(np.int64)
    if home is None:
        return members, offsets, np.full(len(first), -1, dtype=np.int64)
    unit_home = home[members[offsets[:-1]]]
    apart = np.flatnonzero(home != unit_home[unit_of])
    if len(apart):
        i = int(apart[0])
        raise PlanError(
            f"{_name(i, ids)} of group {groups[i]} has home_rank {home[i]} but its group starts on rank "
            f"{unit_home[unit_of[i]]}; give all samples of a group one home rank"
        )
    return members, offsets, unit_home


def _fit_under_cap(
    lengths: Ints, ids: Ints, members: Ints, offsets: Ints, constraints: PlanConstraints
) -> tuple[Ints, NDArray[np.bool_], NDArray[np.bool_], dict[int, str]]:
    """Used lengths, units that stay alone, units that are dropped, and the reasons of the latter."""
    count = len(offsets) - 1
    sizes = np.diff(offsets)
    used = lengths
    alone = np.zeros(count, dtype=bool)
    dropped = np.zeros(count, dtype=bool)
    reasons: dict[int, str] = {}
    packed = constraints.mode == "packed"
    cap = constraints.usable_tokens if constraints.max_tokens is not None else None
    slots = round_up(lengths[members], constraints.sequence_alignment)
    rectangles = round_up(lengths[members], constraints.rectangle_alignment)
    too_long = np.zeros(count, dtype=bool)
    if cap is not None:
        if packed:
            need = slots if len(slots) == count else np.add.reduceat(slots, offsets[:-1])
        else:
            longest = rectangles if len(slots) == count else np.maximum.reduceat(rectangles, offsets[:-1])
            need = longest * sizes
        too_long |= need > cap
    row_limit = constraints.row_limit
    if row_limit is not None:
        aligned_limit = -(-row_limit // constraints.rectangle_alignment) * constraints.rectangle_alignment
        if cap is not None and aligned_limit > cap:
            raise PlanError(
                f"padded_length={row_limit} takes {aligned_limit} aligned tokens, more than "
                f"max_tokens={constraints.max_tokens}; lower it or raise the cap"
            )
        over = lengths[members] > row_limit
        too_long |= over if len(slots) == count else np.logical_or.reduceat(over, offsets[:-1])
        if cap is not None:
            too_long |= sizes * aligned_limit > cap
    if constraints.rows is not None:
        too_long |= sizes > constraints.rows
    for unit in np.flatnonzero(too_long):
        inside = members[offsets[unit] : offsets[unit + 1]]
        what = _describe(inside, lengths, ids, constraints)
        if constraints.oversize == "drop":
            dropped[unit] = True
            reasons[int(unit)] = what
        elif constraints.oversize == "alone":
            alone[unit] = True
        elif constraints.oversize == "truncate":
            if used is lengths:
                used = lengths.copy()
            limit = _truncation_level(lengths[inside], constraints, cap)
            if limit < 1 or (constraints.rows is not None and len(inside) > constraints.rows):
                raise PlanError(f"{what} and cannot be truncated: it has too many samples; raise the cap")
            used[inside] = np.minimum(lengths[inside], limit)
        else:
            raise PlanError(f'{what}; raise the cap, shorten it, or choose oversize="truncate", "drop" or "alone"')
    return used, alone, dropped, reasons


def _describe(inside: Ints, lengths: Ints, ids: Ints, constraints: PlanConstraints) -> str:
    limits = [
        f"{name}={limit}"
        for name, limit in (
            ("max_tokens", constraints.max_tokens),
            ("padded_length", constraints.row_limit),
            ("rows", constraints.rows),
        )
        if limit is not None
    ]
    alignment = constraints.sequence_alignment if constraints.mode == "packed" else constraints.rectangle_alignment
    aligned = "" if alignment == 1 else f" (aligned to {alignment})"
    longest = int(inside[np.argmax(lengths[inside])])
    if len(inside) == 1:
        return f"{_name(longest, ids)} of length {lengths[longest]}{aligned} exceeds {', '.join(limits)}"
    return (
        f"the group of {len(inside)} samples with {int(lengths[inside].sum())} tokens{aligned} around "
        f"{_name(longest, ids)} of length {lengths[longest]} exceeds {', '.join(limits)}"
    )


def _truncation_level(sizes: Ints, constraints: PlanConstraints, cap: int | None) -> int:
    """The largest length that every member may keep so that the unit fits (0: none)."""
    row_limit = constraints.row_limit
    if constraints.mode != "packed":
        limits = [] if row_limit is None else [row_limit]
        if cap is not None:
            alignment = constraints.rectangle_alignment
            limits.append(cap // len(sizes) // alignment * alignment)
            if row_limit is not None and len(sizes) * -(-row_limit // alignment) * alignment > cap:
                return 0
        return min(limits, default=int(sizes.max()))
    alignment = constraints.sequence_alignment
    assert cap is not None
    low, high = 0, cap // alignment
    while low < high:
        middle = (low + high + 1) // 2
        if int(round_up(np.minimum(sizes, middle * alignment), alignment).sum()) <= cap:
            low = middle
        else:
            high = middle - 1
    return low * alignment
