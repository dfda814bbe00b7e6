"""Figures of the planner, each with its limit."""

from __future__ import annotations

import heapq
import itertools
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import ROOT
from benchmarks.planner.cases import CAP, COST, heavy_tailed, measure, ours, ours_with_experts, w1
from benchmarks.yardstick import yard, yards
from roll_batching.planning import PlanConstraints, karmarkar_karp, pack_bins, plan_step, quadratic_cost
from roll_batching.planning.pipeline.ordering import order_for_pipeline, pipeline_makespan, small_at_ends
from roll_batching.planning.pipeline.schedule import dependency_of, stage_operations


class Checks:
    def __init__(self) -> None:
        self.rows: list[dict] = []

    def at_most(self, name: str, found: float, limit: float) -> None:
        self.rows.append({"figure": name, "found": found, "limit": f"<= {limit:g}", "holds": found <= limit})

    def at_least(self, name: str, found: float, limit: float) -> None:
        self.rows.append({"figure": name, "found": found, "limit": f">= {limit:g}", "holds": found >= limit})

    def yards(self, name: str, calls: Sequence[Callable[[], object]], limit: float, repeats: int = 5) -> None:
        """The median time of `calls`, in units of the loop in `benchmarks.yardstick`."""
        self.at_most(f"{name}, time / yardstick", statistics.median(yards(call, repeats) for call in calls), limit)


def check_balance(checks: Checks) -> None:
    for n, lockstep, with_experts in ((1024, 1.005, 1.004), (256, 1.035, 1.021)):
        for planner, name, limit, rank in (
            (ours, f"W1 n={n}", lockstep, 1.0005),
            (ours_with_experts, f"W1 n={n} ep=8", with_experts, with_experts),
        ):
            found = [measure(planner, w1(seed, n), 8, CAP) for seed in range(30)]
            above = [one["K_minus_bound"] for one in found]
            totals = [1 + one["rank"] for one in found]
            if planner is ours:
                checks.at_most(f"{name}: rank total, worst seed", max(totals), rank)
            checks.at_most(f"{name}: rank total", statistics.fmean(totals), rank)
            checks.at_most(f"{name}: lockstep", 1 + statistics.fmean(one["lockstep"] for one in found), limit)
            checks.at_least(f"{name}: share of seeds with K = LB", above.count(0) / len(above), 0.95)
            checks.at_most(f"{name}: worst K - LB", max(above), 1)
            checks.at_most(f"{name}: share of packs over the cap", max(one["over"] for one in found), 0)


def check_heavy_tails(checks: Checks) -> None:
    """Rank totals of `auto` against a planner that balances only totals, with costs L^2."""
    found, beside, lockstep, more = [], [], {"auto": [], "rank_total": []}, 0
    for seed in range(11):
        plans = {
            objective: plan_step(
                heavy_tailed(seed, 1024),
                PlanConstraints(dp_size=8, max_tokens=8 * CAP, objective=objective),
                cost=quadratic_cost(),
            )
            for objective in lockstep
        }
        found.append(1 + plans["auto"].report.imbalance)
        # One giant sequence can cost more than the mean rank total.
        beside.append(found[-1] / max(1.0005, 1 + plans["rank_total"].report.imbalance))
        more += plans["auto"].num_micro_batches > plans["rank_total"].num_micro_batches
        for objective, plan in plans.items():
            lockstep[objective].append(1 + plan.report.lockstep_imbalance)
    name = "heavy tails n=1024, L^2"
    checks.at_most(f"{name}: rank total, median of 11 seeds", statistics.median(found), 1.0005)
    checks.at_most(f"{name}: rank total / the larger of 1.0005 and that by totals alone, worst seed", max(beside), 1)
    checks.at_most(f"{name}: seeds with more micro-batches than by rank totals alone", more, 0)
    alone = statistics.fmean(lockstep["rank_total"])
    checks.at_most(
        f"{name}: lockstep, over {alone:.3f} by rank totals alone", statistics.fmean(lockstep["auto"]) / alone, 1
    )


def check_scale(checks: Checks) -> None:
    constraints = PlanConstraints(dp_size=8, max_tokens=CAP)
    for n, limit in ((64, 1.7), (256, 6.5), (1024, 15)):
        calls = [partial(plan_step, w1(seed, n), constraints, cost=COST) for seed in range(11)]
        checks.yards(f"plan, {n:,} into 8 (11 seeds)", calls, limit)
    checks.at_most("compiling in a fresh environment, time / yardstick", compiling() / yard(), 4000)
    for n, dp, limit in ((16384, 256, 80), (1_000_000, 1024, 1500)):
        many = w1(0, n)
        wide = PlanConstraints(dp_size=dp, max_tokens=CAP)
        plan = plan_step(many, wide, cost=COST)
        bound = -(-int(many.sum()) // (dp * CAP))
        costs = plan.costs.reshape(dp, -1).sum(axis=1)
        most = max(float(costs.mean()), float(COST.sequence(int(many.max()))))
        checks.at_most(f"{n:,} into {dp:,}: rank total", float(costs.max()) / most, 1.001)
        checks.at_most(f"{n:,} into {dp:,}: K - LB", plan.num_micro_batches - bound, 1)
        checks.at_most(f"{n:,} into {dp:,}: packs over the cap", int((plan.tokens > CAP).sum()), 0)
        checks.yards(f"plan, {n:,} into {dp:,}", [partial(plan_step, many, wide, cost=COST)], limit)
    if sys.platform == "linux":
        small, large = (peak_memory(n) / n for n in (250_000, 1_000_000))
        checks.at_most(f"bytes per sequence: {large:.0f} of 1,000,000 over {small:.0f} of 250,000", large / small, 1.1)


COMPILE = """
import time
from roll_batching.planning import PlanConstraints, plan_step
start = time.process_time()
plan_step(list(range(1, 300)), PlanConstraints(dp_size=8, max_tokens=1024))
print(time.process_time() - start)
"""


def compiling() -> float:
    """Seconds of processor time to compile: a first plan without a cache, minus a plan with a cache."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {**os.environ, "NUMBA_CACHE_DIR": f"{folder}/cache", "TMPDIR": folder, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", COMPILE]
        first, later = (
            float(subprocess.run(command, env=fresh, capture_output=True, text=True, check=True).stdout)
            for _ in range(2)
        )
    return first - later


def peak_memory(n: int) -> int:
    """Peak bytes that planning n sequences adds to a new process; Linux only."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_added_memory, (n,))


def _added_memory(n: int) -> int:
    constraints = PlanConstraints(dp_size=n // 1000, max_tokens=CAP)
    plan_step(w1(0, 1024), constraints, cost=COST)  # compile first, because compiling takes memory
    lengths = w1(0, n)
    Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM
    before = _status("VmRSS")
    plan_step(lengths, constraints, cost=COST)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def check_partition(checks: Checks) -> None:
    rng = np.random.default_rng(0)
    worst = 0.0
    for case in range(200):
        n, k = int(rng.integers(1, 200)), int(rng.integers(1, 20))
        weights = rng.integers(0, 1000, n) if case % 2 else w1(case, n)
        largest = max(int(weights[part].sum()) for part in karmarkar_karp(weights, k) if part)
        worst = max(worst, largest / max(largest_by_heap(weights, k), 1))
    checks.at_most("karmarkar_karp: largest sum over a plain heap's, worst of 200", worst, 1.001)
    weights = w1(0, 16384)
    checks.yards("karmarkar_karp, 16,384 in 256", [partial(karmarkar_karp, weights, 256)], 100)


def largest_by_heap(weights: np.ndarray, k: int) -> int:
    """Largest sum of the largest differencing method, implemented with a heap."""
    heap = [(-int(weight), tie, [int(weight)] + [0] * (k - 1)) for tie, weight in enumerate(weights)]
    heapq.heapify(heap)
    for tie in range(len(weights), 2 * len(weights) - 1):
        left, right = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        sums = sorted((a + b for a, b in zip(left, reversed(right), strict=True)), reverse=True)
        heapq.heappush(heap, (sums[-1] - sums[0], tie, sums))
    return heap[0][2][0]


def check_bins(checks: Checks) -> None:
    rng = np.random.default_rng(0)
    worse = 0
    for _ in range(10_000):
        cap = int(rng.integers(10, 200))
        sizes = rng.integers(1, cap + 1, int(rng.integers(1, 40)))
        worse += len(pack_bins(sizes, cap, "best")) > len(pack_bins(sizes, cap, "first_fit_decreasing"))
    checks.at_most('cases of 10,000 where "best" needs more bins than first-fit-decreasing', worse, 0)
    million = w1(0, 1_000_000)
    calls = [partial(pack_bins, million, CAP, "first_fit_decreasing")]
    checks.yards("first_fit_decreasing, 1,000,000 items", calls, 1000)


def pipeline_costs(kind: str, count: int, seed: int) -> np.ndarray:
    """Costs with mean 1 and coefficient of variation 0.4, times a million, as int64."""
    rng = np.random.default_rng(seed)
    if kind == "normal":
        drawn = np.maximum(rng.normal(1, 0.4, count), 0.1)
    else:
        drawn = rng.lognormal(0, np.sqrt(np.log(1.16)), count)
    return (drawn * 1e6).astype(np.int64)


def check_order(checks: Checks) -> None:
    for stages, count, chunks, least in ((4, 16, 1, 1.0), (8, 32, 1, 0.9), (4, 16, 2, 0.0), (8, 32, 2, 0.0)):
        for kind in ("normal", "lognormal"):
            gains, calls = [], []
            for seed in range(30):
                costs = pipeline_costs(kind, count, seed)
                calls.append(partial(order_for_pipeline, costs, stages=stages, chunks=chunks))
                order = calls[-1]()
                baseline = pipeline_makespan(costs[small_at_ends(costs)], stages=stages, chunks=chunks)
                found = pipeline_makespan(costs[order], stages=stages, chunks=chunks)
                gains.append(100 * (1 - found / baseline))
            name = f"order pp{stages} vpp{chunks} m{count} {kind}"
            checks.at_least(f"{name}: mean % below small-at-ends", statistics.fmean(gains), least)
            checks.at_least(f"{name}: least % below small-at-ends", min(gains), 0)
            checks.yards(f"{name} (30 costs)", calls, 50, repeats=1)
    worst = 0.0
    for stages, count, kind in itertools.product((2, 4, 8), range(2, 9), ("normal", "lognormal")):
        costs = pipeline_costs(kind, count, seed=count)
        best = least_makespan(costs, stages)
        found = pipeline_makespan(costs[order_for_pipeline(costs, stages=stages)], stages=stages)
        worst = max(worst, 100 * (found / best - 1))
    checks.at_most("order, m <= 8: worst % above the exhaustive optimum", worst, 1)


def least_makespan(costs: np.ndarray, stages: int) -> float:
    """Smallest 1F1B makespan over all orders of the micro-batches."""
    orders = np.array(list(itertools.permutations(costs.tolist())), dtype=np.int64)
    return float(makespans(orders, stages).min())


def makespans(orders: np.ndarray, stages: int) -> np.ndarray:
    """Makespan of 1F1B for every row of forward times; backward takes twice as long."""
    lists = [stage_operations(stage, stages, orders.shape[1]) for stage in range(stages)]
    clock = [np.zeros(len(orders), dtype=np.int64) for _ in range(stages)]
    ends: dict = {}
    waiting = [list(operations) for operations in lists]
    while any(waiting):
        for stage, operations in enumerate(waiting):
            while operations:
                awaited = dependency_of(operations[0], stage, stages, 1)
                if awaited is not None and awaited not in ends:
                    break
                kind, micro_batch, _ = operation = operations.pop(0)
                begin = clock[stage] if awaited is None else np.maximum(clock[stage], ends[awaited])
                clock[stage] = begin + orders[:, micro_batch] * (2 if kind == "B" else 1)
                ends[operation, stage] = clock[stage]
    return np.max(clock, axis=0)


def run_checks() -> list[dict]:
    """All figures as rows: figure, found, limit, holds."""
    pack_bins([3, 2, 1], 4)
    karmarkar_karp([3, 2, 1], 2)
    checks = Checks()
    for part in (check_balance, check_heavy_tails, check_scale, check_partition, check_bins, check_order):
        part(checks)
    return checks.rows
