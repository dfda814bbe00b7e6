"""A unit of time for limits: a fixed compiled loop, run beside what is measured.

Seconds depend on the machine, and a limit in seconds tells something only where it was set. Both sides are processor
time of one thread, so other programs disturb the ratio little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numba
import numpy as np

_STEPS = 200_000
_CELLS = 4_096


@numba.njit
def _walk(cells: np.ndarray, steps: int) -> int:
    """Random reads and writes with a branch on each, as a search over placements has."""
    state, total = 12345, 0
    for _ in range(steps):
        state = state * 48271 % 2147483647
        here = state & (_CELLS - 1)
        state = state * 48271 % 2147483647
        there = state & (_CELLS - 1)
        if cells[here] > cells[there]:
            cells[here], cells[there] = cells[there], cells[here]
            total += 1
    return total


def yard() -> float:
    """Processor seconds of the loop, once compiled."""
    start = time.process_time()
    _walk(np.arange(_CELLS)[::-1].copy(), _STEPS)
    return time.process_time() - start


def yards(call: Callable[[], object], repeats: int = 5) -> float:
    """Median time of `call` over that of the loop; both run in turn, after a first run of each."""
    yard()
    ratios = []
    for _ in range(repeats):
        before = yard()
        start = time.process_time()
        call()
        took = time.process_time() - start
        ratios.append(2 * took / (before + yard()))
    return statistics.median(ratios)
