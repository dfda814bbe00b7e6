"""Rates of a cluster, fitted to measured times of packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import as_ints
from roll_batching.planning.cost_model import non_negative_fit
from roll_batching.planning.pack_times import Cluster, PackTimes

LEAST_MEASUREMENTS = 4
"""Coefficients of the fit: matrix products, their fixed part, attention, and the floor."""
MOST_SPLITS = 128
"""Most numbers of packs at the floor that are tried."""
EXACT = 1e-18
"""Mean squared relative error below which a fit is exact."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ClusterFit:
    """A cluster with fitted rates."""

    cluster: Cluster
    residual: float
    """Relative RMS error of the predicted times."""
    packs_at_floor: int
    """Measured packs that take the floor; 0: the floor is not measured."""


def fit_cluster(times: PackTimes, packs: Sequence[ArrayLike], seconds: ArrayLike) -> ClusterFit:
    """Fit `matmul_rate`, `matmul_half_tokens`, `attention_rate` and `layer_floor` of `times.cluster` to measured packs.

    Bandwidths, latencies, the tile and the node stay those of `times.cluster`. The errors that count are relative.
    Where no measured pack takes the floor, the floor stays too, but at most at the shortest measured time.

    Args:
        times: the model and layout that were measured.
        packs: sequence lengths of each measured pack, on one context-parallel rank.
        seconds: float[packs], time of each on one pipeline stage, forward and backward.

    Raises:
        PlanError: for fewer than four measurements, times that are not finite and above 0, or packs that do not
            determine the rates.
    """
    if not isinstance(times, PackTimes):
        raise PlanError("fit_cluster: times must be the PackTimes of the measured model")
    measured = _checked_seconds(seconds, len(packs))
    design, offsets = _design(
        times, [as_ints(pack, f"fit_cluster: pack {i}", np.size(pack)) for i, pack in enumerate(packs)]
    )
    # The order of predicted times says which packs take the floor first; fitted rates may order packs differently.
    cluster = times.cluster
    work = design @ np.array([1 / cluster.matmul_rate, 0.0, 1 / cluster.attention_rate]) + offsets
    coefficients, floor, count = _fit(design, offsets, measured, work)
    coefficients, floor, count = _fit(design, offsets, measured, design @ coefficients + offsets)
    matmul, fixed, attention = coefficients.tolist()
    if matmul == 0 or attention == 0:
        raise PlanError(
            f"fit_cluster: the times do not grow with the {'tokens' if matmul == 0 else 'squared lengths'} of the "
            "packs: measure packs of more different sizes, some of them of one long sequence"
        )
    predicted = np.maximum(design @ coefficients + offsets, floor)
    layer_floor = floor / times.stage_layers if count else min(cluster.layer_floor, measured.min() / times.stage_layers)
    return ClusterFit(
        cluster=replace(
            cluster,
            matmul_rate=1 / matmul,
            matmul_half_tokens=fixed / matmul,
            attention_rate=1 / attention,
            layer_floor=float(layer_floor),
        ),
        residual=float(np.sqrt(np.mean((predicted / measured - 1) ** 2))),
        packs_at_floor=count,
    )


def _checked_seconds(seconds: ArrayLike, packs: int) -> Floats:
    try:
        measured = np.asarray(seconds, dtype=np.float64)
    except (TypeError, ValueError):
        raise PlanError("fit_cluster: seconds must be numbers, one of each pack") from None
    if measured.shape != (packs,):
        raise PlanError(f"fit_cluster: {packs} packs but seconds has shape {measured.shape}")
    if packs < LEAST_MEASUREMENTS:
        raise PlanError(
            f"fit_cluster: {packs} measurements do not determine {LEAST_MEASUREMENTS} coefficients; measure more packs"
        )
    if not np.all(np.isfinite(measured)) or np.any(measured <= 0):
        raise PlanError("fit_cluster: seconds must be finite and above 0")
    return measured


def _design(times: PackTimes, packs: Sequence[NDArray[np.int64]]) -> tuple[Floats, Floats]:
    """FLOPs of each pack by coefficient, float[packs, 3], and seconds of its tensor parallelism, float[packs]."""
    rows, offsets = [], []
    ranks, tile = times.tp_size * times.pp_size, times.cluster.attention_tile
    for number, pack in enumerate(packs):
        if not len(pack) or pack.min() < 1:
            raise PlanError(f"fit_cluster: pack {number} must have sequences of at least one token")
        tokens = pack.astype(np.float64)
        pairs = tokens * np.ceil(tokens / tile) * tile
        rows.append(
            [
                times.linear / ranks * tokens.sum(),
                times.linear / ranks * times.tp_size**0.5,
                times.quadratic / ranks * pairs.sum(),
            ]
        )
        offsets.append(times.tensor_parallel(tokens).sum())
    return np.array(rows), np.array(offsets)


def _fit(design: Floats, offsets: Floats, measured: Floats, work: Floats) -> tuple[Floats, float, int]:
    """(coefficients, floor, packs at the floor), the number of these by the Bayesian information criterion."""
    order, count = np.argsort(work, kind="stable"), len(measured)
    splits = sorted({0, *np.linspace(2, count - 3, MOST_SPLITS).astype(int).tolist()} - {1}) if count > 4 else [0]
    best: tuple[float, Floats, float, int] | None = None
    for split in splits:
        if split > count - 3:
            continue
        low, high = order[:split], order[split:]
        inverse = 1 / measured[low]
        floor = float(inverse.sum() / (inverse**2).sum()) if split else 0.0
        coefficients = non_negative_fit(
            design[high] / measured[high, None], (measured[high] - offsets[high]) / measured[high]
        )
        predicted = np.maximum(design @ coefficients + offsets, floor)
        error = float(np.mean((predicted / measured - 1) ** 2))
        score = count * np.log(error + EXACT) + (4 if split else 3) * np.log(count)
        if best is None or score < best[0]:
            best = score, coefficients, floor, split
    assert best is not None
    return best[1:]
