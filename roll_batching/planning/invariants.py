"""Checks of the invariants that all plans obey, on their flat arrays.

Invariants 1 to 4 need the plan only; 5 needs the groups (see `planning`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.pipeline.schedule import check_count, is_admissible
from roll_batching.planning.plan_arrays import PlanArrays, check_blocks, check_slices


def check_plan(plan: PlanArrays, *, groups: tuple[Ints, Ints] | None = None, home: Ints | None = None) -> None:
    """Raise `PlanError` for the first broken invariant.

    `groups` is (members, offsets) of inseparable units, `home` (int64[n]) the rank where each sample must stay. A
    finished plan does not hold them, so they are checked only when it is made.
    """
    _check_shapes(plan)
    if plan.blocks is not None:
        check_blocks(plan.blocks, plan.constraints.dp_size, plan.constraints.max_cp_size)
    if plan.slices is not None:
        check_slices(plan.slices, plan.tokens, plan.constraints.micro_batch_alignment)
    if plan.constraints.oversize == "slice":
        _check_largest_slice(plan)
    _check_placement(plan)
    _check_counts(plan)
    _check_tokens(plan)
    micro_batch_of = np.full(len(plan.lengths), -1, dtype=np.int64)
    micro_batch_of[plan.samples] = np.repeat(np.arange(len(plan.tokens)), np.diff(plan.offsets))
    if groups is not None:
        _check_groups(plan, *groups, micro_batch_of)
    if home is not None:
        moved = np.flatnonzero((micro_batch_of >= 0) & (home >= 0) & (micro_batch_of // plan.num_micro_batches != home))
        if len(moved):
            i = int(moved[0])
            raise PlanError(
                f"sample {i} (id {plan.ids[i]}) is on rank {micro_batch_of[i] // plan.num_micro_batches} but "
                f"its home_rank is {home[i]}: keep it there, or pass home_rank=None"
            )


def _check_shapes(plan: PlanArrays) -> None:
    has_blocks = plan.blocks is not None
    count = len(plan.blocks) if plan.blocks is not None else plan.constraints.dp_size * plan.num_micro_batches
    consistent = (
        has_blocks == plan.constraints.has_cp_per_pack
        and len(plan.tokens) == len(plan.rows) == len(plan.costs) == count
        and len(plan.offsets) == count + 1
        and plan.offsets[0] == 0
        and plan.offsets[-1] == len(plan.samples) == len(plan.slots) == len(plan.shared)
        and bool(np.all(np.diff(plan.offsets) >= 0))
        and len(plan.ids) == len(plan.used) == len(plan.sample_costs) == len(plan.lengths)
        and (plan.location is None or len(plan.location) == len(plan.lengths))
    )
    if not consistent:
        size = f"{plan.constraints.dp_size} ranks x {plan.num_micro_batches} micro-batches"
        raise PlanError(f"the plan's arrays do not describe {size}: load what Plan.to_dict returned")
    shares, chunks = plan.chunk_shares, plan.constraints.pp_size * plan.constraints.vpp_size
    if shares is not None and (
        len(shares) != chunks
        or any(isinstance(s, bool) or not isinstance(s, int | float) or not 0 <= s < float("inf") for s in shares)
    ):
        raise PlanError(f"chunk_shares is {list(shares)!r}: it needs a finite number of at least 0 for {chunks} chunks")


def _check_placement(plan: PlanArrays) -> None:
    """Invariant 1: each sample is placed exactly once, or dropped with a reason."""
    count = len(plan.lengths)
    outside = (plan.samples < 0) | (plan.samples >= count)
    if outside.any():
        raise PlanError(f"the plan places sample {plan.samples[outside][0]}, but there are {count} samples: plan again")
    times = np.bincount(plan.samples, minlength=count)
    for record in plan.dropped:
        times[record.index] += 1
        if not record.reason:
            raise PlanError(f"sample {record.index} (id {record.id}) is dropped without a reason: give one")
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        i = int(wrong[0])
        raise PlanError(
            f"sample {i} (id {plan.ids[i]}) of length {plan.lengths[i]} is placed {times[i]} times; every "
            f"sample is placed exactly once or dropped ({len(wrong)} samples are wrong)"
        )


def _check_counts(plan: PlanArrays) -> None:
    """Invariants 2 and 3: a legal K, and no micro-batch without tokens."""
    constraints = plan.constraints
    check_count(plan.num_micro_batches, constraints)
    if plan.blocks is not None and (constraints.meets_at_every_index or constraints.interleaved):
        counts = [len(packs) for packs in plan.blocks.lists]
        if min(counts) != max(counts):
            raise PlanError(
                f"ranks have {min(counts)} to {max(counts)} micro-batches, and in this layout all ranks wait for each "
                "other at every one: give them equal numbers, with fillers"
            )
    if constraints.interleaved:
        group_size = plan.group_size or 0
        if not is_admissible(plan.num_micro_batches, constraints.pp_size, group_size):
            text = f"group_size={plan.group_size} does not admit {plan.num_micro_batches} micro-batches"
            raise PlanError(f"{text} with pp_size={constraints.pp_size}: plan again with these constraints")
    _refuse(plan, (plan.tokens < 1) | (plan.rows < 1), "computes no token (a filler computes some)")
    if not constraints.fillers and plan.fillers.any():
        short = np.flatnonzero(plan.by_rank(plan.fillers.astype(np.int64)).any(axis=1)).tolist()
        raise PlanError(
            f"ranks {short} have fewer samples than the {plan.num_micro_batches} micro-batches that every rank "
            "computes, and fillers=False: raise max_tokens or the number of samples, or lower min_num_micro_batches or "
            "num_micro_batches_multiple"
        )


def _refuse(plan: PlanArrays, wrong: NDArray[np.bool_], problem: str, *, slots: bool = False) -> None:
    """Raise `PlanError` with `problem` for the first `wrong` micro-batch, or (`slots`) for the first slot."""
    if wrong.any():
        first = int(wrong.argmax())
        micro_batch = int(np.searchsorted(plan.offsets, first, side="right")) - 1 if slots else first
        name = (f"sample {plan.samples[first]} in " if slots else "") + _name_micro_batch(plan, micro_batch)
        raise PlanError(f"{name} {problem}: plan again, or mend algorithm {plan.constraints.algorithm!r}")


def _check_tokens(plan: PlanArrays) -> None:
    """Invariant 4: aligned slots, aligned packs, and no micro-batch above the cap."""
    constraints = plan.constraints
    rectangular = constraints.mode != "packed"
    counts = np.diff(plan.offsets)
    filled = counts > 0
    entry_length = plan.used[plan.samples]
    is_possible = (entry_length >= 1) & (entry_length <= plan.lengths[plan.samples])
    _refuse(plan, ~is_possible, "uses no token, or more than it has", slots=True)
    _check_shared(plan, entry_length)
    cp_sizes = plan.cp_sizes
    for size in np.unique(cp_sizes).tolist():
        alignment, pack_alignment = constraints.sequence_alignment_of(size), constraints.pack_alignment_of(size)
        has_size, size_name = cp_sizes == size, f"with a context-parallel size of {size}"
        wrong = np.repeat(has_size, counts) & (plan.slots % alignment != 0)
        _refuse(plan, wrong, f"has a slot that is not a multiple of {alignment}, {size_name}", slots=True)
        wrong = has_size & (plan.tokens % pack_alignment != 0)
        _refuse(plan, wrong, f"computes tokens that are not a multiple of {pack_alignment}, {size_name}")
    _refuse(plan, plan.slots < entry_length - plan.shared, "has a slot that is too short", slots=True)
    slot_sum = np.zeros(len(counts), dtype=np.int64)
    if len(plan.slots):
        slot_sum[filled] = np.add.reduceat(plan.slots, plan.offsets[:-1][filled])
    _refuse(plan, slot_sum > plan.tokens, "has slots that hold more than its tokens")
    _refuse(plan, plan.tokens % plan.rows != 0, "computes tokens that are not a multiple of its rows")
    if rectangular:
        row_length, alignment = plan.tokens // plan.rows, constraints.rectangle_alignment
        _refuse(plan, row_length % alignment != 0, f"has rows whose length is not a multiple of {alignment}")
        _refuse(plan, counts > plan.rows, "has more samples than rows")
        _refuse(plan, plan.slots != np.repeat(row_length, counts), "has a slot unlike its row's length", slots=True)
    if constraints.max_tokens is None:
        return
    if constraints.exceeds_cap:
        return
    cap = constraints.max_tokens if plan.blocks is None else constraints.max_tokens * plan.blocks.cp_sizes
    counted = plan.tokens
    if constraints.cap_counts_shared:
        whole = np.bincount(np.repeat(np.arange(len(counts)), counts), entry_length, len(counts))
        counted = np.maximum(counted, whole.astype(np.int64))
    for m in np.flatnonzero(counted > cap):
        inside = plan.samples[plan.offsets[m] : plan.offsets[m + 1]]
        longest = int(inside[np.argmax(plan.used[inside])]) if len(inside) else -1
        raise PlanError(
            f"{_name_micro_batch(plan, int(m))} takes {counted[m]} tokens, max_tokens={constraints.max_tokens}"
            + (f" (longest: sample {longest}, length {plan.lengths[longest]})" if longest >= 0 else "")
            + "; form smaller micro-batches or raise the cap"
        )


def _check_largest_slice(plan: PlanArrays) -> None:
    """Of oversize="slice": no slice of a pack above the cap has more tokens than the cap."""
    cap = plan.constraints.max_tokens
    assert cap is not None
    for m in np.flatnonzero(plan.tokens > cap).tolist():
        cuts = [] if plan.slices is None else plan.slices.of(m).tolist()
        largest = max(np.diff([0, *cuts, plan.tokens[m]]))
        if largest > cap:
            raise PlanError(
                f"{_name_micro_batch(plan, m)} of {plan.tokens[m]} tokens has a slice of {largest}, max_tokens={cap}: "
                "cut it into more"
            )


def _check_shared(plan: PlanArrays, entry_length: Ints) -> None:
    """Raises `PlanError` unless the entry before, in the same micro-batch, has the positions that an entry shares."""
    if not plan.shared.any():
        return
    available = np.concatenate([[0], entry_length[:-1]])
    starts = plan.offsets[:-1]
    available[starts[starts < len(available)]] = 0
    wrong = np.flatnonzero((plan.shared < 0) | (plan.shared > available) | (plan.shared >= entry_length))
    if len(wrong) or plan.constraints.mode != "packed":
        i = int(wrong[0]) if len(wrong) else int(np.flatnonzero(plan.shared)[0])
        raise PlanError(
            f"sample {plan.samples[i]} (id {plan.ids[plan.samples[i]]}) takes {plan.shared[i]} of its "
            f"{entry_length[i]} positions from the sample before it in its micro-batch, of {available[i]}: plan again"
        )


def _check_groups(plan: PlanArrays, members: Ints, offsets: Ints, micro_batch_of: Ints) -> None:
    """Invariant 5: a unit lies in one micro-batch, and an oversize unit shares it with no other."""
    if len(members):
        place = micro_batch_of[members]
        first = np.repeat(place[offsets[:-1]], np.diff(offsets))
        torn = np.flatnonzero(place != first)
        if len(torn):
            i = int(members[torn[0]])
            raise PlanError(f"sample {i} (id {plan.ids[i]}) is not in the micro-batch of its group; place both in one")
    if plan.constraints.max_tokens is None or not plan.constraints.exceeds_cap:
        return
    units_of = np.zeros(len(plan.tokens), dtype=np.int64)
    np.add.at(units_of, micro_batch_of[members[offsets[:-1]]], 1)
    shared = np.flatnonzero((plan.tokens > plan.constraints.max_tokens) & (units_of > 1))
    if len(shared) and not plan.constraints.shared_shapes:
        raise PlanError(
            f"{_name_micro_batch(plan, int(shared[0]))} takes {plan.tokens[shared[0]]} tokens, "
            f"max_tokens={plan.constraints.max_tokens}; only a single oversize sample may exceed it"
        )


def _name_micro_batch(plan: PlanArrays, m: int) -> str:
    if plan.blocks is None:
        rank, k = divmod(m, plan.num_micro_batches)
        return f"micro-batch {k} of rank {rank}"
    rank, size = int(plan.blocks.first_ranks[m]), int(plan.blocks.cp_sizes[m])
    k = plan.blocks.lists[rank].index(m)
    return f"micro-batch {k} of rank {rank}" if size == 1 else f"micro-batch {k} of ranks {rank} to {rank + size - 1}"
