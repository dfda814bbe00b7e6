"""Slices: packs cut along the sequence, where a slice is the unit of a pipeline's schedule.

A pipeline of whole packs idles while its first pack passes the stages and its last one returns, and packs are few and
unequal. Slices are many and of equal cost. A slice's attention reads keys that earlier slices of its pack keep, so that
its own keys have their gradient when all later ones are backward: backward takes the slices of a pack in reverse.
(Seq1F1B, arXiv 2406.03488, orders slices of one sequence so; they have equal tokens.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roll_batching.planning.arrays import Ints, offsets_of
from roll_batching.planning.compiled import compiled
from roll_batching.planning.pipeline.ordering import Shares, block_maxima, small_at_ends, times_of_chunks
from roll_batching.planning.pipeline.schedule import Pass
from roll_batching.planning.plan_arrays import PackSlices, PlanArrays

SLICE_COUNTS = (1, 2, 4, 8, 16)
"""Slices of a pack of mean cost that "auto" tries."""
_PLACES = 1024
"""Places at most where a pack is cut."""
_LEAD = 1
"""Forward passes by which a stage is ahead of the next one, beyond what its backward passes need."""


def slice_operations(counts: Sequence[int], stage: int, stages: int) -> list[Pass]:
    """Passes of one stage over packs of `counts` slices each; `Pass.micro_batch` numbers slices in forward order.

    Forward passes are first in, first out. Backward passes take packs in order, and the slices of a pack in reverse.
    Before its k-th backward pass the last stage has done f(k) forward passes: those of the whole pack of that slice,
    and at most one more for each backward pass, so that both alternate. f is the least such function. Each stage has
    done one more than the next. With one slice per pack this is Megatron's 1F1B. A single stage waits for nobody: it
    begins a pack when the one before is backward, so that the keys of one pack are kept.

    No counts deadlock: f of a stage is never below that of the next, so that a backward pass waits for forward passes
    that every stage has before it.
    """
    backward, slack = _backward_order(np.asarray(counts, dtype=np.int64), stages)
    operations: list[Pass] = []
    done, total = 0, len(backward)
    for k, unit in enumerate(backward.tolist()):
        target = max(done, min(total, k + int(slack[k]) + _LEAD * (stages - 1 - stage)))
        operations += [Pass("F", number, 0) for number in range(done, target)]
        operations.append(Pass("B", unit, 0))
        done = target
    return operations


def _backward_order(counts: Ints, stages: int) -> tuple[Ints, Ints]:
    """Slices in the order of their backward passes, and f(k) - k of `slice_operations`; int64[slices] each."""
    ends, total = np.repeat(np.cumsum(counts), counts), int(counts.sum())
    first = ends - np.repeat(counts, counts)
    backward = first + ends - 1 - np.arange(total)
    slack = ends - np.arange(total)
    if stages > 1:
        slack = np.maximum.accumulate(slack[::-1])[::-1]
    return backward, np.ascontiguousarray(slack)


def sliced_makespan(costs: Ints, counts: Ints, stages: int, shares: Shares | None = None) -> int:
    """Time of `slice_operations` from the first forward to the last backward pass, without transfers.

    `costs` (int64[slices]) are forward times on a stage, in forward order; backward takes twice as long. `shares` as
    for `pipeline_makespan`.
    """
    times = times_of_chunks(costs, shares)
    return int(_makespan(times, *_backward_order(counts, stages), stages, _LEAD))


@compiled
def _makespan(times: Ints, backward: Ints, slack: Ints, stages: int, lead: int) -> int:
    total = len(backward)
    forward_end = np.full((stages, total), -1, dtype=np.int64)
    backward_end = np.full((stages, total), -1, dtype=np.int64)
    clock = np.zeros(stages, dtype=np.int64)
    done = np.zeros(stages, dtype=np.int64)
    place = np.zeros(stages, dtype=np.int64)
    while place.min() < total:
        for stage in range(stages):
            row = stage % len(times)
            while place[stage] < total:
                k = place[stage]
                target = min(total, k + slack[k] + lead * (stages - 1 - stage))
                begin = clock[stage]
                if done[stage] < target:
                    unit = done[stage]
                    if stage > 0:
                        if forward_end[stage - 1, unit] < 0:
                            break
                        begin = max(begin, forward_end[stage - 1, unit])
                    clock[stage] = begin + times[row, unit]
                    forward_end[stage, unit] = clock[stage]
                    done[stage] += 1
                else:
                    unit = backward[k]
                    if stage < stages - 1:
                        if backward_end[stage + 1, unit] < 0:
                            break
                        begin = max(begin, backward_end[stage + 1, unit])
                    clock[stage] = begin + 2 * times[row, unit]
                    backward_end[stage, unit] = clock[stage]
                    place[stage] += 1
    return int(clock.max())


# ---- cutting packs


@dataclass(frozen=True)
class SliceCosts:
    """What slices cost, in the scaled unit of a plan's costs."""

    of_lengths: Callable[[Ints], Ints]
    """Costs of sequences of these lengths, int64[n]."""
    fixed: int
    """Of each pass."""
    exchange: float
    """Of a token whose keys are gathered again."""


@dataclass(frozen=True)
class _Pack:
    """Costs of a pack's rows, by their positions in samples."""

    starts: Ints
    """First row of each sample, [samples]."""
    positions: Ints
    """Position of that row in its sample: what it takes from others, [samples]."""
    ends: Ints
    """Tokens of each sample, [samples]."""
    before: Ints
    """Cost of the samples before each, and of all, [samples + 1]."""
    tokens: int
    unit: int
    """Rows of which cuts are multiples."""
    costs_of: Callable[[Ints], Ints]

    def at(self, rows: Ints) -> Ints:
        """Cost of the rows before each of `rows` (int64[n])."""
        sample = np.searchsorted(self.starts, rows, side="right") - 1
        reached = np.minimum(self.positions[sample] + rows - self.starts[sample], self.ends[sample])
        costs: Ints = self.before[sample] + self.costs_of(reached) - self.costs_of(self.positions[sample])
        return costs

    def cut(self, count: int, most: int | None) -> Ints:
        """Rows (int64[count - 1]) that divide it into `count` slices of about equal cost, of `most` rows at most."""
        if not len(self.starts) or count == 1:
            return np.zeros(0, dtype=np.int64)
        step = -(-self.tokens // _PLACES // self.unit) * self.unit or self.unit
        places = np.arange(0, self.tokens + 1, step)
        costs = self.at(places)
        nearest = np.searchsorted(costs, costs[-1] * np.arange(1, count) // count)
        # Every slice has a unit of rows at least, also where one position costs more than a slice.
        rank, units = np.arange(count - 1), places[nearest] // self.unit
        units = np.maximum.accumulate(units - rank) + rank
        if most is not None:  # enough rows before each cut for the slices after it, and not more than fit before it
            room = most // self.unit
            units = np.maximum(units, self.tokens // self.unit - room * (count - 1 - rank))
            units = np.minimum(np.minimum.accumulate(units - room * rank), room) + room * rank
        cuts: Ints = np.clip(units, rank + 1, self.tokens // self.unit - (count - 1 - rank)) * self.unit
        return cuts

    def slice_costs(self, cuts: Ints) -> Ints:
        """Cost of each slice, int64[len(cuts) + 1]."""
        if not len(self.starts):
            return np.zeros(1, dtype=np.int64)
        return np.diff(self.at(np.concatenate([[0], cuts, [self.tokens]])))

    def seen_again(self, cuts: Ints) -> Ints:
        """Tokens before each slice to which it attends, int64[len(cuts) + 1]: those of the sample that it cuts."""
        if not len(self.starts):
            return np.zeros(1, dtype=np.int64)
        first = np.concatenate([[0], cuts])
        seen: Ints = first - self.starts[np.searchsorted(self.starts, first, side="right") - 1]
        return seen


def _packs_of(plan: PlanArrays, costs_of: Callable[[Ints], Ints]) -> list[_Pack]:
    constraints, packs = plan.constraints, []
    unit = constraints.micro_batch_alignment
    for (first, last), tokens in zip(itertools.pairwise(plan.offsets.tolist()), plan.tokens.tolist(), strict=True):
        inside = slice(first, last)
        used, shared = plan.used[plan.samples[inside]], plan.shared[inside]
        before = offsets_of(costs_of(used) - costs_of(shared))
        packs.append(_Pack(offsets_of(plan.slots[inside])[:-1], shared, used, before, tokens, unit, costs_of))
    return packs


def slice_plan(plan: PlanArrays, count: int, costs: SliceCosts) -> tuple[PackSlices, int]:
    """Slices of the packs of a plan, about `count` of a pack of mean cost, and the makespan of its slowest ranks.

    With `count` 1 packs stay whole, but for those above the cap with oversize="slice". Ranks that meet at every
    micro-batch have equal numbers of slices at each.
    """
    constraints, packs = plan.constraints, _packs_of(plan, costs.of_lengths)
    mean = max(int(plan.costs.sum()) // max(int((~plan.fillers).sum()), 1), 1)
    wanted = np.maximum((plan.costs * count + mean // 2) // mean, 1) if count > 1 else np.ones_like(plan.costs)
    counts = np.minimum(wanted, plan.tokens // constraints.micro_batch_alignment).reshape(constraints.dp_size, -1)
    width, largest = constraints.joint_ranks, None
    if width > 1:  # of ranks that meet, all have as many as the shortest pack of an index can have
        room = (plan.tokens // constraints.micro_batch_alignment).reshape(constraints.dp_size // width, width, -1)
        counts = np.repeat(np.minimum(block_maxima(counts, width), room.min(axis=1)), width, axis=0)
    if constraints.oversize == "slice":
        largest = constraints.usable_tokens
        counts = np.maximum(counts, -(-plan.tokens // largest).reshape(counts.shape))
    cuts = [pack.cut(number, largest) for pack, number in zip(packs, counts.reshape(-1).tolist(), strict=True)]
    parts = np.concatenate([pack.slice_costs(of_pack) for pack, of_pack in zip(packs, cuts, strict=True)])
    offsets = offsets_of(np.array([len(of_pack) for of_pack in cuts], dtype=np.int64))
    slices = PackSlices(offsets=offsets, cuts=np.concatenate(cuts), costs=parts)
    further: int | Ints = costs.fixed
    if costs.exchange:
        again = np.concatenate([pack.seen_again(of_pack) for pack, of_pack in zip(packs, cuts, strict=True)])
        further = costs.fixed + (again * costs.exchange).astype(np.int64)
    return slices, sliced_time(plan, slices, further)


def sliced_time(plan: PlanArrays, slices: PackSlices, further: int | Ints) -> int:
    """Makespan of the slowest ranks of a plan cut into `slices`; `further` is what each slice costs beside its own."""
    constraints, slowest = plan.constraints, 0
    counts = slices.counts.reshape(constraints.dp_size, -1)
    per_rank = np.split(slices.costs + further, np.cumsum(counts.sum(axis=1))[:-1])
    for first in range(0, len(counts), constraints.joint_ranks):
        block = np.stack(per_rank[first : first + constraints.joint_ranks]).max(axis=0)
        slowest = max(slowest, sliced_makespan(block, counts[first], constraints.pp_size, plan.chunk_shares))
    return slowest


def in_order(plan: PlanArrays, order: Ints) -> PlanArrays:
    """The plan with its micro-batches (rank-major) in `order` (int64[dp * K]), which stays on each rank."""
    counts = np.diff(plan.offsets)[order]
    offsets = offsets_of(counts)
    entries = np.repeat(plan.offsets[:-1][order] - offsets[:-1], counts) + np.arange(offsets[-1])
    of_entry = {name: getattr(plan, name)[entries] for name in ("samples", "shared", "slots")}
    of_pack = {name: getattr(plan, name)[order] for name in ("tokens", "rows", "costs")}
    return replace(plan, offsets=offsets, **of_entry, **of_pack)


def orders_of(plan: PlanArrays) -> list[Ints]:
    """Orders of micro-batches to try: the plan's own, small ones first, last, and at both ends. int64[dp * K] each."""
    ranks = plan.constraints.dp_size
    costs, width = plan.costs.reshape(ranks, -1), plan.constraints.joint_ranks
    alike = np.repeat(block_maxima(costs, width), width, axis=0)
    first = np.arange(ranks)[:, None] * costs.shape[1]
    rising = np.argsort(alike, axis=1, kind="stable")
    ends = np.stack([small_at_ends(of_rank) for of_rank in alike])
    return [np.arange(costs.size), *((order + first).reshape(-1) for order in (rising, rising[:, ::-1], ends))]


def best_slices(plans: Sequence[PlanArrays], numbers: Sequence[int], smallest: int, costs: SliceCosts) -> PlanArrays:
    """The plan, order and number of slices with the smallest makespan that is found.

    `numbers` are the slices of a pack of mean cost to try, ascending, where they have `smallest` tokens on average.
    Orders are compared with the most slices, numbers of slices in the best order and, first, in the first plan's own.
    """
    best: tuple[int, PlanArrays] | None = None
    for place, plan in enumerate(plans):
        most = int(plan.tokens[~plan.fillers].mean()) // smallest
        counts = [number for number in numbers if number <= most] or numbers[:1]
        ordered = [in_order(plan, order) for order in orders_of(plan)]
        times = [slice_plan(one, counts[-1], costs)[1] for one in ordered]
        fastest = ordered[times.index(min(times))]
        for candidate in (plan, fastest) if place == 0 else (fastest,):
            for count in counts:
                slices, time = slice_plan(candidate, count, costs)
                if best is None or time < best[0]:
                    best = time, replace(candidate, slices=slices if len(slices.cuts) else None)
    assert best is not None
    return best[1]
