"""Predicted times of a plan's micro-batches, and of their exchange and transfers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints, sums_of
from roll_batching.planning.pack_blocks import NANOSECONDS
from roll_batching.planning.pack_times import BYTES, PackTimes
from roll_batching.planning.plain_values import kind_of

Seconds = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class PackWork:
    """Seconds of each micro-batch of a plan on one pipeline stage, float64[micro-batches] each."""

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
    starts, tail = plan.offsets, plan.tokens - sums_of(plan.slots, plan.offsets)
    computed, taken = plan.slots + plan.shared, plan.shared
    total = np.zeros(len(plan.tokens), dtype=np.int64)
    exchange = np.zeros(len(plan.tokens), dtype=np.int64)
    pack_of = np.repeat(np.arange(len(plan.tokens)), np.diff(starts))
    for size in np.unique(plan.cp_sizes).tolist():
        packs = np.flatnonzero(plan.cp_sizes == size)
        slots = np.flatnonzero(plan.cp_sizes[pack_of] == size)
        own = _sum_of_slots(times, computed[slots], taken[slots], pack_of[slots], len(total), size)
        total[packs] = times.fixed(size) + own[0][packs] + _of_lengths(times, tail[packs], size)[0]
        exchange[packs] = times.exchange_latency(size) + own[1][packs] + _of_lengths(times, tail[packs], size)[1]
    real = sums_of(plan.used[plan.samples] - plan.shared, plan.offsets)
    skipped = np.maximum(plan.tokens - real, 0) / plan.cp_sizes * head / (times.tp_size * times.pp_size)
    seconds = np.maximum(total / NANOSECONDS - skipped / times.cluster.matmul_rate, times.floor / NANOSECONDS)
    return PackWork(
        forward=seconds / 3,
        backward=seconds * (2 + recomputed) / 3,
        exchange=exchange / NANOSECONDS * (3 + recomputed) / 3,
        transfer=_transfers(plan, times),
    )


def _sum_of_slots(
    times: PackTimes, computed: Ints, taken: Ints, pack_of: Ints, packs: int, size: int
) -> tuple[Ints, Ints]:
    """(times, exchanges) that slots add to each pack; a sample takes its first `taken` positions from another one."""
    whole, prefix = _of_lengths(times, computed, size), _of_lengths(times, taken, size)
    added = np.zeros((2, packs), dtype=np.int64)
    for row in range(2):
        np.add.at(added[row], pack_of, np.maximum(whole[row] - prefix[row], 0))
    return added[0], added[1]


def _of_lengths(times: PackTimes, lengths: Ints, size: int) -> tuple[Ints, Ints]:
    """(times, exchanges) of sequences; 0 for those without tokens."""
    there = np.maximum(lengths, 1)
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
    for name in ("tp_size", "pp_size"):
        if getattr(times, name) != getattr(plan.constraints, name):
            raise PlanError(
                f"times are predicted for {name}={getattr(times, name)}, and the plan is for "
                f"{getattr(plan.constraints, name)}: make both from one layout"
            )
    if not 0 <= recomputed <= 1:
        raise PlanError(f"recomputed={recomputed!r} is the share of the layers that are recomputed: 0 to 1")
    if not 0 <= head <= times.linear:
        raise PlanError(
            f"head={head!r} FLOPs per token must lie between 0 and those of the whole model, {times.linear!r}"
        )
