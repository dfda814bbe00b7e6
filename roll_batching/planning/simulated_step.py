"""Predicts the step time of a plan on a cluster: the passes of all ranks and stages, and how their time is spent."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import Ints, kind_of, offsets_of, sums_of
from roll_batching.planning.pack_times import BYTES, PackTimes
from roll_batching.planning.pipeline.execution import PassEvent, Timeline, execute_plan, units_of_ranks
from roll_batching.planning.plan import Plan
from roll_batching.planning.plan_arrays import NANOSECONDS, PackSlices

MOST_PASSES = 1_000_000
"""Most passes of all ranks and stages."""


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """Predicted forward and backward passes of one optimizer step, without gradient sums and the optimizer."""

    plan: Plan
    work: PackWork
    """Of the units: micro-batches, or slices."""
    units: Sequence[Sequence[int]]
    """`units[dp_rank]`: units of the plan, in order."""
    pack_of: Sequence[int]
    """Micro-batch of each unit."""
    timeline: Timeline
    """`timeline[dp_rank][stage]`: passes in order, with their times."""

    @cached_property
    def rank_ends(self) -> Seconds:
        """float64[dp]: end of the last pass of each data-parallel rank."""
        return np.array([max(passes[-1].end for passes in stages) for stages in self.timeline])

    @cached_property
    def busy(self) -> Seconds:
        """float64[dp]: seconds of passes of each data-parallel rank, equal on all its stages."""
        seconds = self.work.forward + self.work.backward
        return np.array([seconds[list(units)].sum() for units in self.units])

    @cached_property
    def exchange(self) -> Seconds:
        """float64[dp]: part of `busy` in which keys and values travel."""
        return np.array([self.work.exchange[list(units)].sum() for units in self.units])

    @property
    def seconds(self) -> float:
        """Seconds from the first pass to the end of the last on any rank."""
        return float(self.rank_ends.max())

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second."""
        return self.plan.report.real_tokens / self.seconds

    @property
    def exchange_share(self) -> float:
        """Share of the time of all ranks in which they wait for keys and values."""
        return float(self.exchange.mean()) / self.seconds

    @property
    def bubble_share(self) -> float:
        """Share in which ranks wait inside the step: for other pipeline stages, or for ranks of the same pack."""
        return max(0.0, float((self.rank_ends - self.busy).mean())) / self.seconds

    @property
    def end_wait_share(self) -> float:
        """Share in which ranks wait at the end of the step, for slower data-parallel ranks."""
        return 1 - float(self.rank_ends.mean()) / self.seconds

    @property
    def waiting_share(self) -> float:
        """Share in which ranks wait, inside the step and at its end."""
        return self.bubble_share + self.end_wait_share

    @property
    def compute_share(self) -> float:
        """Share in which ranks compute. Computing, exchange, bubbles and waiting at the end add up to 1."""
        return float((self.busy - self.exchange).mean()) / self.seconds

    @property
    def imbalance(self) -> float:
        """Slowest data-parallel rank / mean - 1."""
        return self.seconds / float(self.rank_ends.mean()) - 1

    def parts_of(self, rank: int, event: PassEvent) -> tuple[int, float, float]:
        """(Micro-batch in the plan, seconds of work, seconds of exchanging keys and values) of the pass `event`.

        Work includes the exchange. The rest of the event is waiting for other ranks.
        """
        unit, work = self.units[rank][event.index], self.work
        busy = float((work.backward if event.is_backward else work.forward)[unit]) / self.plan.constraints.vpp_size
        exchange = busy * float(work.exchange[unit] / (work.forward[unit] + work.backward[unit]))
        return self.pack_of[unit], busy, exchange

    def with_free_transfers(self) -> SimulatedStep:
        """The same step with free transfers between stages, as the planner and the report of a run assume."""
        return replace(self, timeline=execute_plan(self.plan, self.work.forward, self.work.backward))


def simulate_plan(
    plan: Plan,
    times: PackTimes,
    *,
    recomputed: float = 0.0,
    head: float = 0.0,
    transfers: Literal["timed", "instant", "free"] = "timed",
) -> SimulatedStep:
    """The step of `plan`, predicted by `times`.

    `recomputed`: share of the layers whose forward pass runs again in the backward pass. `head`: FLOPs per token of the
    output head, which skips padding. `transfers`: activations travel between pipeline stages as Megatron sends them, a
    stage waiting for the other one ("timed", or "instant" without the time on the link), or as the planner assumes
    ("free": no time, and nobody waits for a receiver). Raises `PlanError` for times of another layout, and for more
    than `MOST_PASSES` passes.
    """
    work = pack_work(plan, times, recomputed=recomputed, head=head)
    if plan.slices is not None:
        work = slice_work(plan, plan.slices, work, times, recomputed)
    units, pack_of = units_of_ranks(plan)
    passes = 2 * plan.constraints.pp_size * plan.constraints.vpp_size * sum(map(len, units))
    if passes > MOST_PASSES:
        raise PlanError(
            f"the step has {passes:,} forward and backward passes on all ranks and stages, and a simulation at most "
            f"{MOST_PASSES:,}: simulate fewer sequences or fewer ranks"
        )
    transfer = {"timed": work.transfer, "instant": np.zeros_like(work.transfer), "free": None}[transfers]
    timeline = execute_plan(plan, work.forward, work.backward, transfer=transfer)
    return SimulatedStep(plan=plan, work=work, units=units, pack_of=pack_of, timeline=timeline)


# ---- times of micro-batches


Seconds = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class PackWork:
    """Seconds of each unit of a plan on one pipeline stage, float64[units] each: of micro-batches, or of slices."""

    forward: Seconds
    backward: Seconds
    """Backward pass, recomputed forward passes included."""
    exchange: Seconds
    """Part of both in which context-parallel ranks wait for keys and values."""
    transfer: Seconds
    """Time of the activations of one model chunk to the next stage, and of their gradients back."""


def pack_work(plan: Plan, times: PackTimes, *, recomputed: float = 0.0, head: float = 0.0) -> PackWork:
    """Work of the micro-batches of `plan`.

    A third of a predicted time is the forward pass. `recomputed` is the share of the layers whose forward pass runs
    again in the backward pass. Layers compute whole slots, with their padding; the output head, whose FLOPs per token
    are `head` (0: not known), skips padding. Raises `PlanError` for times of another layout.
    """
    _check(plan, times, recomputed, head)
    # `tail`: tokens at the end of a pack that belong to no slot. A slot also attends to its shared tokens.
    starts, tail = plan.offsets, plan.tokens - sums_of(plan.slots, plan.offsets)
    computed, taken = plan.slots + plan.shared, plan.shared
    total = np.zeros(len(plan.tokens), dtype=np.int64)
    exchange = np.zeros(len(plan.tokens), dtype=np.int64)
    pack_of = np.repeat(np.arange(len(plan.tokens)), np.diff(starts))
    for size in np.unique(plan.cp_sizes).tolist():
        packs = np.flatnonzero(plan.cp_sizes == size)
        slots = np.flatnonzero(plan.cp_sizes[pack_of] == size)
        slot_times, slot_exchanges = _sum_of_slots(
            times, computed[slots], taken[slots], pack_of[slots], len(total), size
        )
        tail_times, tail_exchanges = _of_lengths(times, tail[packs], size)
        total[packs] = times.fixed(size) + slot_times[packs] + tail_times
        exchange[packs] = times.exchange_latency(size) + slot_exchanges[packs] + tail_exchanges
    real = sums_of(plan.used[plan.samples] - plan.shared, plan.offsets)
    skipped = np.maximum(plan.tokens - real, 0) / plan.cp_sizes * head / (times.tp_size * times.pp_size)
    seconds = np.maximum(total / NANOSECONDS - skipped / times.cluster.matmul_rate, times.floor / NANOSECONDS)
    return PackWork(
        forward=seconds / 3,
        backward=seconds * (2 + recomputed) / 3,
        exchange=exchange / NANOSECONDS * (3 + recomputed) / 3,
        transfer=_transfers(plan, times),
    )


def slice_work(plan: Plan, slices: PackSlices, work: PackWork, times: PackTimes, recomputed: float) -> PackWork:
    """Work of the slices of packs that have the work `work`.

    A slice has its share of the pack's cost and what every pass costs on its own, and takes no less than the shortest
    pass. Its exchange of keys and values is of all tokens to which it attends.
    """
    counts, first = slices.counts, np.cumsum(slices.counts) - slices.counts
    pack = np.repeat(np.arange(len(counts)), counts)
    share = slices.costs / np.maximum(np.add.reduceat(slices.costs, first), 1)[pack]
    edges = [np.concatenate([[0], slices.of(m), [tokens]]) for m, tokens in enumerate(plan.tokens.tolist())]
    starts = [offsets_of(plan.slots[first:last]) for first, last in itertools.pairwise(plan.offsets.tolist())]
    begins = [at[np.searchsorted(at, edge[:-1], side="right") - 1] for at, edge in zip(starts, edges, strict=True)]
    own = np.concatenate([np.diff(edge) for edge in edges]) / plan.tokens[pack]
    visible = (np.concatenate([edge[1:] for edge in edges]) - np.concatenate(begins)) / plan.tokens[pack]
    exchange, backward = work.exchange[pack] * visible, 2 + recomputed
    repeated = times.fixed(plan.constraints.cp_size) / NANOSECONDS / 3 * (1 - share)
    repeated += (exchange - work.exchange[pack] * share) / (1 + backward)
    forward = work.forward[pack] * share + repeated
    slower = np.maximum(1.0, times.floor / NANOSECONDS / 3 / np.maximum(forward, 1e-12))  # launches take their time
    return PackWork(
        forward=forward * slower,
        backward=(work.backward[pack] * share + repeated * backward) * slower,
        exchange=exchange,
        transfer=work.transfer[pack] * own,
    )


def _sum_of_slots(
    times: PackTimes, computed: Ints, taken: Ints, pack_of: Ints, packs: int, size: int
) -> tuple[Ints, Ints]:
    """(Times, exchanges) that slots add to each pack, without their first `taken` positions, computed by others."""
    whole, prefix = _of_lengths(times, computed, size), _of_lengths(times, taken, size)
    added = np.zeros((2, packs), dtype=np.int64)
    for row in range(2):
        np.add.at(added[row], pack_of, np.maximum(whole[row] - prefix[row], 0))
    return added[0], added[1]


def _of_lengths(times: PackTimes, lengths: Ints, size: int) -> tuple[Ints, Ints]:
    """(Times, exchanges) of sequences of `lengths` tokens; 0 for empty ones."""
    there = np.maximum(lengths, 1)  # PackTimes takes no empty sequences
    is_empty = lengths == 0
    return (
        np.where(is_empty, 0, times.sequences(there, size)),
        np.where(is_empty, 0, times.exchanges(there, size)),
    )


def _transfers(plan: Plan, times: PackTimes) -> Seconds:
    """Seconds of the activations of each micro-batch between two stages."""
    constraints, cluster = plan.constraints, times.cluster
    if constraints.pp_size == 1:
        return np.zeros(len(plan.tokens))
    split = plan.cp_sizes * (constraints.tp_size if constraints.sequence_parallel else 1)
    # Stages are the outermost dimension of Megatron's ranks: neighbours share a node only where all stages do.
    is_within_node = constraints.world_size <= cluster.devices_per_node
    bandwidth = cluster.node_bandwidth if is_within_node else cluster.network_bandwidth
    latency = cluster.node_latency if is_within_node else cluster.network_latency
    seconds: Seconds = latency + plan.tokens / split * times.hidden_size * BYTES / bandwidth
    return seconds


def _check(plan: Plan, times: PackTimes, recomputed: float, head: float) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"plan is {kind_of(plan)}: pass what plan_step returns")
    if not isinstance(times, PackTimes):
        raise PlanError(f"times is {kind_of(times)}: pass PackTimes.of_model(FlopsCost.from_model(...), ...)")
    times.require_layout(plan.constraints)
    if not 0 <= recomputed <= 1:
        raise PlanError(f"recomputed={recomputed!r} is the share of the layers that are recomputed: 0 to 1")
    if not 0 <= head <= times.linear:
        raise PlanError(
            f"head={head!r} FLOPs per token must lie between 0 and those of the whole model, {times.linear!r}"
        )
