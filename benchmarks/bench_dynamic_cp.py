"""A context-parallel size per pack beside one size for all and Megatron's schedulers: predicted step times.

    python benchmarks/bench_dynamic_cp.py --check --traces DIR --megatron-dev data_schedule_utils.py
    python benchmarks/bench_dynamic_cp.py --draws 1 --random 100
    python benchmarks/bench_dynamic_cp.py --plot PNG

Simulated: all step times come from `PackTimes`, whose rates of an H100 are estimates. Ratios are over our planner with
the size that the longest sequence needs ("needed"). `--traces` names the folder of mooncake_synthetic.csv (prompt and
response tokens of a public trace); without it, its settings are left out. `--megatron-dev` names
megatron/core/datasets/data_schedule_utils.py of Megatron's branch dev, whose own function is run; without it there is
no such column. `--random` adds settings with random lengths, ranks, caps and layouts.
`--plot` only draws one step of 512 sequences with a heavy tail on 32 ranks, by each scheduler on one time axis.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from roll_batching.known_warnings import hide_known_warnings

hide_known_warnings()  # before Megatron is imported

from benchmarks.dynamic_cp.peers import (
    Development,
    Schedule,
    aligned_packs,
    free_time,
    lockstep_time,
    released,
    require_all,
)
from benchmarks.dynamic_cp.picture import draw_steps
from benchmarks.dynamic_cp.random_settings import random_settings
from benchmarks.dynamic_cp.settings import PIPELINES, SETTINGS, Setting, draw
from benchmarks.table import Table
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.planning.cost_model import DEFAULT_COST
from roll_batching.planning.dynamic_cp.choices import SizeChoices
from roll_batching.planning.dynamic_cp.joint import joint_makespan
from roll_batching.planning.dynamic_cp.planner import plan_fixed
from roll_batching.planning.pack_times import PackTimes
from roll_batching.planning.problem import build_problem

NANOSECONDS = 1e9
Figures = dict[str, list[float]]


def constraints_of(setting: Setting, *, lockstep: bool) -> PlanConstraints:
    """Constraints of plans with sizes up to all ranks."""
    return PlanConstraints(
        dp_size=setting.ranks,
        tp_size=setting.tp,
        pp_size=setting.pp,
        max_tokens=setting.cap,
        max_cp_size=setting.ranks & -setting.ranks,
        fully_sharded=lockstep,
    )


def needed_size(lengths: np.ndarray, cap: int) -> int:
    """Context-parallel size that the longest sequence needs."""
    return 1 << max(0, int(np.ceil(np.log2(lengths.max() / cap))))


def compare(
    setting: Setting, lengths: np.ndarray, times: PackTimes, development: Development | None, *, lockstep: bool
) -> dict[str, float]:
    """Predicted seconds of a step by scheduler."""
    constraints = constraints_of(setting, lockstep=lockstep)
    report = plan_step(lengths, constraints, times=times).report
    problem = build_problem(lengths, constraints, cost=DEFAULT_COST)
    size = needed_size(lengths, setting.cap)
    needed = plan_fixed(problem, SizeChoices.of(problem, times), size.bit_length() - 1).step_time
    seconds = {
        "needed": needed / NANOSECONDS,
        "best": report.fixed_seconds or 0.0,
        "ours": report.predicted_seconds or 0.0,
    }
    if setting.pp > 1:
        if development is not None:
            schedule = development.schedule(lengths, setting.ranks, setting.cap)
            require_all(schedule, lengths)
            seconds["dev"] = _pipeline_time(schedule, setting, times) / NANOSECONDS
        return seconds

    def step(schedule: Schedule, *, barrier: bool = False) -> float:
        require_all(schedule, lengths)
        if lockstep:
            return lockstep_time(schedule, times) / NANOSECONDS
        return free_time(schedule, setting.ranks, times, barrier=barrier) / NANOSECONDS

    order = np.random.default_rng(0).permutation(len(lengths))
    seconds["Megatron fixed"] = step(aligned_packs(lengths[order], setting.ranks, size, setting.cap))
    if not lockstep:  # each of its groups ends with a barrier
        seconds["released"] = step(released(lengths, setting.ranks, setting.cap), barrier=True)
    if development is not None:
        seconds["dev"] = step(development.schedule(lengths, setting.ranks, setting.cap))
    return seconds


def _pipeline_time(schedule: Schedule, setting: Setting, times: PackTimes) -> int:
    """1F1B makespan of a schedule whose groups are consecutive ranks."""
    packs = [(ranks, lengths) for ranks, lengths, _ in schedule if lengths]
    for ranks, _ in packs:
        assert ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
    firsts, sizes = (np.array([f(ranks) for ranks, _ in packs], dtype=np.int64) for f in (min, len))
    durations = np.array([times.pack(np.array(lengths), len(ranks)) for ranks, lengths in packs], dtype=np.int64)
    return joint_makespan(firsts, sizes, durations, setting.ranks, setting.pp)


def mean_ratio(rows: list[dict[str, float]], one: str, other: str) -> float:
    """Mean seconds of `one` over those of `other`."""
    return sum(row[one] for row in rows) / sum(row[other] for row in rows)


def run(arguments: argparse.Namespace, *, overlapped: bool) -> Table:
    """Table of all settings with one kind of exchange."""
    development = None if arguments.megatron_dev is None else Development(arguments.megatron_dev)
    names = ["best", "Megatron fixed", "released", "dev", "ours"]
    exchange = "ring behind attention" if overlapped else "all-gather before attention"
    table = Table(
        f"Simulated step time over the needed size; keys and values by {exchange}",
        ["setting", "ranks meet", "needed, s", *names],
    )
    over_dev: list[float] = []
    kinds = [(setting, lockstep) for setting in SETTINGS for lockstep in (False, True)]
    for setting, lockstep in [*kinds, *((setting, False) for setting in PIPELINES)]:
        if setting.lengths == "mooncake" and arguments.traces is None:
            continue
        times = setting.times(overlapped=overlapped)
        rows = [
            compare(setting, draw(setting, seed, arguments.traces), times, development, lockstep=lockstep)
            for seed in range(arguments.draws)
        ]
        meet = "in a pipeline" if setting.pp > 1 else "at every index" if lockstep else "at the end"
        shown = [f"{mean_ratio(rows, name, 'needed'):.2f}" if name in rows[0] else "" for name in names]
        table.add(setting, meet, f"{np.mean([row['needed'] for row in rows]):.2f}", *shown)
        _require(table, setting, meet, rows)
        if "dev" in rows[0] and setting.pp == 1:
            over_dev.append(mean_ratio(rows, "ours", "dev"))
    if over_dev:
        mean = float(np.exp(np.mean(np.log(over_dev))))
        table.require(mean <= 0.85, f"{mean:.3f} of dev, geometric mean (at most 0.85)")
    return table


def _require(table: Table, setting: Setting, meet: str, rows: list[dict[str, float]]) -> None:
    name = f"{setting}, {meet}"
    best = max(row["ours"] / row["best"] for row in rows)
    table.require(best <= 1, f"{name}: {best:.3f} of the best single size, worst draw (at most 1)")
    if "dev" in rows[0]:
        ratio = mean_ratio(rows, "ours", "dev")
        table.require(ratio <= 1, f"{name}: {ratio:.3f} of dev (at most 1)")
    needed = mean_ratio(rows, "ours", "needed")
    if setting.pp > 1 and setting.lengths == "tail":
        table.require(needed <= 0.95, f"{name}: {needed:.3f} of the needed size (at most 0.95)")
    if setting.pp == 1 and setting.lengths == "tail" and setting.shape == "8B":
        table.require(needed <= 0.92, f"{name}: {needed:.3f} of the needed size (at most 0.92)")


def planning_time(arguments: argparse.Namespace) -> Table:
    """CPU seconds of a plan, after compilation. Planning is one thread; other work on the machine does not count."""
    table = Table("CPU seconds of a plan", ["sequences", "ranks", "least of 5, s"])
    for count, gpus, limit in ((1024, 256, 0.1), (16384, 1024, 2.0)):
        setting = Setting("8B", gpus, 2, 131072, 16384, "tail", count)
        lengths, times = draw(setting, 0, None), setting.times(overlapped=False)
        constraints = constraints_of(setting, lockstep=False)
        plan_step(lengths, constraints, times=times)
        seconds = []
        for _ in range(5):
            start = time.process_time()
            plan_step(lengths, constraints, times=times)
            seconds.append(time.process_time() - start)
        table.add(count, setting.ranks, f"{min(seconds):.3f}")
        table.require(min(seconds) <= limit, f"{count} sequences in {min(seconds):.3f} s (at most {limit})")
    return table


def plot(development: Development | None, path: Path) -> None:
    """Draw the steps of one setting by scheduler."""
    setting = Setting("8B", 64, 2, 131072, 16384, "tail", 512)
    lengths, constraints = draw(setting, 0, None), constraints_of(setting, lockstep=False)
    size, times = needed_size(lengths, setting.cap), setting.times(overlapped=False)
    draw_steps(setting, lengths, constraints, size, times, development, path)


def main() -> int:
    """Print the tables; with --check the exit status is 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=3, help="draws of lengths per setting")
    parser.add_argument("--traces", type=Path, help="folder of mooncake_synthetic.csv")
    parser.add_argument("--megatron-dev", type=Path, help="data_schedule_utils.py of Megatron's branch dev")
    parser.add_argument("--random", type=int, default=0, help="also plan this many random settings")
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw one step by each scheduler instead")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        plot(None if arguments.megatron_dev is None else Development(arguments.megatron_dev), arguments.plot)
        return 0
    tables = [planning_time(arguments), run(arguments, overlapped=False), run(arguments, overlapped=True)]
    if arguments.random:
        tables.append(random_settings(arguments.random))
    for table in tables:
        table.show()
    if arguments.traces is None:
        print("settings on the mooncake trace are left out: no --traces")
    return int(arguments.check and any(table.missed for table in tables))


if __name__ == "__main__":
    sys.exit(main())
