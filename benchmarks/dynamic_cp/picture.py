"""Predicted steps of several schedulers as a picture: the packs of every rank on one time axis, by size."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.dynamic_cp.peers import Development, Schedule, passes, planned, released, require_all
from benchmarks.dynamic_cp.settings import Setting
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.planning.cost_model import DEFAULT_COST
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.planner import plan_fixed
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.problem import build_problem


def draw_steps(
    setting: Setting,
    lengths: np.ndarray,
    constraints: PlanConstraints,
    size: int,
    times: PackTimes,
    development: Development | None,
    path: Path,
) -> None:
    """Write a picture of steps with one `size`, by Megatron's schedulers, and with our sizes per pack.

    Ranks meet inside packs and at the end of the step; the released scheduler has a barrier after each of its groups.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    schedules: dict[str, tuple[Schedule, bool]] = {
        f"one size ({size}), our planner": (_of_one_size(lengths, constraints, size, times), False),
        "Megatron-Core's BalancedCPScheduler": (released(lengths, setting.ranks, setting.cap), True),
    }
    if development is not None:
        schedules["Megatron's branch dev"] = development.schedule(lengths, setting.ranks, setting.cap), False
    schedules["a size per pack, our planner"] = planned(plan_step(lengths, constraints, times=times)), False
    colors = pyplot.get_cmap("viridis")
    levels = setting.ranks.bit_length()
    figure, axes = pyplot.subplots(
        len(schedules), figsize=(13, 2.6 * len(schedules) + 0.8), sharex=True, layout="constrained"
    )
    sizes: set[int] = set()
    for axis, (name, (schedule, barrier)) in zip(axes, schedules.items(), strict=True):
        require_all(schedule, lengths)
        busy = end = 0
        for ranks, start, stop in passes(schedule, setting.ranks, times, barrier=barrier):
            color = colors(1 - (len(ranks) - 1).bit_length() / levels)
            for rank in ranks:  # members of a group need not be neighbors
                axis.broken_barh([(start / 1e9, (stop - start) / 1e9)], (rank, 1), color=color, ec="white", lw=0.3)
            sizes.add(1 << (len(ranks) - 1).bit_length())
            busy, end = busy + len(ranks) * (stop - start), max(end, stop)
        axis.set_title(f"{name}: {end / 1e9:.2f} s, waiting {1 - busy / end / setting.ranks:.0%}", loc="left")
        axis.set_ylim(setting.ranks, 0)
        axis.set_ylabel("rank")
        axis.set_facecolor("0.92")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlim(left=0)
    axes[-1].set_xlabel("seconds of the step (simulated, not measured); gray: waiting")
    handles = [Patch(color=colors(1 - (size.bit_length() - 1) / levels), label=f"{size}") for size in sorted(sizes)]
    figure.legend(handles=handles, title="ranks of a pack", loc="outside right upper", frameon=False)
    figure.suptitle(f"{setting}: {len(lengths)} sequences of up to {lengths.max():,} tokens, cap {setting.cap:,}")
    figure.savefig(path, dpi=90)


def _of_one_size(lengths: np.ndarray, constraints: PlanConstraints, size: int, times: PackTimes) -> Schedule:
    problem = build_problem(lengths, constraints, cost=DEFAULT_COST)
    packs = plan_fixed(problem, SizeChoices.of(problem, times), size.bit_length() - 1)
    return [
        (tuple(range(first, first + size)), lengths[list(units)].tolist(), 0)
        for first, units in zip(packs.first_ranks, packs.units, strict=True)
    ]
