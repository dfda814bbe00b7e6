"""Choice of a micro-batch from a pool of waiting samples, by lengths: cosmos-rl's strategies."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from roll_batching.errors import DataError
from roll_batching.planning.arrays import Ints
from roll_batching.planning.compiled import compiled, compiled_once

PoolStrategy = Literal["prefer_closest", "prefer_first", "packed"]
_MODES: dict[str, int] = {name: number for number, name in enumerate(get_args(PoolStrategy))}


def require_strategy(strategy: str) -> None:
    """Raises DataError unless `strategy` is one of `PoolStrategy`."""
    if strategy not in _MODES:
        raise DataError(f"strategy is one of {', '.join(_MODES)}; got {strategy!r}.")


def choose(slots: Ints, cap: int, strategy: PoolStrategy) -> Ints:
    """Indices in the pool of the next micro-batch's samples, in the order in which they join.

    The oldest sample (index 0) begins. `prefer_closest` adds the sample that keeps rows x longest smallest; among
    equals the one nearest in length to the longest, then the oldest. `prefer_first` takes the oldest among equals.
    `packed` adds every sample that still fits, the oldest first, and counts the sum.

    Args:
        slots: int64[n] of tokens that each waiting sample takes, the oldest first; none above `cap`; n >= 1.
        cap: most tokens of the micro-batch.
        strategy: see above.
    """
    places = np.empty(len(slots), dtype=np.int64)
    with compiled_once("pool"):
        return places[: _choose(slots, cap, _MODES[strategy], places)]


def take(waiting: Ints, slots: Ints, count: int, cap: int, strategy: PoolStrategy, taken: Ints) -> int:
    """As `choose`, among the first `count` of `waiting`: moves the chosen to `taken` and returns their number.

    `waiting` (indices in the dataset) and `slots` (their tokens) are compacted in place; all are int64 arrays of at
    least `count`.
    """
    return int(_take(waiting, slots, count, cap, _MODES[strategy], taken))


@compiled
def _take(waiting: Ints, slots: Ints, count: int, cap: int, mode: int, taken: Ints) -> int:
    number = _choose(slots[:count], cap, mode, taken)
    gone = np.zeros(count, dtype=np.uint8)
    for k in range(number):
        place = taken[k]
        gone[place] = 1
        taken[k] = waiting[place]
    left = 0
    for place in range(count):
        if not gone[place]:
            waiting[left], slots[left] = waiting[place], slots[place]
            left += 1
    return number


@compiled
def _choose(slots: Ints, cap: int, mode: int, places: Ints) -> int:
    count = len(slots)
    number = 0
    if mode == 2:
        # One pass is enough: the batch only grows, so a sample that did not fit cannot fit later.
        total = 0
        for place in range(count):
            if total + slots[place] <= cap:
                places[number] = place
                number += 1
                total += slots[place]
        return number
    gone = np.zeros(count, dtype=np.uint8)
    places[0], gone[0], number, longest = 0, 1, 1, slots[0]
    while number < count:
        best, grown, distance = -1, 0, 0
        for place in range(count):
            if gone[place]:
                continue
            length = slots[place]
            after = max(longest, length)
            away = abs(length - longest) if mode == 0 else 0
            if best < 0 or after < grown or (after == grown and away < distance):
                best, grown, distance = place, after, away
        if grown * (number + 1) > cap:
            break
        places[number] = best
        gone[best] = 1
        number += 1
        longest = grown
    return number
