"""Workloads of the planner benchmark, two planners, and the figures of a placement."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from roll_batching.planning import LinearQuadraticCost, PlanConstraints, plan_step

COST = LinearQuadraticCost(linear=24576, quadratic=1)
CAP = 16384
Bins = list[list[list[int]]]
Planner = Callable[[np.ndarray, int, int], Bins]


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


def heavy_tailed(seed: int, n: int) -> np.ndarray:
    """Mostly short lengths, some up to eight times the usual cap, as in request traces with long contexts."""
    return np.clip(2000 * (1 + np.random.default_rng(seed).pareto(1.1, n)), 16, 8 * CAP).astype(int)


def ours(lengths: np.ndarray, dp: int, cap: int) -> Bins:
    plan = plan_step(lengths, PlanConstraints(dp_size=dp, max_tokens=cap), cost=COST)
    return [[mb.samples.tolist() for mb in rank] for rank in plan.micro_batches]


def ours_with_experts(lengths: np.ndarray, dp: int, cap: int) -> Bins:
    """Our planner for ranks that share experts, which wait for each other at every micro-batch."""
    plan = plan_step(lengths, PlanConstraints(dp_size=dp, max_tokens=cap, ep_size=dp), cost=COST)
    return [[mb.samples.tolist() for mb in rank] for rank in plan.micro_batches]


def sorted_groups(lengths: np.ndarray, dp: int, cap: int) -> Bins:
    plan = plan_step(lengths, PlanConstraints(dp_size=dp, max_tokens=cap, algorithm="first_fit_decreasing"), cost=COST)
    return [[mb.samples.tolist() for mb in rank] for rank in plan.micro_batches]


def measure(planner: Planner, lengths: np.ndarray, dp: int, cap: int) -> dict[str, float]:
    start = time.perf_counter()
    bins = planner(lengths, dp, cap)
    seconds = time.perf_counter() - start
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
