#!/usr/bin/env python3
"""Balance of an RL step: ROLL's `batch_balance` against ours, with and without `batch_balance: true`.

    python benchmarks/bench_batch_balance.py --roll CHECKOUT

A step has 1,024 samples on 8 data-parallel ranks: four optimizer steps of 256 samples, in packs of 16,384 tokens.
ROLL's rows call its own partition function (`get_seqlen_balanced_partitions`) as its `batch_balance` and
`LoadBalancePacker` do: over ranks with equal counts, then over micro-batches for the random mini-batches of each rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs in a checkout that is not installed
from benchmarks.planner.cases import CAP, COST, WORKLOADS, Bins, measure
from benchmarks.planner.peers import functions_of
from roll_batching.planning import PlanConstraints, batch_balance, plan_step
from roll_batching.samples.mini_batching import mini_batches, mini_batches_by_rank

DP, SAMPLES, MINI_BATCH = 8, 1024, 256
Step = Iterator[tuple[np.ndarray, Callable[[np.ndarray, int, int], Bins]]]
"""For each optimizer step: the lengths of its samples, and a function that places them."""


def ours(lengths: np.ndarray, seed: int, *, balanced: bool) -> Step:
    homes = batch_balance(lengths, DP, cost=COST) if balanced else None
    if homes is None:
        batches = mini_batches(len(lengths), MINI_BATCH, seed=seed)
    else:
        batches = mini_batches_by_rank(homes, DP, MINI_BATCH, seed=seed)
    for members in batches:
        home = None if homes is None else homes[members]

        def place(sizes: np.ndarray, dp: int, cap: int, home: np.ndarray | None = home) -> Bins:
            plan = plan_step(sizes, PlanConstraints(dp_size=dp, max_tokens=cap), cost=COST, home_rank=home)
            return [[mb.samples.tolist() for mb in rank] for rank in plan.micro_batches]

        yield lengths[members], place


def roll(root: Path) -> Callable[[np.ndarray, int], Step]:
    names = {"get_seqlen_balanced_partitions"}
    partitions = getattr(functions_of(root / "roll/utils/functionals.py", names), *names)

    def step(lengths: np.ndarray, seed: int) -> Step:
        work = [COST.sequence(int(n)) for n in lengths]
        ranks = partitions(work, k_partitions=DP, equal_size=True)
        draw = np.random.default_rng(seed)
        drawn = [draw.permutation(rank) for rank in ranks]
        share = MINI_BATCH // DP
        for at in range(0, len(drawn[0]), share):
            members = [own[at : at + share] for own in drawn]

            def place(sizes: np.ndarray, dp: int, cap: int) -> Bins:
                own = np.arange(len(sizes)).reshape(dp, share)
                count = max(max(1, -(-int(sizes[mine].sum()) // cap)) for mine in own)
                return [
                    [
                        [int(mine[i]) for i in part]
                        for part in partitions(
                            [COST.sequence(int(sizes[i])) for i in mine], k_partitions=count, equal_size=False
                        )
                    ]
                    for mine in own
                ]

            yield lengths[np.concatenate(members)], place

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roll", type=Path, help="path of a checkout of ROLL")
    parser.add_argument("--seeds", type=int, default=10, help="steps per workload")
    options = parser.parse_args()
    ways: dict[str, Callable[[np.ndarray, int], Step]] = {
        "`batch_balance: true`": lambda lengths, seed: ours(lengths, seed, balanced=True),
        "default": lambda lengths, seed: ours(lengths, seed, balanced=False),
    }
    if options.roll is not None:
        ways = {"ROLL": roll(options.roll), **ways}
    print("| lengths | way | costliest rank / mean | packs per rank | packs above the cap |\n|---|---|---|---|---|")
    for workload in ("W1", "bimodal", "agentic"):
        for name, way in ways.items():
            rows = [
                measure(place, lengths, DP, CAP)
                for seed in range(options.seeds)
                for lengths, place in way(WORKLOADS[workload](seed, SAMPLES), seed)
            ]
            mean = {key: float(np.mean([row[key] for row in rows])) for key in ("rank", "K", "over")}
            print(f"| {workload} | {name} | {1 + mean['rank']:.4f} | {mean['K']:.2f} | {mean['over']:.0%} |")


if __name__ == "__main__":
    main()
