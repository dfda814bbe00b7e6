"""The planner against other projects' planners: balance, cap violations and time.

    python benchmarks/bench_planner.py                         # table of all workloads
    python benchmarks/bench_planner.py --check                 # exit 1 if a figure exceeds its limit
    python benchmarks/bench_planner.py --lengths FILE --json out.json
    python benchmarks/bench_planner.py --verl PATH --slime PATH --trl PATH --prtpy
    python benchmarks/bench_planner.py --sweep --check --verl PATH --slime PATH --prime-rl PATH --nemo-rl PATH \
        --trl PATH --megatron PATH --lengths FILE --cache FOLDER       # thousands of cases; exit 1 if a peer is ahead

Times of the table are wall time; planning runs on one core. Limits of time are processor time over that of a fixed
compiled loop in the same run (`benchmarks/yardstick.py`).

Peers are called in this process through their own functions, from a checkout. Columns: `lockstep` = sum over k of the
largest cost among ranks / (total / dp) - 1; `rank` = largest rank total / mean - 1; `K` = micro-batches per rank;
`over` = packs above the cap.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

import numba
import numpy as np

from benchmarks.planner.cases import CAP, COST, WORKLOADS, Planner, measure, ours, sorted_groups, w1
from benchmarks.planner.checks import run_checks
from benchmarks.planner.peers import PEERS, PROJECTS, prtpy_planner, slime, trl, verl
from benchmarks.planner.sweep import PeerRuns, grid, run_sweep
from benchmarks.planner.sweep_report import behind, figures, show_sweep
from roll_batching.planning import PlanConstraints, plan_step
from roll_batching.planning.lengths_io import read_lengths


def compare(planners: dict[str, Planner], inputs: dict[str, list[np.ndarray]], dp: int, cap: int) -> list[dict]:
    rows = []
    for workload, batches in inputs.items():
        for name, planner in planners.items():
            try:
                measure(planner, batches[0], dp, cap)  # compiles and warms caches
                found = [measure(planner, lengths, dp, cap) for lengths in batches]
            except (AssertionError, ValueError) as error:
                rows.append({"workload": workload, "planner": name, "error": str(error)[:60]})
                continue
            row = {key: statistics.fmean(one[key] for one in found) for key in found[0] if key != "ms"}
            row["ms"] = statistics.median(one["ms"] for one in found)
            rows.append({"workload": workload, "planner": name, **row})
    return rows


def show(rows: list[dict]) -> None:
    print("| workload | planner | lockstep | rank total | K | over the cap | ms |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        head = f"| {row['workload']} | {row['planner']} |"
        if "error" in row:
            print(f"{head} {row['error']} | | | | |")
            continue
        lost = f" ({row['missing']:.0f} not placed)" if row["missing"] else ""
        print(
            f"{head} {1 + row['lockstep']:.4f} | {1 + row['rank']:.4f} | {row['K']:.2f} | "
            f"{row['over']:.0%}{lost} | {row['ms']:.1f} |"
        )


def show_checks(rows: list[dict], first: float) -> None:
    print(f"\nfirst call (compiling or loading the compiled code): {first:.2f} s of wall time")
    show_figures(rows)


def show_figures(rows: list[dict]) -> None:
    print("\n| figure | found | limit | holds |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row['figure']} | {row['found']:.7g} | {row['limit']} | {'yes' if row['holds'] else 'NO'} |")


def machine() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "processor": platform.processor() or platform.machine(),
    }


def sweep(options: argparse.Namespace) -> int:
    given = {project: root for project in PROJECTS if (root := getattr(options, project)) is not None}
    peers = {
        name: PeerRuns(name, given[peer.project], options.time_limit, options.cache)
        for name, peer in PEERS.items()
        if peer.project in given
    }
    cases = grid(options.sweep_seeds, options.lengths, options.sweep_every)
    rows = run_sweep(cases, peers, lambda text: print(text, file=sys.stderr))
    commits = {PEERS[name].project: run.commit for name, run in peers.items()}
    show_sweep(rows, commits, options.time_limit, options.sweep_every)
    checked = figures(rows)
    show_figures(checked)
    if options.json:
        found = {"machine": machine(), "commits": commits, "check": checked, "behind": behind(rows), "cases": rows}
        options.json.write_text(json.dumps(found))
    return 1 if options.check and not all(row["holds"] for row in checked) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure exceeds its limit")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--lengths", type=Path, action="append", default=[], help="file of lengths; repeatable")
    parser.add_argument("--batch", type=int, default=1024, help="sequences per batch of a file")
    parser.add_argument("--dp", type=int, default=8, help="data-parallel ranks in the table")
    parser.add_argument("--seeds", type=int, default=5, help="seeds per workload in the table")
    for project in PROJECTS:
        parser.add_argument(f"--{project.replace('_', '-')}", type=Path, help=f"path of a checkout of {project}")
    parser.add_argument("--prtpy", action="store_true", help="use the installed prtpy")
    parser.add_argument(
        "--sweep", action="store_true", help="run the large grid; with --check, exit 1 if a peer is ahead"
    )
    parser.add_argument("--sweep-seeds", type=int, default=20, help="lognormal seeds of the sweep")
    parser.add_argument("--sweep-every", type=int, default=1, help="run every N-th case of the sweep, in a fixed order")
    parser.add_argument("--time-limit", type=float, default=10.0, help="processor seconds of a peer per case")
    parser.add_argument("--cache", type=Path, help="folder that caches results of peers by commit and case")
    options = parser.parse_args()
    if options.sweep:
        missing = [project for project in PROJECTS if getattr(options, project) is None]
        if options.check and missing:
            parser.error(f"--sweep --check compares with every peer; name a checkout of {', '.join(missing)}")
        return sweep(options)
    started = time.perf_counter()
    plan_step(w1(0, 1024), PlanConstraints(dp_size=8, max_tokens=CAP), cost=COST)
    first = time.perf_counter() - started

    planners: dict[str, Planner] = {"roll-batching": ours, "FFD + cost-sorted groups": sorted_groups}
    for name, make in (("verl", verl), ("slime", slime), ("trl", trl)):
        root = getattr(options, name)
        if root is not None:
            planners[name] = make(root)
    if options.prtpy:
        planners["prtpy"] = prtpy_planner()
    inputs = {
        f"{name} n={n}": [make(seed, n) for seed in range(options.seeds)]
        for name, make in WORKLOADS.items()
        for n in (256, 1024)
    }
    rows = compare(planners, inputs, options.dp, CAP)
    for file in options.lengths:
        lengths = read_lengths(file)
        # Up to five batches in the order of the file; the cap is the power of two above the longest.
        cap = max(CAP, 1 << int(lengths.max() - 1).bit_length())
        n = min(options.batch, len(lengths))
        batches = [lengths[i : i + n] for i in range(0, min(len(lengths) - n + 1, 5 * n), n)]
        rows += compare(planners, {f"{file.stem} n={n} dp={options.dp} cap={cap}": batches}, options.dp, cap)
    show(rows)
    checked = run_checks() if options.check else []
    if checked:
        show_checks(checked, first)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "table": rows, "check": checked}, indent=1))
    return 0 if all(row["holds"] for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
