"""Our planner beside the peers that are given: quality, cap violations and time.

    python scripts/bench_planner.py                         # the table on all workloads
    python scripts/bench_planner.py --check                 # exit 0 exactly when every figure is reached
    python scripts/bench_planner.py --lengths FILE --json out.json
    python scripts/bench_planner.py --verl PATH --slime PATH --trl PATH --prtpy

Time is wall time. On a machine that others use at the same moment, `--slack 2` doubles the limits and
`--clock cpu` counts this process's CPU time instead (planning runs on one core); both are printed.

Peers are called through their own functions, in this process, from a checkout's path; what they exceed is
shown. Columns: `lockstep` = sum over k of the largest cost among ranks / (total / dp) - 1; `rank` = largest
rank total / mean - 1; `K` = micro-batches per rank; `over` = packs above the cap.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numba  # noqa: E402
import numpy as np  # noqa: E402

from roll_batching.planning import (  # noqa: E402
    LinearQuadraticCost,
    PlanConstraints,
    karmarkar_karp,
    pack_bins,
    plan_step,
)
from roll_batching.planning.arrange import small_at_ends  # noqa: E402
from roll_batching.planning.lengths_io import read_lengths  # noqa: E402
from roll_batching.planning.order import order_for_pipeline, pipeline_makespan  # noqa: E402

COST = LinearQuadraticCost(linear=24576, quadratic=1)
CAP = 16384
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
now = time.perf_counter
Bins = list[list[list[int]]]
Planner = Callable[[np.ndarray, int, int], Bins]


# Workloads ----------------------------------------------------------------------------------------------


def w1(seed: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(np.log(2400), 0.9, n), 16, CAP).astype(int)


def zipf(seed: int, n: int) -> np.ndarray:
    return np.clip(np.random.default_rng(seed).zipf(1.4, n) * 64, 16, CAP)


def bimodal(seed: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    short, long = rng.normal(600, 150, n), rng.normal(9000, 1500, n)
    return np.clip(np.where(rng.random(n) < 0.85, short, long), 16, CAP).astype(int)


def agentic(seed: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.clip(800 * (1 + rng.pareto(1.2, n)), 16, CAP).astype(int)


def all_equal(seed: int, n: int) -> np.ndarray:
    return np.full(n, 2000)


def one_giant(seed: int, n: int) -> np.ndarray:
    lengths = np.full(n, 300)
    lengths[seed % n] = CAP
    return lengths


WORKLOADS = {
    "W1": w1,
    "zipf": zipf,
    "bimodal": bimodal,
    "agentic": agentic,
    "all equal": all_equal,
    "one giant": one_giant,
}


# Planners -----------------------------------------------------------------------------------------------


def ours(lengths: np.ndarray, dp: int, cap: int) -> Bins:
    plan = plan_step(lengths, PlanConstraints(dp_size=dp, max_tokens=cap), cost=COST)
    return [[mb.samples.tolist() for mb in rank] for rank in plan.micro_batches]


def sorted_groups(lengths: np.ndarray, dp: int, cap: int) -> Bins:
    plan = plan_step(lengths, PlanConstraints(dp_size=dp, max_tokens=cap, algorithm="first_fit_decreasing"), cost=COST)
    return [[mb.samples.tolist() for mb in rank] for rank in plan.micro_batches]


def functions_of(path: Path, names: set[str]) -> types.SimpleNamespace:
    """Functions and classes of a file by name (and what they use), without importing the package around it."""
    tree = ast.parse(path.read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    needed, open_names = set(), set(names)
    while open_names:
        name = open_names.pop()
        needed.add(name)
        used = {one.id for one in ast.walk(defined[name]) if isinstance(one, ast.Name)}
        open_names |= (used & set(defined)) - needed
    wanted = [node for name, node in defined.items() if name in needed]
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    light = [node for node in imports if all(a.name in ("copy", "heapq", "math", "random") for a in node.names)]
    future = ast.parse("from __future__ import annotations").body
    # What the chosen definitions name from torch and logging; nothing of it computes.
    data = types.SimpleNamespace(IterableDataset=object)
    torch = types.SimpleNamespace(utils=types.SimpleNamespace(data=data))
    space: dict = {"torch": torch, "logger": logging.getLogger(path.stem)}
    exec(compile(ast.Module(future + light + wanted, []), str(path), "exec"), space)  # noqa: S102
    return types.SimpleNamespace(**{name: space[name] for name in names})


def verl(root: Path) -> Planner:
    """verl: Karmarkar-Karp of equal counts over DP, then over ceil(tokens / cap) micro-batches, sorted by cost."""
    peer = functions_of(root / "verl/utils/seqlen_balancing.py", {"karmarkar_karp", "get_seqlen_balanced_partitions"})

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        work = [COST.sequence(int(n)) for n in lengths]
        ranks = peer.get_seqlen_balanced_partitions(work, dp, equal_size=len(work) % dp == 0)
        count = max(-(-int(lengths[rank].sum()) // cap) for rank in ranks)
        bins = []
        for rank in ranks:
            parts = peer.get_seqlen_balanced_partitions([work[i] for i in rank], count, equal_size=False)
            chosen = [[rank[i] for i in part] for part in parts]
            chosen.sort(key=lambda members: -sum(work[i] for i in members))
            bins.append(chosen[::2][::-1] + chosen[1::2])
        return bins

    return plan


def slime(root: Path) -> Planner:
    """slime's default: first fit in the given order, Karmarkar-Karp of packs over DP by cost."""
    peer = functions_of(
        root / "slime/utils/seqlen_balancing.py",
        {
            "karmarkar_karp",
            "get_seqlen_balanced_partitions",
            "first_fit_pack",
            "expand_bins_by_splitting",
        },
    )

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        sizes = [int(n) for n in lengths]
        packs = peer.first_fit_pack(sizes, cap)
        target = -(-len(packs) // dp) * dp
        if target != len(packs):
            peer.expand_bins_by_splitting(packs, target, sizes)
        work = [sum(COST.sequence(sizes[i]) for i in members) for members in packs]
        ranks = peer.get_seqlen_balanced_partitions(work, dp, equal_size=True)
        return [[packs[i] for i in rank] for rank in ranks]

    return plan


def trl(root: Path) -> Planner:
    """TRL's token-budget batcher: online, a sample joins the row with the smallest sum of L^2 that has room."""
    peer = functions_of(
        root / "trl/experimental/async_grpo/async_grpo_trainer.py",
        {"TokenBudgetBatcher", "_balance_by_squared_length"},
    )

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        samples = [{"index": i, "input_ids": range(int(n))} for i, n in enumerate(lengths)]
        steps = list(peer.TokenBudgetBatcher(samples, dp, cap))
        return [[[sample["index"] for sample in step[rank]] for step in steps] for rank in range(dp)]

    return plan


def prtpy_planner() -> Planner:
    """prtpy's first-fit-decreasing bins, dealt round-robin (it knows no ranks)."""
    import prtpy

    def plan(lengths: np.ndarray, dp: int, cap: int) -> Bins:
        items = {i: int(n) for i, n in enumerate(lengths)}
        packs = prtpy.pack(algorithm=prtpy.packing.first_fit_decreasing, binsize=cap, items=items)
        packs += [[] for _ in range(-len(packs) % dp)]
        return [packs[rank::dp] for rank in range(dp)]

    return plan


# Measures -----------------------------------------------------------------------------------------------


def measure(planner: Planner, lengths: np.ndarray, dp: int, cap: int) -> dict[str, float]:
    start = now()
    bins = planner(lengths, dp, cap)
    seconds = now() - start
    packs = [pack for rank in bins for pack in rank if pack]
    if not packs:
        raise ValueError(f"placed none of {len(lengths)} sequences")
    placed = sorted(i for pack in packs for i in pack)
    costs = [[sum(COST.sequence(int(lengths[i])) for i in pack) for pack in rank] for rank in bins]
    count = max(map(len, costs))
    table = np.array([rank + [0] * (count - len(rank)) for rank in costs], dtype=float)
    mean = sum(COST.sequence(int(n)) for n in lengths) / dp
    return {
        "lockstep": float(table.max(axis=0).sum() / mean - 1),
        "rank": float(table.sum(axis=1).max() / mean - 1),
        "K": count,
        "K_minus_bound": count - -(-int(lengths.sum()) // (dp * cap)),
        "over": sum(int(lengths[pack].sum()) > cap for pack in packs) / len(packs),
        "missing": len(lengths) - len(set(placed)),
        "ms": 1000 * seconds,
    }


def compare(planners: dict[str, Planner], inputs: dict[str, list[np.ndarray]], dp: int, cap: int) -> list[dict]:
    rows = []
    for workload, batches in inputs.items():
        for name, planner in planners.items():
            try:
                measure(planner, batches[0], dp, cap)  # compiled, caches warm
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


# Check --------------------------------------------------------------------------------------------------


def median_seconds(call: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = now()
        call()
        times.append(now() - start)
    return statistics.median(times)


class Checks:
    def __init__(self, slack: float) -> None:
        self.slack = slack
        self.rows: list[dict] = []

    def value(self, name: str, found: float, limit: float) -> None:
        self.rows.append({"figure": name, "found": found, "limit": limit, "holds": found <= limit})

    def seconds(self, name: str, found: float, limit: float) -> None:
        self.value(f"{name}, s (median of 5)", found, limit * self.slack)


def check_balance(checks: Checks) -> None:
    for n, lockstep, rank in ((1024, 0.004, 0.0005), (256, 0.021, 0.005)):
        found = [measure(ours, w1(seed, n), 8, CAP) for seed in range(30)]
        checks.value(f"W1 n={n}: lockstep", statistics.fmean(one["lockstep"] for one in found), lockstep)
        checks.value(f"W1 n={n}: rank total", statistics.fmean(one["rank"] for one in found), rank)
        checks.value(
            f"W1 n={n}: share of seeds above the bound on K",
            sum(one["K_minus_bound"] > 0 for one in found) / 30,
            0.05,
        )
        checks.value(f"W1 n={n}: K above its bound, worst", max(one["K_minus_bound"] for one in found), 1)
        checks.value(f"W1 n={n}: packs over the cap", max(one["over"] for one in found), 0)


def check_speed(checks: Checks) -> None:
    constraints = PlanConstraints(dp_size=8, max_tokens=CAP)
    lengths = w1(0, 1024)
    checks.seconds("plan, 1,024 into 8", median_seconds(lambda: plan_step(lengths, constraints, cost=COST)), 0.05)
    for n, dp, limit in ((16384, 256, 0.1), (1_000_000, 1024, 3.0)):
        many = w1(0, n)
        wide = PlanConstraints(dp_size=dp, max_tokens=CAP)
        plan = plan_step(many, wide, cost=COST)
        bound = -(-int(many.sum()) // (dp * CAP))
        costs = plan.costs.reshape(dp, -1).sum(axis=1)
        most = max(float(costs.mean()), float(COST.sequence(int(many.max()))))
        checks.value(f"{n:,} into {dp:,}: rank total", float(costs.max()) / most, 1.001)
        checks.value(f"{n:,} into {dp:,}: K above its bound", plan.num_micro_batches - bound, 1)
        checks.value(f"{n:,} into {dp:,}: packs over the cap", int((plan.tokens > CAP).sum()), 0)
        took = median_seconds(lambda many=many, wide=wide: plan_step(many, wide, cost=COST))
        checks.seconds(f"plan, {n:,} into {dp:,}", took, limit)
    weights = w1(0, 16384)
    karmarkar_karp(weights[:64], 4)
    checks.seconds("karmarkar_karp, 16,384 in 256", median_seconds(lambda: karmarkar_karp(weights, 256)), 0.2)
    million = w1(0, 1_000_000)
    took = median_seconds(lambda: pack_bins(million, CAP, "first_fit_decreasing"), 5)
    checks.seconds("first_fit_decreasing, 1e6", took, 2.0)


def check_bins(checks: Checks) -> None:
    rng = np.random.default_rng(0)
    worse = 0
    for _ in range(10_000):
        cap = int(rng.integers(10, 200))
        sizes = rng.integers(1, cap + 1, int(rng.integers(1, 40)))
        worse += len(pack_bins(sizes, cap, "best")) > len(pack_bins(sizes, cap, "first_fit_decreasing"))
    checks.value('"best" needs more bins than first-fit-decreasing, of 10,000', worse, 0)


def check_order(checks: Checks) -> None:
    for stages, count, least in ((4, 16, 0.010), (8, 32, 0.009)):
        for kind in ("normal", "lognormal"):
            gains, times = [], []
            for seed in range(30):
                rng = np.random.default_rng(seed)
                drawn = (
                    np.maximum(rng.normal(1, 0.4, count), 0.1)
                    if kind == "normal"
                    else rng.lognormal(0, np.sqrt(np.log(1.16)), count)
                )
                costs = (drawn * 1e6).astype(np.int64)
                start = now()
                order = order_for_pipeline(costs, stages=stages)
                times.append(now() - start)
                baseline = pipeline_makespan(costs[small_at_ends(costs)], stages=stages)
                gains.append(1 - pipeline_makespan(costs[order], stages=stages) / baseline)
            name = f"order pp{stages} m{count} {kind}"
            checks.value(f"{name}: missing from the mean gain asked", least - statistics.fmean(gains), 0)
            checks.value(f"{name}: worst loss against small-at-ends", -min(gains), 0)
            checks.seconds(name, statistics.median(times), 0.1)


def run_checks(slack: float, clock: str, first: float) -> list[dict]:
    pack_bins([3, 2, 1], 4)
    checks = Checks(slack)
    for part in (check_balance, check_speed, check_bins, check_order):
        part(checks)
    print(f"\nfirst call (compiling or loading the compiled code): {first:.2f} s; {clock} time, limits x {slack:g}")
    print("| figure | found | limit | holds |\n|---|---|---|---|")
    for row in checks.rows:
        print(f"| {row['figure']} | {row['found']:.5g} | {row['limit']:.5g} | {'yes' if row['holds'] else 'NO'} |")
    return checks.rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="hold every figure; exit 1 when one is missed")
    parser.add_argument("--slack", type=float, default=1.0, help="multiply time limits (2 on a noisy machine)")
    parser.add_argument("--json", type=Path, help="write all rows here")
    parser.add_argument("--lengths", type=Path, action="append", default=[], help="a file of lengths")
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5, help="seeds per workload in the table")
    parser.add_argument("--verl", type=Path, help="path of a verl checkout")
    parser.add_argument("--slime", type=Path, help="path of a slime checkout")
    parser.add_argument("--trl", type=Path, help="path of a TRL checkout")
    parser.add_argument("--prtpy", action="store_true", help="use the installed prtpy")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what times are measured in")
    options = parser.parse_args()
    global now
    now = CLOCKS[options.clock]
    started = now()
    plan_step(w1(0, 1024), PlanConstraints(dp_size=8, max_tokens=CAP), cost=COST)
    first = now() - started

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
        # Batches of 1,024 in the file's order; the cap is the power of two that holds the longest.
        cap = max(CAP, 1 << int(lengths.max() - 1).bit_length())
        batches = [lengths[i : i + 1024] for i in range(0, min(len(lengths) - 1023, 5 * 1024), 1024)]
        rows += compare(planners, {f"{file.stem} n=1024 cap={cap}": batches or [lengths]}, options.dp, cap)
    show(rows)
    checked = run_checks(options.slack, options.clock, first) if options.check else []
    if options.json:
        machine = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "numba": numba.__version__,
            "processor": platform.processor() or platform.machine(),
        }
        options.json.write_text(
            json.dumps({"machine": machine, "clock": options.clock, "table": rows, "check": checked}, indent=1)
        )
    return 0 if all(row["holds"] for row in checked) else 1


if __name__ == "__main__":
    sys.exit(main())
