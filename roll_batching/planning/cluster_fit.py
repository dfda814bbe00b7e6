"""Rates of a cluster, fitted to measured times of packs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from roll_batching.errors import PlanError
from roll_batching.planning.arrays import as_ints, kind_of
from roll_batching.planning.cost_model import non_negative_fit
from roll_batching.planning.pack_times import Cluster, PackTimes

LEAST_MEASUREMENTS = 4
"""One per coefficient: FLOPs of matrix products, their part per product, FLOPs of attention, and the floor."""
_COEFFICIENTS = 3
"""Number of coefficients without the floor; at least as many packs must be above the floor."""
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


def fit_cluster(model: PackTimes, packs: Sequence[ArrayLike], seconds: ArrayLike) -> ClusterFit:
    """Fit `matmul_rate`, `matmul_half_tokens`, `attention_rate` and `layer_floor` of `model.cluster` to measured packs.

    Minimizes relative errors. The other fields of `model.cluster` (bandwidths, latencies, `attention_tile`,
    `devices_per_node`) stay. Where no measured pack takes the floor, `layer_floor` stays too, or falls to the shortest
    measured time.

    Args:
        model: predicted times of the model and layout that were measured.
        packs: one array of sequence lengths per measured pack. Measure with context_parallel_size 1.
        seconds: float[packs], forward and backward time of each pack on one pipeline stage.

    Raises:
        PlanError: for fewer than four measurements, times that are not finite and above 0, or packs that do not
            determine the rates.
    """
    if not isinstance(model, PackTimes):
        raise PlanError(f"fit_cluster: model is {kind_of(model)}: pass PackTimes.of_model(...)")
    measured = _checked_seconds(seconds, len(packs))
    design, offsets = _design(
        model, [as_ints(pack, f"fit_cluster: pack {i}", np.size(pack)) for i, pack in enumerate(packs)]
    )
    # The packs with the shortest predicted times take the floor first. Fitted rates may order packs differently: the
    # first fit sorts by the old rates, the second by the fitted ones.
    cluster = model.cluster
    work = design @ np.array([1 / cluster.matmul_rate, 0.0, 1 / cluster.attention_rate]) + offsets
    coefficients, floor, count = _fit(design, offsets, measured, work)
    coefficients, floor, count = _fit(design, offsets, measured, design @ coefficients + offsets)
    per_flop, per_matmul, per_attention_flop = coefficients.tolist()
    if per_flop == 0 or per_attention_flop == 0:
        raise PlanError(
            f"fit_cluster: the times do not grow with the {'tokens' if per_flop == 0 else 'squared lengths'} of the "
            "packs: measure packs of more different sizes, some of them of one long sequence"
        )
    predicted = np.maximum(design @ coefficients + offsets, floor)
    layer_floor = floor / model.stage_layers if count else min(cluster.layer_floor, measured.min() / model.stage_layers)
    return ClusterFit(
        cluster=replace(
            cluster,
            matmul_rate=1 / per_flop,
            matmul_half_tokens=per_matmul / per_flop,
            attention_rate=1 / per_attention_flop,
            layer_floor=float(layer_floor),
        ),
        residual=float(np.sqrt(np.mean((predicted / measured - 1) ** 2))),
        packs_at_floor=count,
    )


def _checked_seconds(seconds: ArrayLike, packs: int) -> Floats:
    try:
        measured = np.asarray(seconds, dtype=np.float64)
    except (TypeError, ValueError):
        raise PlanError(f"fit_cluster: seconds is {kind_of(seconds)}; it must be numbers, one per pack") from None
    if measured.shape != (packs,):
        raise PlanError(f"fit_cluster: {packs} packs but seconds has shape {measured.shape}: pass one number per pack")
    if packs < LEAST_MEASUREMENTS:
        raise PlanError(
            f"fit_cluster: {packs} measurements do not determine {LEAST_MEASUREMENTS} coefficients; measure more packs"
        )
    wrong = np.flatnonzero(~np.isfinite(measured) | (measured <= 0))
    if len(wrong):
        raise PlanError(f"fit_cluster: seconds[{wrong[0]}]={measured[wrong[0]]}: measure again, finite and above 0")
    return measured


def _design(model: PackTimes, packs: Sequence[NDArray[np.int64]]) -> tuple[Floats, Floats]:
    """FLOPs of each pack by coefficient, float[packs, 3], and seconds of its tensor parallelism, float[packs]."""
    rows, offsets = [], []
    ranks, tile = model.tp_size * model.pp_size, model.cluster.attention_tile
    for index, pack in enumerate(packs):
        if not len(pack) or pack.min() < 1:
            lengths = f"a sequence of {pack.min()} tokens" if len(pack) else "no sequence"
            raise PlanError(f"fit_cluster: pack {index} has {lengths}: give sequences of at least one token")
        tokens = pack.astype(np.float64)
        pairs = tokens * np.ceil(tokens / tile) * tile
        rows.append(
            [
                model.linear / ranks * tokens.sum(),
                model.linear / ranks * model.tp_size**0.5,
                model.quadratic / ranks * pairs.sum(),
            ]
        )
        offsets.append(model.tensor_parallel(tokens).sum())
    return np.array(rows), np.array(offsets)


def _fit(design: Floats, offsets: Floats, measured: Floats, work: Floats) -> tuple[Floats, float, int]:
    """(coefficients, floor, packs at the floor); the Bayesian information criterion chooses the number of packs."""
    order, count = np.argsort(work, kind="stable"), len(measured)
    most_at_floor = count - _COEFFICIENTS
    splits = [0]
    if count > LEAST_MEASUREMENTS:  # without 1: one pack at the floor would be fitted exactly, by its own time
        splits = sorted({0, *np.linspace(2, most_at_floor, MOST_SPLITS).astype(int).tolist()} - {1})
    best: tuple[float, Floats, float, int] | None = None
    for split in splits:
        if split > most_at_floor:
            continue
        low, high = order[:split], order[split:]
        inverse = 1 / measured[low]
        floor = float(inverse.sum() / (inverse**2).sum()) if split else 0.0
        coefficients = non_negative_fit(
            design[high] / measured[high, None], (measured[high] - offsets[high]) / measured[high]
        )
        predicted = np.maximum(design @ coefficients + offsets, floor)
        error = float(np.mean((predicted / measured - 1) ** 2))
        score = count * np.log(error + EXACT) + (_COEFFICIENTS + bool(split)) * np.log(count)
        if best is None or score < best[0]:
            best = score, coefficients, floor, split
    assert best is not None
    return best[1:]
