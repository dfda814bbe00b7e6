"""Problem of one plan: checked arguments, slots, costs and inseparable units."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import (
    Flags,
    Ints,
    as_ints,
    as_lengths,
    kind_of,
    largest_of,
    offsets_of,
    round_up,
    sums_of,
)
from roll_batching.planning.constraints import PlanConstraints
from roll_batching.planning.cost_model import chunk_shares, sequence_costs
from roll_batching.planning.plan_arrays import DroppedSample
from roll_batching.planning.prefixes import Chain, PricedPrefixes, SharedPrefixes, cut_chain


@dataclass(frozen=True)
class Units:
    """Units: single samples, or groups of samples that stay together.

    All arrays but `samples` and `offsets` have one entry per unit, in the order of first samples.
    """

    samples: Ints
    """int64[samples]: sample indices by unit, each unit in the given order."""
    offsets: Ints
    """int64[units + 1]: unit u holds `samples[offsets[u]:offsets[u + 1]]`."""
    slots: Ints
    """Tokens of all slots of the unit, for packs."""
    longest: Ints
    """Longest row, aligned, for rectangles."""
    rows: Ints
    """Samples of the unit, for rectangles."""
    costs: Ints
    home: Ints
    """DP rank where the unit must stay, or -1."""
    alone: Flags
    """Above the cap with oversize="alone" or "slice": shares its micro-batch with no other unit."""

    def __len__(self) -> int:
        return len(self.costs)


@dataclass(frozen=True)
class PlanProblem:
    """Checked arguments of one plan of `n` samples, and its units."""

    constraints: PlanConstraints
    lengths: Ints
    ids: Ints
    location: Ints | None
    used: Ints
    """int64[n]: tokens used of each sample (fewer than its length when truncated)."""
    costs: Ints
    """int64[n]: scaled cost of each sample, of its own part where it shares a prefix."""
    shift: int
    """Scaled costs are those of the cost model >> `shift`."""
    fixed_cost: int
    """Scaled cost of a micro-batch without its samples."""
    units: Units
    dropped: tuple[DroppedSample, ...]
    prefixes: PricedPrefixes | None
    """Prefixes that samples share; None: each sample computes all its tokens."""
    chunk_shares: tuple[float, ...] | None
    """Cost of each model chunk of the pipeline over the mean of all; None: all cost the same."""

    @cached_property
    def has_home_ranks(self) -> bool:
        """Whether units must stay on their home ranks (all of them, or none)."""
        return bool(np.any(self.units.home >= 0))


def build_problem(
    lengths: ArrayLike,
    constraints: PlanConstraints,
    *,
    cost: Any,
    ids: ArrayLike | None = None,
    group_ids: ArrayLike | None = None,
    home_rank: ArrayLike | None = None,
    location: ArrayLike | None = None,
    prefixes: SharedPrefixes | None = None,
    largest_part: int | None = None,
) -> PlanProblem:
    """Check the arguments of `plan_step`, apply the oversize policy, align lengths, form units.

    With `prefixes` and without `group_ids` the units are parts of trees of samples that begin alike, each with a scaled
    cost of at most `largest_part` (None: any), or one sample. Raises `PlanError` with the sample (index and id), its
    length, the cap, and what to set instead.
    """
    if not isinstance(constraints, PlanConstraints):
        raise PlanError(f"constraints is {kind_of(constraints)}: pass PlanConstraints(dp_size=..., max_tokens=...)")
    sizes = as_lengths(lengths)
    identifiers = _identifiers(ids, len(sizes))
    short = np.flatnonzero(sizes < 1)
    if len(short):
        raise PlanError(
            f"{_name(short[0], identifiers)} has length {sizes[short[0]]}; every sample needs at least one token"
        )
    if constraints.has_cp_per_pack and home_rank is not None:
        raise PlanError(
            "home_rank keeps each sample on one rank, and with max_cp_size > 1 a pack may be computed by several: pass "
            "home_rank=None"
        )
    home = _ranks(home_rank, "home_rank", len(sizes), constraints.dp_size)
    holder = _ranks(location, "location", len(sizes), constraints.dp_size)
    _check_prefixes(prefixes, len(sizes), constraints)
    groups = _group(len(sizes), identifiers, group_ids, home)
    groups, used, alone, dropped = _fit_under_cap(sizes, identifiers, groups, constraints)
    scaled = sequence_costs(used, cost)
    priced = None if prefixes is None else PricedPrefixes.of(prefixes, used, cost)
    if priced is not None and group_ids is None:
        groups, alone = _join_trees(groups, alone, priced, constraints, largest_part)
    units, costs = _make_units(groups, alone, used, scaled.values, priced, constraints)
    return PlanProblem(
        constraints=constraints,
        lengths=sizes,
        ids=identifiers,
        location=holder,
        used=used,
        costs=costs,
        shift=(scaled if priced is None else priced).shift,
        fixed_cost=int(cost.fixed) >> (scaled if priced is None else priced).shift,
        units=units,
        dropped=dropped,
        prefixes=priced,
        chunk_shares=chunk_shares(cost, used, constraints.pp_size, constraints.vpp_size),
    )


def _make_units(
    groups: _Groups,
    alone: Flags,
    used: Ints,
    costs: Ints,
    priced: PricedPrefixes | None,
    constraints: PlanConstraints,
) -> tuple[Units, Ints]:
    """Units, and the cost of each sample (int64[n]): from `costs`, or without the positions that others compute."""
    members, offsets = groups.members, groups.offsets
    counted = used[members]
    if priced is not None:
        members = priced.sort(members, offsets)
        shared = priced.shared(members, offsets)
        counted = used[members] - (0 if constraints.cap_counts_shared else shared)
        costs = np.zeros(len(used), dtype=np.int64)
        costs[members] = priced.own_cost(used[members], shared)
    units = Units(
        samples=members,
        offsets=offsets,
        slots=sums_of(round_up(counted, constraints.sequence_alignment), offsets),
        longest=largest_of(round_up(used[members], constraints.rectangle_alignment), offsets),
        rows=np.diff(offsets),
        costs=sums_of(costs[members], offsets),
        home=groups.home,
        alone=alone,
    )
    return units, costs


def _check_prefixes(prefixes: SharedPrefixes | None, count: int, constraints: PlanConstraints) -> None:
    if prefixes is None:
        return
    if not isinstance(prefixes, SharedPrefixes):
        raise PlanError(f"prefixes is {kind_of(prefixes)}: pass SharedPrefixes.of(tokens, lengths)")
    if constraints.mode != "packed":
        raise PlanError(f"prefixes are shared in mode 'packed' only, not in {constraints.mode!r}: pass prefixes=None")
    if len(prefixes) != count:
        raise PlanError(
            f"prefixes describe {len(prefixes)} samples and lengths {count}: pass those of the same samples"
        )


def _join_trees(
    groups: _Groups, alone: Flags, priced: PricedPrefixes, constraints: PlanConstraints, largest_part: int | None
) -> tuple[_Groups, Flags]:
    """Groups of samples that share prefixes, from groups of one sample; a sample above the cap remains alone."""
    samples, home, alignment = groups.members, groups.home, constraints.sequence_alignment
    places = priced.prefixes.places[samples]
    order = np.lexsort((places, home, alone))
    samples, home, alone = samples[order], home[order], alone[order]
    starts_anew = alone | np.concatenate([[True], np.diff(home) != 0])
    shared = priced.shared(samples, np.append(np.flatnonzero(starts_anew), len(samples)))
    used = priced.used[samples]
    full_costs = priced.cost(used)
    chain = Chain(
        samples=samples,
        shared=shared,
        slots=round_up(used if constraints.cap_counts_shared else used - shared, alignment),
        first_slots=round_up(used, alignment),
        costs=priced.own_cost(used, shared),
        first_costs=full_costs,
    )
    most = int(full_costs.sum()) if largest_part is None else largest_part
    # With a context-parallel size per pack, trees stay small enough for packs of one rank.
    starts = cut_chain(chain, min(constraints.usable_tokens, constraints.max_tokens or 0), most)
    return _Groups(samples, np.append(starts, len(samples)), home[starts]), alone[starts]


def _identifiers(ids: ArrayLike | None, count: int) -> Ints:
    if ids is None:
        return np.arange(count, dtype=np.int64)
    identifiers = as_ints(ids, "ids", count)
    if len(np.unique(identifiers)) != count:
        values, repeats = np.unique(identifiers, return_counts=True)
        raise PlanError(f"ids must be unique; id {values[repeats > 1][0]} is given {repeats.max()} times")
    return identifiers


def _ranks(values: ArrayLike | None, name: str, count: int, dp_size: int) -> Ints | None:
    if values is None:
        return None
    array = as_ints(values, name, count)
    wrong = np.flatnonzero((array < 0) | (array >= dp_size))
    if len(wrong):
        raise PlanError(
            f"{name}[{wrong[0]}]={array[wrong[0]]} is not a data-parallel rank (dp_size={dp_size}: 0 to {dp_size - 1})"
        )
    return array


def _name(index: int, ids: Ints) -> str:
    return f"sample {int(index)} (id {int(ids[index])})"


@dataclass(frozen=True)
class _Groups:
    """Groups of samples that stay together; a single sample is a group."""

    members: Ints
    """Sample indices, group by group."""
    offsets: Ints
    home: Ints
    """Home rank of each group, or -1."""


def _group(count: int, ids: Ints, group_ids: ArrayLike | None, home: Ints | None) -> _Groups:
    """Groups of samples by `group_ids`, or of one sample each. Raises `PlanError` for a group with two home ranks."""
    if group_ids is None:
        single = np.arange(count + 1, dtype=np.int64)
        return _Groups(single[:-1], single, np.full(count, -1, dtype=np.int64) if home is None else home)
    groups = as_ints(group_ids, "group_ids", count)
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    # Groups in the order of their first sample, samples in the given order.
    position = np.empty(len(first), dtype=np.int64)
    position[np.argsort(first, kind="stable")] = np.arange(len(first))
    unit_of = position[inverse]
    members = np.argsort(unit_of, kind="stable").astype(np.int64)
    offsets = offsets_of(np.bincount(unit_of, minlength=len(first)))
    if home is None:
        return _Groups(members, offsets, np.full(len(first), -1, dtype=np.int64))
    unit_home = home[members[offsets[:-1]]]
    differing = np.flatnonzero(home != unit_home[unit_of])
    if len(differing):
        i = int(differing[0])
        raise PlanError(
            f"{_name(i, ids)} of group {groups[i]} has home_rank {home[i]} but the first sample of the group has "
            f"{unit_home[unit_of[i]]}; give all samples of a group one home rank"
        )
    return _Groups(members, offsets, unit_home)


def _fit_under_cap(
    lengths: Ints, ids: Ints, groups: _Groups, constraints: PlanConstraints
) -> tuple[_Groups, Ints, Flags, tuple[DroppedSample, ...]]:
    """(Groups, tokens used of each sample, groups that share their micro-batch with no other, dropped samples)."""
    cap = constraints.usable_tokens if constraints.max_tokens is not None else None
    used = lengths
    alone = np.zeros(len(groups.home), dtype=bool)
    dropped: dict[int, str] = {}
    for unit in np.flatnonzero(_too_long(lengths, groups, constraints, cap)):
        inside = groups.members[groups.offsets[unit] : groups.offsets[unit + 1]]
        excess = _describe_excess(inside, lengths, ids, constraints)
        if constraints.oversize == "drop":
            dropped[int(unit)] = excess
        elif constraints.exceeds_cap:
            alone[unit] = True
        elif constraints.oversize == "truncate":
            if used is lengths:
                used = lengths.copy()
            limit = constraints.longest_cut(lengths[inside])
            if limit < 1 or (constraints.rows is not None and len(inside) > constraints.rows):
                raise PlanError(f"{excess} and cannot be truncated: it has too many samples; raise the cap")
            used[inside] = np.minimum(lengths[inside], limit)
        else:
            policies = "truncate or drop" if constraints.has_cp_per_pack else "truncate, drop, alone or slice"
            raise PlanError(f"{excess}; raise the cap, shorten it, or set oversize (--oversize) to {policies}")
    if not dropped:
        return groups, used, alone, ()
    members, offsets = groups.members, groups.offsets
    records = tuple(
        DroppedSample(int(i), int(ids[i]), int(lengths[i]), reason)
        for unit, reason in dropped.items()
        for i in members[offsets[unit] : offsets[unit + 1]]
    )
    keep = np.ones(len(groups.home), dtype=bool)
    keep[list(dropped)] = False
    if not keep.any():
        raise PlanError(
            f'oversize="drop" leaves no sample: all {len(lengths)} exceed the cap '
            f"(first: {records[0].reason}); raise max_tokens"
        )
    sizes = np.diff(offsets)
    remaining = _Groups(members[np.repeat(keep, sizes)], offsets_of(sizes[keep]), groups.home[keep])
    return remaining, used, alone[keep], records


def _too_long(lengths: Ints, groups: _Groups, constraints: PlanConstraints, cap: int | None) -> Flags:
    """Groups that do not fit into a micro-batch, bool[groups]."""
    members, offsets, sizes = groups.members, groups.offsets, np.diff(groups.offsets)
    too_long = np.zeros(len(sizes), dtype=bool)
    if cap is not None:
        if constraints.mode == "packed":
            too_long[:] = True
            for size in constraints.legal_cp_sizes:  # a group is too long if it exceeds packs of every size
                need = sums_of(round_up(lengths[members], constraints.sequence_alignment_of(size)), offsets)
                too_long &= need > constraints.usable_tokens_of(size)
        else:
            need = largest_of(round_up(lengths[members], constraints.rectangle_alignment), offsets) * sizes
            too_long |= need > cap
    row_limit = constraints.row_limit
    if row_limit is not None:
        aligned_limit = -(-row_limit // constraints.rectangle_alignment) * constraints.rectangle_alignment
        if cap is not None and aligned_limit > cap:
            raise PlanError(
                f"padded_length={row_limit} takes {aligned_limit} aligned tokens, more than "
                f"max_tokens={constraints.max_tokens}; lower it or raise the cap"
            )
        too_long |= largest_of(lengths[members], offsets) > row_limit
        if cap is not None:
            too_long |= sizes * aligned_limit > cap
    if constraints.rows is not None:
        too_long |= sizes > constraints.rows
    return too_long


def _describe_excess(inside: Ints, lengths: Ints, ids: Ints, constraints: PlanConstraints) -> str:
    limits = [
        f"{name}={limit}"
        for name, limit in (
            ("max_tokens", constraints.max_tokens),
            ("max_cp_size", constraints.max_cp_size if constraints.has_cp_per_pack else None),
            ("padded_length", constraints.row_limit),
            ("rows", constraints.rows),
        )
        if limit is not None
    ]
    alignment = (
        constraints.sequence_alignment_of(constraints.largest_cp_size)
        if constraints.mode == "packed"
        else constraints.rectangle_alignment
    )
    aligned = "" if alignment == 1 else f" (aligned to {alignment})"
    longest = int(inside[np.argmax(lengths[inside])])
    if len(inside) == 1:
        return f"{_name(longest, ids)} of length {lengths[longest]}{aligned} exceeds {', '.join(limits)}"
    return (
        f"the group of {len(inside)} samples with {int(lengths[inside].sum())} tokens{aligned} around "
        f"{_name(longest, ids)} of length {lengths[longest]} exceeds {', '.join(limits)}"
    )
