"""Step time of a plan on a cluster: passes of all ranks and stages, and what their time goes into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from roll_batching.errors import PlanError
from roll_batching.planning import Plan
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.pipeline.execution import Timeline, execute_plan, packs_of_ranks
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
    def waiting_share(self) -> float:
        """Share in which they wait, inside the step and at its end."""
        return self.bubble_share + self.end_wait_share

    @property
    def compute_share(self) -> float:
        """Share in which they compute; the four shares add up to 1."""
        return float((self.busy - self.exchange).mean()) / self.seconds

    @property
    def imbalance(self) -> float:
        """Slowest data-parallel rank / mean - 1."""
        return self.seconds / float(self.rank_ends.mean()) - 1

    def with_free_transfers(self) -> SimulatedStep:
        """The same passes where transfers between stages are free, as the planner and the report of a run assume."""
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
    work, packs = pack_work(plan, times, recomputed=recomputed, head=head), packs_of_ranks(plan)
    passes = 2 * plan.constraints.pp_size * plan.constraints.vpp_size * sum(map(len, packs))
    if passes > MOST_PASSES:
        raise PlanError(
            f"the step has {passes:,} forward and backward passes on all ranks and stages, and a simulation at most "
            f"{MOST_PASSES:,}: simulate fewer sequences or fewer ranks"
        )
    transfer = {"timed": work.transfer, "instant": np.zeros_like(work.transfer), "free": None}[transfers]
    timeline = execute_plan(plan, work.forward, work.backward, transfer=transfer)
    return SimulatedStep(plan=plan, work=work, packs=packs, timeline=timeline)
