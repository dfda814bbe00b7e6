"""Predictions of the simulation beside measured steps: sleeping processes on this machine, and recorded GPU steps.

    python benchmarks/bench_simulation.py --check
    python benchmarks/bench_simulation.py --only recorded

Sleeping: real processes run Megatron's schedules through our strategies with a tiny model. Each pass sleeps as long as
the simulation says, divided by one factor. So the test is of the order of passes and transfers, of the waiting between
stages and between ranks of a pack, not of the rates. Two plans of the same lengths are compared: the ratio of their
measured steps, and of their predicted ones.

Recorded: steps of the Qwen3-1.7B shape on one H100 (`results/`), padded, dynamic and packed. The rates are estimates
that were not fitted to these steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from benchmarks.simulation.recorded import RESULTS, Predicted, predict, recorded_modes
from benchmarks.simulation.sleeping import SleepingJob, SleepingPlan, step_seconds
from benchmarks.table import Table
from roll_batching.known_warnings import hide_known_warnings
from roll_batching.planning import PlanConstraints
from roll_batching.planning.pipeline.ordering import slowest_makespan
from roll_batching.tools.simulation import Scenario, SimulatedStep, read_architecture, simulate_plan
from tests.support.ranks import run_ranks

LIMIT = 0.10
"""Limit of `--check`: largest difference of a predicted ratio from the measured one."""
SECONDS = 16.0
"""Seconds of the longer plan of a case: far above what passes compute beside their sleep, also on a busy machine."""


@dataclass(frozen=True)
class Case:
    """Two plans of the same lengths in one layout."""

    name: str
    one: tuple[str, Scenario]
    other: tuple[str, Scenario]


def lengths_of(count: int, seed: int, longest: int) -> np.ndarray:
    """Lengths with a heavy tail, int64[count]."""
    return np.random.default_rng(seed).lognormal(np.log(1500), 1.2, count).clip(32, longest).astype(np.int64)


def cases() -> list[Case]:
    """Pipelines of four and eight stages with and without virtual stages; packs with sizes of their own."""
    model = read_architecture("qwen3-1.7b").model_copy(update={"num_layers": 32})
    found = []
    for (stages, count), chunks in itertools.product(((4, 40), (8, 60)), (1, 2)):
        constraints = PlanConstraints(dp_size=1, pp_size=stages, vpp_size=chunks, max_tokens=8192)
        base = Scenario(lengths=lengths_of(count, stages, 8192), constraints=constraints, architecture=model)
        given = replace(base, constraints=replace(constraints, algorithm="none"))
        schedule = "1F1B" if chunks == 1 else f"interleaved, {chunks} chunks"
        found.append(Case(f"PP {stages}, {schedule}", ("load_balance", base), ("next fit", given)))
    for ranks, stages in ((4, 1), (2, 4)):
        constraints = PlanConstraints(dp_size=ranks, pp_size=stages, max_tokens=8192, max_cp_size=ranks)
        lengths = lengths_of(24, 7, 8192 * ranks)
        dynamic = Scenario(lengths=lengths, constraints=constraints, architecture=model)
        single = dynamic.single_sizes()[ranks]
        name = f"DP {ranks}" + (f" x PP {stages}, 1F1B" if stages > 1 else "")
        found.append(Case(name, ("a size per pack", dynamic), (f"CP {ranks} for all", single)))
    return found


def sleeping_plan(step: SimulatedStep, factor: float, ranks: int) -> SleepingPlan:
    """The packs of a step for `ranks` data-parallel ranks, and their forward passes slowed by `factor`."""
    packs = [tuple(packs) for packs in step.units]
    packs = [packs[rank * len(packs) // ranks] for rank in range(ranks)]  # of a single CP size, ranks share packs
    return SleepingPlan(packs=tuple(packs), forward=tuple((step.work.forward * factor).tolist()))


def planner_seconds(step: SimulatedStep) -> float:
    """The step as the planner predicts it: a pass starts as soon as its input is there, transfers are free."""
    constraints, plan = step.plan.constraints, step.plan
    if constraints.pp_size == 1 or plan.blocks is not None:
        return plan.report.predicted_seconds or step.seconds
    table = np.rint(step.work.forward * 1e9).astype(np.int64).reshape(constraints.dp_size, -1)
    makespan = slowest_makespan(
        table, stages=constraints.pp_size, chunks=constraints.vpp_size, group_size=plan.group_size
    )
    return makespan / constraints.vpp_size / 1e9


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Predicted and measured seconds of both plans of a case, at the sleeping processes' pace."""
    layout = case.one[1].constraints
    steps = []
    for _, scenario in (case.one, case.other):
        # Sleeping packs have a few tokens: their transfers take no time.
        steps.append(simulate_plan(scenario.plan(), scenario.times, transfers="instant"))
    factor = SECONDS / max(step.seconds for step in steps)
    job = SleepingJob(
        plans=tuple(sleeping_plan(step, factor, layout.dp_size) for step in steps),
        stages=layout.pp_size,
        chunks=layout.vpp_size,
        max_cp_size=layout.max_cp_size,
        repeats=repeats,
    )
    results = run_ranks(job.processes, "benchmarks.simulation.sleeping:train", job, timeout=600)
    return {
        "predicted": [step.seconds * factor for step in steps],
        "planner": [planner_seconds(step) * factor for step in steps],
        "measured": step_seconds(results),
    }


def sleeping(repeats: int, only: str | None, record: dict[str, Any]) -> Table:
    """Table of the cases with sleeping processes."""
    table = Table(
        "Sleeping processes: step times in seconds, and their ratio (second plan / first)",
        ["layout", "plans", "predicted", "measured", "ratio predicted", "ratio measured", "ratio of the planner"],
    )
    for case in cases():
        if only is not None and only not in case.name:
            continue
        figures = measure(case, repeats)
        record[case.name] = figures
        ratios = {name: pair[1] / pair[0] for name, pair in figures.items()}
        table.add(
            case.name,
            f"{case.one[0]}, {case.other[0]}",
            *(" and ".join(f"{value:.2f}" for value in figures[name]) for name in ("predicted", "measured")),
            *(f"{ratios[name]:.3f}" for name in ("predicted", "measured", "planner")),
        )
        _require(table, case.name, ratios["predicted"], ratios["measured"])
        print(table.rows[-1], flush=True)
    return table


def recorded(record: dict[str, Any]) -> Table:
    """Table of recorded steps on an H100."""
    table = Table(
        f"Recorded on one H100 ({RESULTS.name}): forward, backward and loss of a step, seconds",
        ["mode", "predicted", "recorded", "predicted / recorded", "predicted, head on padding too"],
    )
    modes = recorded_modes()
    predicted: dict[str, Predicted] = {}
    for mode, figures in modes.items():
        one = predicted[mode] = predict(mode)
        same = (one.real_tokens, one.computed_tokens) == (figures["real_tokens"], figures["computed_tokens"])
        table.require(same, f"{mode}: {one.real_tokens:,} real, {one.computed_tokens:,} computed tokens, as recorded")
        measured = figures["seconds_of_passes"]
        shares = f"{one.seconds / measured:.2f}"
        table.add(mode, f"{one.seconds:.3f}", f"{measured:.3f}", shares, f"{one.seconds_with_padded_head:.3f}")
    record["recorded"] = {mode: asdict(one) for mode, one in predicted.items()}
    for one_mode, other in itertools.combinations(modes, 2):
        first, second = predicted[one_mode], predicted[other]
        measured = modes[one_mode]["seconds_of_passes"] / modes[other]["seconds_of_passes"]
        _require(table, f"{one_mode} / {other}", first.seconds / second.seconds, measured)
        ratio = first.seconds_with_padded_head / second.seconds_with_padded_head
        record[f"{one_mode} / {other}, head on padding too"] = ratio / measured - 1
        print(f"{one_mode} / {other}: {ratio / measured - 1:+.1%} if the head computed padding")
    return table


def _require(table: Table, name: str, predicted: float, measured: float) -> None:
    off = predicted / measured - 1
    table.require(
        abs(off) <= LIMIT, f"{name}: predicted ratio {predicted:.3f}, measured {measured:.3f}, {off:+.1%} (at most 10%)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; with --check the exit status is 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", choices=("sleeping", "recorded"), help="one of the two comparisons")
    parser.add_argument("--case", help="sleeping: cases whose name contains this")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps of a plan; the shortest counts")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hide_known_warnings()
    record: dict[str, Any] = {}
    tables = []
    if options.only != "recorded":
        tables.append(sleeping(options.repeats, options.case, record))
    if options.only != "sleeping":
        tables.append(recorded(record))
    for table in tables:
        table.show()
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1))
    return int(options.check and any(table.missed for table in tables))


if __name__ == "__main__":
    sys.exit(main())
