"""Packing metrics under NeMo-RL's names, and what alignment wastes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import as_lengths, round_up


def packing_metrics(
    lengths: ArrayLike, bins: Sequence[Sequence[int]], capacity: int, *, multiple: int = 1
) -> dict[str, float]:
    """How well `bins` (lists of indices into `lengths`) use bins of `capacity`.

    With lengths rounded up to `multiple`: `bin_utilization` = tokens / (bins * capacity), `waste_ratio` =
    1 - utilization, `bin_balance` = 1 - standard deviation / mean of the bins' utilization (below 0 for
    very uneven bins), `packing_efficiency` = ceil(tokens / capacity) / bins. `alignment_waste` is the share
    of the packed tokens that rounding added.
    """
    if not bins:
        raise PlanError("packing_metrics: there is no bin")
    sizes = as_lengths(lengths)
    aligned = round_up(sizes, multiple)
    loads = np.array([int(aligned[list(members)].sum()) if len(members) else 0 for members in bins])
    total = int(loads.sum())
    if total == 0:
        raise PlanError("packing_metrics: all bins are empty")
    used = np.concatenate([np.asarray(members, dtype=np.int64) for members in bins])
    utilization = loads / capacity
    return {
        "num_bins": float(len(bins)),
        "theoretical_min_bins": float(-(-total // capacity)),
        "bin_utilization": total / (len(bins) * capacity),
        "waste_ratio": 1 - total / (len(bins) * capacity),
        "bin_balance": float(1 - utilization.std() / utilization.mean()),
        "packing_efficiency": -(-total // capacity) / len(bins),
        "alignment_waste": 1 - int(sizes[used].sum()) / total,
    }
