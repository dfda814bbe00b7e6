"""Time, memory and limits of the benchmarks of the loss path."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors, from the outputs of every operator.

    Memory that a kernel allocates and frees inside one operator is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor):
                self._track(value.untyped_storage(), 0)  # allocated before this mode: counts nothing
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._track(storage, storage.nbytes())
        return result

    def _track(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """Peak bytes that `run` allocates, including its result."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        run()
    return live.peak


def times(runs: Mapping[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, list[float]]:
    """Times of each candidate by round; candidates alternate, so that all meet the same load of the machine.

    On the CPU the process's own CPU time on one thread, which other programs disturb least; on CUDA the time
    on the clock with the device drained before and after.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        # Every other round backwards: the first of a round would always meet the other's caches.
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            if device == "cuda":
                torch.cuda.synchronize()
            clock = time.perf_counter if device == "cuda" else time.process_time
            start = clock()
            runs[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first round is a warm-up
                found[name].append(clock() - start)
    return found


def seconds(runs: Mapping[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Smallest time of each candidate; see `times`."""
    return {name: min(values) for name, values in times(runs, device, rounds).items()}


def ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float]:
    """Median of the rounds' ratios, and its spread: half of their interquartile range; 0 of a single round."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    if len(ratios) == 1:
        return ratios[0], 0.0
    lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return median, (upper - lower) / 2


def relative(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Largest relative error: norm of the difference over norm of the expected tensor."""
    return max(_relative(a, b) for a, b in zip(found, expected, strict=True))


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error, in pieces: an fp64 copy of the gradient of large logits would not fit."""
    difference = norm = 0.0
    for a, b in zip(found.flatten().split(1 << 24), expected.flatten().split(1 << 24), strict=True):
        difference += float((a.double() - b.double()).square().sum())
        norm += float(b.double().square().sum())
    return (difference / max(norm, 1e-60)) ** 0.5


def environment(device: str) -> dict[str, Any]:
    """Machine and versions for the JSON file."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "clock": "wall" if device == "cuda" else "process CPU time",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "megatron-core")},
    }


def arguments(description: str | None, rounds: int = 3) -> argparse.Namespace:
    """Parse the command line of a benchmark; set one thread on the CPU."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--check", action="store_true", help="exit 1 if a figure exceeds its limit")
    parser.add_argument("--rounds", type=int, default=rounds, help="runs of each candidate")
    parser.add_argument("--tokens", type=int, help="number of tokens, to shorten the run")
    parser.add_argument("--vocabulary", type=int, help="vocabulary size, to shorten the run")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    return given


def finish(given: argparse.Namespace, cases: list[dict[str, Any]]) -> None:
    """Print the cases, write the JSON file, and with --check exit 1 if a figure exceeds its limit.

    A case is {"case": name, "figures": {name: value}, "limits": {name: [value, limit]}}; value <= limit must hold.
    """
    exceeded = []
    for case in cases:
        shown = ", ".join(f"{name} {value:.4g}" for name, value in case["figures"].items())
        print(f"{case['case']}: {shown}")
        for name, (value, limit) in case["limits"].items():
            holds = value <= limit
            print(f"    {name}: {value:.3g} (at most {limit:g}) {'ok' if holds else 'EXCEEDED'}")
            if not holds:
                exceeded.append(f"{case['case']}: {name}")
    if given.json:
        content = {"environment": environment(given.device), "cases": cases}
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    if given.check and exceeded:
        sys.exit("limits exceeded: " + "; ".join(exceeded))
