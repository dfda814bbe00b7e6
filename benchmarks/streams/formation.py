"""Speed and fill of micro-batches formed from a pool, compared with cosmos-rl's class if a checkout is given.

TRL's lengths, seed 0, one rank, a pool of 128, a cap of 32,768 tokens; without tokenizing. Times are CPU times, medians
of five passes.
"""

from __future__ import annotations

import functools
import statistics
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from benchmarks.planner.peers import functions_of
from benchmarks.streams.balance import trl_lengths
from benchmarks.table import Table
from roll_batching.jobs.streams import LoadBalancedDataset, PoolBatcher

POOL, CAP = 128, 32_768
SAMPLES, SAMPLES_OF_PEERS = 400_000, 3_000
PASSES = 5
FASTEST = 200_000
FILE = "cosmos_rl/dispatcher/data/load_balanced_dataset.py"
STRATEGIES = ("prefer_closest", "prefer_first", "packed")


class _Texts:
    """Samples of given lengths without tokenization: ranges."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths.tolist()

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": _Tokens(self._lengths[index])}


class _Tokens(list[int]):
    """A sequence with a given number of tokens."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


def formation(peers: dict[str, Path]) -> Table:
    """Table of samples per second, fill and padding."""
    table = Table(
        f"Micro-batches from a pool of {POOL}, at most {CAP:,} tokens: by lengths alone, and whole samples through the "
        "datasets",
        ["strategy", "who", "samples/s", "samples per micro-batch", "fill", "padding"],
    )
    lengths = np.array(trl_lengths(SAMPLES), dtype=np.int64)
    few = lengths[:SAMPLES_OF_PEERS]
    for strategy in STRATEGIES:
        formed, seconds = _timed(functools.partial(_formed, lengths, strategy))
        speed = len(lengths) / seconds
        sizes = [lengths[batch] for batch in formed]
        table.add(strategy, "by lengths", f"{speed:,.0f}", *_figures(sizes, strategy))
        table.require(speed >= FASTEST, f"{strategy}: {speed:,.0f} samples/s, at least {FASTEST:,}")
        options: dict[str, Any] = {"pool_size": POOL, "max_tokens_for_batch": CAP, "infinite_loop": False}
        options |= {"seq_packing_enabled": True} if strategy == "packed" else {"batching_strategy": strategy}
        whole = {"dataset": functools.partial(LoadBalancedDataset, _Texts(few), lengths=few, **options)}
        if "cosmos_rl" in peers:
            theirs = _cosmos(peers["cosmos_rl"]).LoadBalancedDataset
            whole["cosmos-rl"] = functools.partial(theirs, _Texts(few), **options)
        speeds, fills = {}, {}
        for who, make in whole.items():
            steps, seconds = _timed(make)
            sizes = [np.array([len(sample["input_ids"]) for sample in batch]) for step in steps for batch in step]
            speeds[who], fills[who] = len(few) / seconds, _figures(sizes, strategy)
            table.add(strategy, who, f"{speeds[who]:,.0f}", *fills[who])
        if "cosmos-rl" in speeds:
            ratio = speeds["dataset"] / speeds["cosmos-rl"]
            table.require(ratio >= 1, f"{strategy}: the dataset is {ratio:.0f} times as fast as cosmos-rl's")
    return table


def _figures(sizes: list[np.ndarray], strategy: str) -> tuple[str, str, str]:
    real = np.array([batch.sum() for batch in sizes])
    computed = real if strategy == "packed" else np.array([len(batch) * batch.max() for batch in sizes])
    full = computed[:-1].mean() / CAP  # the last micro-batch holds the remainder
    return f"{np.mean([len(b) for b in sizes]):.1f}", f"{full:.1%}", f"{1 - real.sum() / computed.sum():.1%}"


def _formed(lengths: np.ndarray, strategy: Any) -> Iterator[np.ndarray]:
    former = PoolBatcher(lengths, max_tokens=CAP, strategy=strategy, pool_size=POOL, infinite=False)
    while (batch := former.next_batch()).size:
        yield batch


def _timed(make: Callable[[], Iterable[Any]]) -> tuple[list[Any], float]:
    """Items of one pass over `make()`, and the median seconds of a pass."""
    seconds = []
    for _ in range(PASSES):
        steps = make()
        started = time.process_time()
        given = list(steps)
        seconds.append(time.process_time() - started)
    return given, statistics.median(seconds)


def _cosmos(path: Path) -> types.SimpleNamespace:
    given = {"torch": torch, "IterableDataset": IterableDataset, "deque": deque}
    return functions_of(path / FILE, {"LoadBalancedDataset", "ShardedIterableDataset", "get_sample_length"}, given)
