"""Plans of samples that share prompts: computed tokens, balance and time, beside plans of the same samples without.

    python benchmarks/bench_planner_prefixes.py --check          30 draws of four kinds of lengths, 8 and 32 ranks
    python benchmarks/bench_planner_prefixes.py --draws 3

Groups of eight answers, 128 prompts. Costs are those of an 8B model (`FlopsCost`) with the fixed cost of a micro-batch.
The lower bound of tokens computes every position once. It is a limit where the cap holds every group whole. Balance is
one where no sample costs more than the mean of a rank, and where more than the fixed cost of a further micro-batch per
rank could be gained.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed

from benchmarks.table import Table
from roll_batching.planning import FlopsCost, Plan, PlanConstraints, SharedPrefixes, plan_step

CAP, ANSWERS, PROMPTS = 32768, 8, 128
KINDS = {
    "math": ((200, 0.5, 32, 1024), (3500, 1.0, 16, 31000)),
    "TRL": ((256, 0.43, 16, 1024), (700, 0.9, 16, 4096)),
    "agent": ((4000, 0.5, 500, 12000), (4000, 0.8, 64, 20000)),
    "RAG": ((6000, 0.6, 500, 28000), (800, 0.8, 16, 4096)),
}
"""Median, sigma, least and most tokens of prompts and of answers, lognormal."""
COST = FlopsCost.from_model(
    hidden_size=4096, ffn_hidden_size=12288, num_layers=36, num_attention_heads=32, num_query_groups=8,
    kv_channels=128, vocab_size=151936,
)  # fmt: skip


def draw(kind: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(group, prompt tokens, all tokens) of each sample, int64 [1024]."""
    random = np.random.default_rng(seed)
    prompts, answers = (
        random.lognormal(np.log(median), sigma, count).clip(least, most).astype(np.int64)
        for (median, sigma, least, most), count in zip(KINDS[kind], (PROMPTS, PROMPTS * ANSWERS), strict=True)
    )
    group, prefix = np.repeat(np.arange(PROMPTS), ANSWERS), np.repeat(prompts, ANSWERS)
    return group, prefix, np.minimum(prefix + answers, CAP)


def rank_costs(plan: Plan) -> np.ndarray:
    """Cost of each rank without the fixed cost of micro-batches, float64 [ranks]."""
    used, shared = plan.used[plan.samples].astype(float), plan.shared.astype(float)
    costs = COST.linear * (used - shared) + COST.quadratic * (used**2 - shared**2)
    rank = np.repeat(np.arange(len(plan.tokens)), np.diff(plan.offsets)) // plan.num_micro_batches
    return np.bincount(rank, weights=costs, minlength=plan.constraints.dp_size)


def step_seconds(plan: Plan) -> float:
    """Cost of the slowest rank, with the fixed cost of its micro-batches."""
    return float(rank_costs(plan).max()) + COST.fixed * plan.num_micro_batches


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--draws", type=int, default=30, help="random draws of each kind")
    parser.add_argument("--check", action="store_true", help="exit 1 if a limit does not hold")
    args = parser.parse_args()
    table = Table(
        f"{args.draws} draws of {PROMPTS} groups of {ANSWERS}, cap {CAP:,}; worst of all draws, times medians",
        ("lengths", "ranks", "tokens / bound", "slowest / mean", "time / without", "planned, s", "without, s"),
    )
    for kind in KINDS:
        for ranks in (8, 32):
            tokens, balance, level, times, with_s, without_s = [], [], [], [], [], []
            for seed in range(args.draws):
                group, prefix, lengths = draw(kind, seed)
                prefixes = SharedPrefixes.of_groups(group, np.minimum(prefix, lengths), lengths)
                constraints = PlanConstraints(dp_size=ranks, max_tokens=CAP)
                started = time.perf_counter()
                plan = plan_step(lengths, constraints, cost=COST, prefixes=prefixes)
                planned = time.perf_counter()
                without = plan_step(lengths, constraints, cost=COST)
                without_s.append(time.perf_counter() - planned)
                with_s.append(planned - started)
                starts = np.flatnonzero(prefixes.shared == 0)
                own = lengths[prefixes.order] - prefixes.shared
                whole = np.add.reduceat(own, starts)
                if whole.max() <= CAP:
                    tokens.append(plan.report.computed_tokens / own.sum())
                costs, longest = rank_costs(plan), float(lengths.max())
                if COST.linear * longest + COST.quadratic * longest**2 <= costs.mean():
                    balance.append(costs.max() / costs.mean())
                    level.append(costs.max() <= max(1.002 * costs.mean(), costs.mean() + COST.fixed))
                times.append(step_seconds(plan) / step_seconds(without))
            table.add(
                kind,
                ranks,
                f"{max(tokens):.4f}" if tokens else "-",
                f"{max(balance):.4f}" if balance else "-",
                f"{max(times):.3f}",
                f"{np.median(with_s):.3f}",
                f"{np.median(without_s):.3f}",
            )
            name = f"{kind}, {ranks} ranks"
            if tokens:
                table.require(max(tokens) <= 1.01, f"{name}: tokens at most 1.01 of the bound: {max(tokens):.4f}")
            if balance:
                table.require(all(level), f"{name}: slowest rank at most 1.002 of the mean: {max(balance):.4f}")
            table.require(max(times) <= 1, f"{name}: never slower than without sharing: {max(times):.3f}")
            ratio = np.median(with_s) / np.median(without_s)
            table.require(ratio <= 2, f"{name}: planned in at most twice the time: {ratio:.2f}")
    table.show()
    if args.check and table.missed:
        sys.exit(1)


if __name__ == "__main__":
    main()
