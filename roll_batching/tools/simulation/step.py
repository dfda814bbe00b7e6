"""Step time of a plan on a cluster: passes of all ranks and stages, and what their time goes into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning import Plan
from roll_batching.planning.pack_times import PackTimes
from roll_batching.tools.simulation.execution import JointPass, Timeline, execute
from roll_batching.tools.simulation.pack_work import PackWork, Seconds, pack_work

MOST_PASSES = 1_000_000
"""Most passes of all ranks and stages."""


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """Predicted forward and backward passes of one optimizer step, without gradient sums and the optimizer."""

    plan: Plan
    work: PackWork
    packs: Sequence[Sequence[int]]
    """`packs[dp_rank]`: micro-batches of the plan, in order."""
    timeline: Timeline
    """`timeline[dp_rank][stage]`: passes in order, with their times."""

    @cached_property
    def rank_ends(self) -> Seconds:
        """float64[dp]: end of the last pass of each data-parallel rank."""
        return np.array([max(passes[-1].end for passes in stages) for stages in self.timeline])

    @cached_property
    def busy(self) -> Seconds:
        """float64[dp]: seconds of passes of each data-parallel rank, equal on all its stages."""
        own = self.work.forward + self.work.backward
        return np.array([own[list(packs)].sum() for packs in self.packs])

    @cached_property
    def exchange(self) -> Seconds:
        """float64[dp]: part of `busy` in which keys and values travel."""
        return np.array([self.work.exchange[list(packs)].sum() for packs in self.packs])

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
        """Share in which they wait inside the step: for other pipeline stages, and for ranks that compute with them."""
        return max(0.0, float((self.rank_ends - self.busy).mean())) / self.seconds

    @property
    def end_wait_share(self) -> float:
        """Share in which they wait at the end of the step, for slower data-parallel ranks."""
        return 1 - float(self.rank_ends.mean()) / self.seconds

    @property
    def compute_share(self) -> float:
        """Share in which they compute; the four shares add up to 1."""
        return float((self.busy - self.exchange).mean()) / self.seconds

    @property
    def imbalance(self) -> float:
        """Slowest data-parallel rank / mean - 1."""
        return self.seconds / float(self.rank_ends.mean()) - 1


def simulate_plan(
    plan: Plan, times: PackTimes, *, recomputed: float = 0.0, head: float = 0.0, free_transfers: bool = False
) -> SimulatedStep:
    """The step of `plan`, predicted by `times`.

    `recomputed`: share of the layers whose forward pass runs again in the backward pass. `head`: FLOPs per token of the
    output head, which skips padding. `free_transfers`: activations take no time between pipeline stages, as the planner
    assumes. Raises `PlanError` for times of another layout, and for more than `MOST_PASSES` passes.
    """
    work = pack_work(plan, times, recomputed=recomputed, head=head)
    constraints = plan.constraints
    if plan.blocks is None:
        count = plan.num_micro_batches
        packs: list[list[int]] = [list(range(rank * count, (rank + 1) * count)) for rank in range(constraints.dp_size)]
    else:
        packs = plan.blocks.lists
    chunks = constraints.vpp_size
    passes = 2 * constraints.pp_size * chunks * sum(map(len, packs))
    if passes > MOST_PASSES:
        raise PlanError(
            f"the step has {passes:,} forward and backward passes on all ranks and stages, and a simulation at most "
            f"{MOST_PASSES:,}: simulate fewer sequences or fewer ranks"
        )
    lists, joint = _joint_passes(plan, packs, work, chunks, free_transfers)
    timeline = execute(lists, joint, stages=constraints.pp_size, chunks=chunks, group_size=plan.group_size)
    return SimulatedStep(plan=plan, work=work, packs=packs, timeline=timeline)


def _joint_passes(
    plan: Plan, packs: Sequence[Sequence[int]], work: PackWork, chunks: int, free_transfers: bool
) -> tuple[list[list[int]], list[JointPass]]:
    """Lists of passes by rank, and the passes: ranks with a common pack, or that meet at every index, are together."""
    lists: list[list[int]] = [[] for _ in packs]
    joint: list[JointPass] = []
    for index in range(max(map(len, packs))):
        for members in _together(plan, packs, index):
            own = [packs[rank][index] for rank in members]
            joint.append(
                JointPass(
                    ranks=tuple(members),
                    forward=float(work.forward[own].max()) / chunks,
                    backward=float(work.backward[own].max()) / chunks,
                    transfer=0.0 if free_transfers else float(work.transfer[own].max()),
                )
            )
            for rank in members:
                lists[rank].append(len(joint) - 1)
    return lists, joint


def _together(plan: Plan, packs: Sequence[Sequence[int]], index: int) -> list[list[int]]:
    """Ranks that compute their micro-batch `index` together; blocks of ranks are consecutive."""
    width = plan.constraints.meeting_ranks
    groups: list[list[int]] = []
    reach = 0
    for rank, own in enumerate(packs):
        if index >= len(own):
            continue
        if rank >= reach:
            groups.append([])
            reach = rank + 1
        groups[-1].append(rank)
        reach = max(reach, (rank // width + 1) * width)
        if plan.blocks is not None:
            pack = own[index]
            reach = max(reach, int(plan.blocks.first_ranks[pack] + plan.blocks.cp_sizes[pack]))
    return groups
