"""Balance and fill of micro-batch rows, compared with TRL's classes if a checkout is given.

TRL's lengths (its pull request 6092: completions lognormal of median 700 and sigma 0.9, a tenth at 4,096, prompts of
median 256), seed 0, 8 ranks. Imbalance is (largest - smallest) / mean of the sums of squares over the rows of a
micro-batch; 400 micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.planner.peers import functions_of
from benchmarks.table import Table
from roll_batching.jobs.streams import FixedCountBatcher, StridedBatcher, TokenBudgetBatcher
from roll_batching.jobs.streams.rows import balance_by_squared_length, imbalance

RANKS, BUDGET, COUNT, MICRO_BATCHES = 8, 16_384, 64, 400
TRAINER = "trl/experimental/async_grpo/async_grpo_trainer.py"


def trl_lengths(count: int, seed: int = 0) -> list[int]:
    """int64 `[count]`: tokens of prompt and completion."""
    r = np.random.default_rng(seed)
    completions = np.clip(r.lognormal(np.log(700), 0.9, count), 16, 4096)
    completions[r.random(count) < 0.1] = 4096
    prompts = np.clip(r.lognormal(np.log(256), 0.43, count), 16, 1024)
    return (completions.astype(int) + prompts.astype(int)).tolist()


def balance(peers: dict[str, Path]) -> Table:
    """Table of balance and fill."""
    table = Table(
        f"Rows of micro-batches: {MICRO_BATCHES} of each, {RANKS} ranks",
        ["batcher", "imbalance, mean", "median", "largest", "tokens per row", "fill", "held back", "ms"],
    )
    lengths = trl_lengths(COUNT * 2 * MICRO_BATCHES)
    strided = _measure(table, "strided", StridedBatcher(lengths, RANKS, COUNT, length_of=int))
    dealt = _measure(table, "longest first", _dealt(lengths))
    fixed = _measure(table, f"fixed count, {COUNT}", FixedCountBatcher(lengths, RANKS, COUNT, length_of=int))
    budgets = {
        window: _measure(
            table,
            f"token budget {BUDGET:,}, window {window}",
            TokenBudgetBatcher(lengths, RANKS, BUDGET, length_of=int, window=window),
        )
        for window in (1, 4)
    }
    if "trl" in peers:
        trl = functions_of(
            peers["trl"] / TRAINER, {"FixedCountBatcher", "TokenBudgetBatcher", "_balance_by_squared_length"}
        )
        samples = [{"input_ids": range(n)} for n in lengths]
        _measure(table, f"TRL: fixed count, {COUNT}", _as_lengths(trl.FixedCountBatcher(samples, RANKS, COUNT)))
        _measure(table, f"TRL: token budget {BUDGET:,}", _as_lengths(trl.TokenBudgetBatcher(samples, RANKS, BUDGET)))
    mean = fmean(strided.imbalances)
    table.require(1.3 <= mean <= 1.6, f"strided between 1.3 and 1.6: {mean:.2f}")
    above = sum(mine > theirs for mine, theirs in zip(fixed.imbalances, dealt.imbalances, strict=True))
    table.require(above == 0, f"fixed count never above longest first on the same samples: {above} times")
    found = median(fixed.imbalances)
    table.require(found <= 0.0015, f"fixed count, median at most 0.0015: {found:.5f}")
    for window, most, fill in ((1, 0.03, 0.94), (4, 0.02, 0.97)):
        one = budgets[window]
        mean = fmean(one.imbalances)
        table.require(mean <= most, f"token budget, window {window}, mean at most {most}: {mean:.4f}")
        table.require(one.fill >= fill, f"token budget, window {window}, fill at least {fill:.0%}: {one.fill:.1%}")
    return table


class _Measured:
    def __init__(self, steps: list[list[list[int]]], seconds: float) -> None:
        self.imbalances = [imbalance(rows) for rows in steps]
        self.tokens = fmean(sum(row) for rows in steps for row in rows)
        self.fill = self.tokens / BUDGET
        self.seconds = seconds / len(steps)


def _measure(table: Table, name: str, batcher: Iterable[list[list[int]]]) -> _Measured:
    began = time.process_time()
    one = _Measured(list(islice(batcher, MICRO_BATCHES)), time.process_time() - began)
    metrics = getattr(batcher, "metrics", None)
    held = "" if metrics is None else f"{metrics.to_dict()['held_micro_batches']:.2f}"
    table.add(
        name,
        f"{fmean(one.imbalances):.4f}",
        f"{median(one.imbalances):.5f}",
        f"{max(one.imbalances):.3f}",
        f"{one.tokens:,.0f}",
        f"{one.fill:.1%}" if "budget" in name else "",
        held,
        f"{1e3 * one.seconds:.1f}",
    )
    return one


def _dealt(lengths: list[int]) -> Iterator[list[list[int]]]:
    for start in range(0, len(lengths), COUNT):
        yield balance_by_squared_length(lengths[start : start + COUNT], RANKS, int)


def _as_lengths(steps: Iterable[list[list[dict]]]) -> Iterator[list[list[int]]]:
    for rows in steps:
        yield [[len(one["input_ids"]) for one in row] for row in rows]
