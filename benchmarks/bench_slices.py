"""Pipelines of whole packs, of model chunks and of slices: predicted waiting, processes that sleep and that compute.

    python benchmarks/bench_slices.py --check
    python benchmarks/bench_slices.py --only planned

Planned: step time over perfectly shared work of all ranks, by the costs that plans are made with, and the tokens whose
activations the first stage holds at once, in caps. Means of three seeds, 8 data-parallel ranks.

Sleeping: real processes run Megatron's schedule of whole packs and ours of slices with a tiny model, whose passes sleep
as long as the simulation says, divided by one factor. Transfers are instant, or arrive some time after they are sent.

Computing: four real processes train a small model on agents' samples of a sixteenth of their length. Counted are the
bytes that the first stage keeps alive for backward passes, parameters aside, and the processor time of each pass, which
is played back as if each stage had a device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from benchmarks.simulation.computing import ComputingJob, bubble_share, replay
from benchmarks.simulation.sleeping import SleepingJob, SleepingPlan, step_seconds
from benchmarks.table import Table
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.planning import LinearQuadraticCost, Plan, PlanConstraints, plan_step
from roll_batching.planning.pipeline.execution import execute_plan, packs_of_ranks, units_of_ranks
from roll_batching.planning.pipeline.schedule import stage_operations
from roll_batching.planning.pipeline.slices import slice_operations
from roll_batching.tools.simulation import Scenario, read_architecture, simulate_plan
from tests.support.ranks import run_ranks

COST = LinearQuadraticCost(fixed=24576 * 512)
RANKS, SEEDS = 8, 3
SECONDS = 40.0
"""Seconds of the longer step of a case with sleeping processes."""
DELAY = 0.05
"""Seconds of a delayed transfer between stages, in those of a mean forward pass of the plan."""
LIMIT = 0.05
"""Largest difference of a measured step from the simulated one."""
SCALE = 16
"""Samples of processes that compute are that much shorter than agents', and so is the cap."""
SMALL_MODEL = {
    "vocab_size": 256,
    "hidden_size": 256,
    "ffn_hidden_size": 768,
    "num_layers": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
}
STEPS = ("step", "measured step")
KEPT = 0.7
"""Most bytes that the first stage keeps with slices, over those with whole packs."""
APART = 0.05
"""Largest difference of a measured share of waiting from the predicted one."""


@dataclass(frozen=True)
class Workload:
    """Lengths of a step, and the slices of a pack of mean cost that kernels of an H100 still want."""

    name: str
    median: int
    sigma: float
    count: int
    cap: int
    slices: int
    limits: dict[int, tuple[float, float]]
    """By pipeline stages, the most that a step of slices may take over shared work, and the caps held at once."""

    def lengths(self, seed: int) -> np.ndarray:
        """int64[count]"""
        drawn = np.random.default_rng(seed).lognormal(np.log(self.median), self.sigma, self.count)
        return drawn.clip(16, self.cap).astype(np.int64)


WORKLOADS = (
    Workload("everyday (cap 16k)", 2400, 0.9, 512, 16384, 8, {4: (1.04, 2.0), 8: (1.08, 2.5)}),
    Workload("agents (to 64k)", 9000, 0.8, 256, 65536, 16, {4: (1.05, 2.8), 8: (1.09, 3.2)}),
)


def units_alive(plan: Plan) -> float:
    """Most caps of tokens whose activations the first stage of a rank holds at once."""
    constraints, most = plan.constraints, 0.0
    for of_rank in packs_of_ranks(plan):
        parts = [
            np.diff([0, *(() if plan.slices is None else plan.slices.of(m).tolist()), int(plan.tokens[m])])
            for m in of_rank
        ]
        tokens = np.concatenate(parts) / constraints.vpp_size
        if plan.slices is None:
            size = (len(of_rank), constraints.vpp_size, plan.group_size)
            operations = stage_operations(0, constraints.pp_size, *size)
        else:
            operations = slice_operations([len(part) for part in parts], 0, constraints.pp_size)
        change = [float(tokens[op.micro_batch]) * (-1 if op.is_backward else 1) for op in operations]
        most = max(most, *itertools.accumulate(change))
    return most / (constraints.max_tokens or 1)


def over_shared_work(plan: Plan) -> float:
    """Step time over the work of all ranks, perfectly shared; costs of sequences alone."""
    costs = (plan.costs if plan.slices is None else plan.slices.costs).astype(np.float64)
    timeline = execute_plan(plan, costs, 2 * costs)
    end = max(events[-1].end for of_rank in timeline for events in of_rank)
    return end / (3 * float(plan.costs.sum()) / plan.constraints.dp_size)


def planned(record: dict[str, Any]) -> Table:
    """Table of predicted steps."""
    table = Table(
        f"Step / shared work, DP {RANKS}, mean of {SEEDS} seeds (caps of tokens on the first stage)",
        ["samples", "PP", "whole packs", "VPP 2", "VPP 4", "slices", "slices of a pack"],
    )
    for workload, stages in itertools.product(WORKLOADS, (4, 8)):
        base = PlanConstraints(dp_size=RANKS, pp_size=stages, max_tokens=workload.cap)
        variants = {
            "whole packs": base,
            **{f"VPP {chunks}": replace(base, vpp_size=chunks) for chunks in (2, 4)},
            "slices": replace(base, pipeline_slices=workload.slices),
        }
        figures: dict[str, list[float]] = {}
        count = 0.0
        for name, constraints in variants.items():
            plans = [plan_step(workload.lengths(seed), constraints, cost=COST) for seed in range(SEEDS)]
            ratios, alive = [over_shared_work(plan) for plan in plans], [units_alive(plan) for plan in plans]
            figures[name] = [float(np.mean(ratios)), float(np.mean(alive))]
            if name == "slices":
                count = float(np.mean([plan.slices.counts.mean() for plan in plans if plan.slices is not None]))
        record[f"{workload.name}, PP {stages}"] = figures
        shown = [f"{ratio:.3f} ({alive:.1f})" for ratio, alive in figures.values()]
        table.add(workload.name, stages, *shown, f"{count:.1f}")
        most, caps = workload.limits[stages]
        ratio, alive = figures["slices"]
        name = f"{workload.name}, PP {stages}"
        table.require(ratio <= most, f"{name}: slices {ratio:.3f}, at most {most}")
        table.require(alive <= caps, f"{name}: {alive:.2f} caps on the first stage, at most {caps}")
        other = min(figures[variant][0] for variant in variants if variant != "slices")
        table.require(ratio < other, f"{name}: slices {ratio:.3f}, best other {other:.3f}")
    return table


def draw(path: Path) -> None:
    """The slowest rank's part of one step of agents over four stages: whole packs, model chunks, slices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    workload, stages = WORKLOADS[1], 4
    base = PlanConstraints(dp_size=RANKS, pp_size=stages, max_tokens=workload.cap)
    variants = {
        "whole packs (1F1B)": base,
        "4 model chunks a stage (VPP)": replace(base, vpp_size=4),
        "slices": replace(base, pipeline_slices=workload.slices),
    }
    figure, axes = pyplot.subplots(3, 1, figsize=(13, 7), sharex=True, layout="constrained")
    for axis, (name, constraints) in zip(axes, variants.items(), strict=True):
        plan = plan_step(workload.lengths(0), constraints, cost=COST)
        costs = (plan.costs if plan.slices is None else plan.slices.costs).astype(np.float64)
        work = 3 * float(plan.costs.sum()) / RANKS
        lanes = max(execute_plan(plan, costs / work, 2 * costs / work), key=lambda rank: max(e[-1].end for e in rank))
        end = max(events[-1].end for events in lanes)
        for stage, events in enumerate(lanes):
            axis.barh(stage, end, color="0.92", height=0.82, linewidth=0)
            for is_backward, colour in ((False, "#4c72b0"), (True, "#55a868")):
                spans = [(e.start, e.end - e.start) for e in events if e.is_backward == is_backward]
                axis.broken_barh(spans, (stage - 0.41, 0.82), facecolors=colour, edgecolor="white", linewidth=0.3)
        busy = sum(e.end - e.start for events in lanes for e in events) / len(lanes)
        title = f"{name}: {end:.2f} of the shared work, stages wait {1 - busy / end:.0%}, "
        axis.set_title(title + f"{units_alive(plan):.1f} caps of tokens on the first stage", loc="left", fontsize=11)
        axis.set_yticks(range(stages), [f"stage {stage}" for stage in range(stages)])
        axis.invert_yaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[-1].set_xlabel("time over the perfectly shared work of all ranks (predicted; blue forward, green backward)")
    figure.savefig(path, dpi=100)


def sleeping(repeats: int, record: dict[str, Any]) -> Table:
    """Table of steps of sleeping processes, whole packs beside slices."""
    table = Table(
        f"Sleeping processes: seconds of a step, simulated and measured (delay: {DELAY:.0%} of a mean forward pass)",
        ["PP", "transfers", "whole packs", "slices", "slices / whole, simulated", "measured"],
    )
    for stages in (4, 8):
        plans, simulated = sleeping_plans(stages)
        job = SleepingJob(plans=tuple(plans), stages=stages, repeats=repeats)
        measured = step_seconds(run_ranks(stages, "benchmarks.simulation.sleeping:train", job, timeout=1800))
        record[f"PP {stages}"] = {"simulated": simulated, "measured": measured}
        for first, transfers in ((0, "instant"), (2, "delayed")):
            whole, cut = zip(simulated[first : first + 2], measured[first : first + 2], strict=True)
            ratios = [f"{after / before:.3f}" for before, after in zip(whole, cut, strict=True)]
            table.add(stages, transfers, *(f"{one:.2f}, {other:.2f}" for one, other in (whole, cut)), *ratios)
            for name, (one, other) in (("whole packs", whole), ("slices", cut)):
                off = other / one - 1
                message = f"PP {stages}, {name}, transfers {transfers}: measured {off:+.1%} of the simulated step"
                table.require(abs(off) <= LIMIT, message)
    return table


def sleeping_plans(stages: int) -> tuple[list[SleepingPlan], list[float]]:
    """(Plans of whole packs, and of slices, with instant and with delayed transfers; seconds of their simulated steps)

    All are of the same agents' samples, slowed by one factor.
    """
    model = read_architecture("qwen3-1.7b").model_copy(update={"num_layers": 32})
    constraints = PlanConstraints(dp_size=1, pp_size=stages, max_tokens=65536, pipeline_slices=8)
    drawn = np.random.default_rng(stages).lognormal(np.log(9000), 0.8, 32)
    lengths = drawn.clip(256, 65536).astype(np.int64)
    cut = Scenario(lengths=lengths, constraints=constraints, architecture=model)
    whole = replace(cut, constraints=replace(constraints, pipeline_slices=1))
    steps = [simulate_plan(one.plan(), one.times, transfers="instant") for one in (whole, cut)]
    factor = SECONDS / max(step.seconds for step in steps)
    plans, simulated = [], []
    for share, step in itertools.product((0.0, DELAY), steps):
        (units,), _ = units_of_ranks(step.plan)
        packs = tuple(range(len(step.plan.tokens)))
        slices = None if step.plan.slices is None else tuple(step.plan.slices.counts.tolist())
        forward, backward = step.work.forward * factor, step.work.backward * factor
        delay = share * float(forward.mean())
        seconds = tuple(forward[units].tolist())
        plans.append(SleepingPlan(packs=(packs,), forward=seconds, slices=slices, delay=delay))
        (lanes,) = execute_plan(step.plan, forward, backward, transfer=np.full_like(forward, delay))
        simulated.append(max(events[-1].end for events in lanes))
    return plans, simulated


def computing(repeats: int, record: dict[str, Any]) -> Table:
    """Table of bytes and waiting of processes that compute, whole packs beside slices."""
    workload = WORKLOADS[1]
    job = ComputingJob(
        architecture=SMALL_MODEL,
        lengths=np.maximum(workload.lengths(0)[: workload.count // RANKS] // SCALE, 16),
        cap=workload.cap // SCALE,
        stages=4,
        slices=workload.slices,
        repeats=repeats,
    )
    table = Table(
        f"Computing processes, PP {job.stages}, cap {job.cap} tokens: first stage and waiting",
        ["plan", "units", "caps held", "MB held", "waiting, predicted", "measured", "step, predicted", "measured"],
    )
    ranks = run_ranks(job.stages, "benchmarks.simulation.computing:train", job, timeout=1500)
    figures: dict[str, dict[str, Any]] = {}
    for name, plan in job.plans().items():
        costs = (plan.costs if plan.slices is None else plan.slices.costs).astype(np.float64)
        (lanes,) = execute_plan(plan, costs, 2 * costs)
        end, passes = max(events[-1].end for events in lanes), [rank[name]["passes"] for rank in ranks]
        figures[name] = {
            "caps": units_alive(plan),
            "bytes": ranks[0][name]["bytes"],
            "waiting": 1 - 3 * float(costs.sum()) / end,
            "measured waiting": bubble_share(passes),
            "step": end,
            "measured step": replay(passes),
            "seconds": [[seconds for _, seconds in of_rank] for of_rank in passes],
        }
        one, whole = figures[name], figures["whole packs"]
        held = f"{one['caps']:.2f}", f"{one['bytes'] / 1e6:.0f}"
        waiting = f"{one['waiting']:.3f}", f"{one['measured waiting']:.3f}"
        table.add(name, len(costs), *held, *waiting, *(f"{one[key] / whole[key]:.3f}" for key in STEPS))
        off = one["measured waiting"] - one["waiting"]
        table.require(abs(off) <= APART, f"{name}: share of waiting {off:+.3f} from the predicted one")
    record["computing"] = figures
    kept = figures["slices"]["bytes"] / figures["fewest whole packs"]["bytes"]
    table.require(kept <= KEPT, f"slices hold {kept:.2f} of the bytes of the fewest whole packs (at most {KEPT})")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; with --check the exit status is 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=("planned", "sleeping", "computing"), help="one of the tables")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps of a plan; the shortest counts")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw one step three ways to this file, and end")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hide_known_warnings()
    if options.plot is not None:
        draw(options.plot)
        return 0
    record: dict[str, Any] = {}
    tables = []
    if options.only in (None, "planned"):
        tables.append(planned(record))
    if options.only in (None, "computing"):
        tables.append(computing(options.repeats, record))
    if options.only in (None, "sleeping"):
        tables.append(sleeping(options.repeats, record))
    for table in tables:
        table.show()
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1))
    return int(options.check and any(table.missed for table in tables))


if __name__ == "__main__":
    sys.exit(main())
