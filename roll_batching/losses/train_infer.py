"""Correction for the mismatch of sampler and trainer: importance weights and filters of whole samples.

With d = log p_train - log p_infer of a sampled token, both at the weights that sampled it, and per level:

    token      ratio exp(d)               diff p_train - p_infer
    segment    ratio exp(mean of d)       diff mean, over the turn: a run of counted tokens
    geometric  ratio exp(mean of d)       diff mean, over the counted tokens of the sample
    sequence   ratio exp(sum of d)        diff sum, over the same

A weight is such a ratio, truncated (TIS: Espeholt et al. 2018, arXiv 1802.01561; Yao et al. 2025, "Your efficient RL
framework secretly brings you off-policy RL training"; per sequence: Liu et al. 2025, "When speed kills stability").
Samples are whole here, before they are packed, so levels do not depend on packs or on context parallelism. Log-ratios
are clamped to +-20 before exp, as in verl and NeMo-RL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from roll_batching.distributed import exchange
from roll_batching.errors import DataError, LossError
from roll_batching.losses.estimators import bounded
from roll_batching.losses.objectives import IS_WEIGHT
from roll_batching.samples import FieldSpec, SampleBatch
from roll_batching.samples.token_fields import counted_positions, require_field, sample_of

if TYPE_CHECKING:
    from roll_batching.distributed.parallel_layout import ParallelLayout
    from roll_batching.settings.train_infer import ISWeight, TrainInferCorrection, TrainInferFilter

TRAIN, INFER = "old_log_probs", "rollout_log_probs"
"""Fields of the two log-probs, next_token."""


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The mismatch of some samples, on the host, float64."""

    log_ratio: torch.Tensor
    """[tokens] d, 0 where nothing counts."""
    diff: torch.Tensor
    """[tokens] p_train - p_infer, 0 where nothing counts."""
    counted: torch.Tensor
    """[tokens] bool."""
    samples: torch.Tensor
    """[tokens] int64, the row of each token's sample."""
    turns: torch.Tensor
    """[tokens] int64, the turn of each counted token; a turn is a run of counted tokens."""

    @classmethod
    def of(cls, batch: SampleBatch, mask: str = "response_mask") -> Mismatch:
        """The mismatch of `old_log_probs` and `rollout_log_probs`. Raises `DataError` for missing or NaN values."""
        for name in (TRAIN, INFER):
            owner = "trainer" if name == TRAIN else "sampler"
            require_field(batch, name, f"train_infer_correction of the {owner}'s log-probs", "next_token")
            if batch[name].ndim != 1:
                raise DataError(
                    f"train_infer_correction: {name} has the shape {list(batch[name].shape)}: give one number per token"
                )
        counted, samples = counted_positions(batch, mask), sample_of(batch)
        values = {name: batch[name].detach().cpu().double() for name in (TRAIN, INFER)}
        for name, log_probs in values.items():
            if (wrong := counted & ~torch.isfinite(log_probs)).any():
                row = int(samples[wrong.nonzero()[0, 0]])
                raise DataError(
                    f"train_infer_correction: {name} of sample {int(batch.ids[row])} are not finite at "
                    f"{int(wrong.sum())} counted positions of the batch"
                )
        train, infer = (torch.where(counted, values[name], 0.0) for name in (TRAIN, INFER))
        # A turn begins at a counted token behind one that is not counted or belongs to another sample.
        follows = torch.zeros_like(counted)
        follows[1:] = counted[:-1] & (samples[1:] == samples[:-1])
        turns = (counted & ~follows).cumsum(0).sub(1).clamp(min=0)
        return cls(
            log_ratio=train - infer, diff=train.exp() - infer.exp(), counted=counted, samples=samples, turns=turns
        )

    def spread(self, values: torch.Tensor, level: str) -> torch.Tensor:
        """[tokens] `values` themselves, or their mean, sum or maximum over each token's turn or sample."""
        if level == "token":
            return values
        groups = self.turns if level == "segment" else self.samples
        size = int(groups.max()) + 1 if len(groups) else 0
        if level == "max":
            lowest = values.new_full((size,), float("-inf"))
            result = lowest.scatter_reduce(0, groups, values.masked_fill(~self.counted, float("-inf")), "amax")
            return result[groups]
        total = values.new_zeros(size).index_add(0, groups, torch.where(self.counted, values, 0.0))
        if level != "sequence":
            total = total / values.new_zeros(size).index_add(0, groups, self.counted.double()).clamp(min=1)
        return total[groups]

    def ratio(self, level: str) -> torch.Tensor:
        """[tokens] p_train / p_infer at a level."""
        return bounded(self.spread(self.log_ratio, level)).exp()


def weights_of(mismatch: Mismatch, settings: ISWeight) -> torch.Tensor:
    """[tokens] float64 weights, truncated and not normalised."""
    return mismatch.ratio(settings.weight_type).clamp(min=settings.lower_bound, max=settings.upper_bound)


def passes(mismatch: Mismatch, bounds: TrainInferFilter) -> torch.Tensor:
    """[tokens] bool: whether each counted token is inside all bounds of a filter; others pass."""
    level = bounds.agg_type
    inside = torch.ones_like(mismatch.counted)
    distance = bounded(mismatch.log_ratio)
    if bounds.ratio_low is not None or bounds.ratio_high is not None:
        inside &= _between(mismatch.ratio(level), bounds.ratio_low, bounds.ratio_high)
    if bounds.diff_low is not None or bounds.diff_high is not None:
        inside &= _between(mismatch.spread(mismatch.diff, level), bounds.diff_low, bounds.diff_high)
    for highest, values in (
        (bounds.k2_high, distance.square() / 2),
        (bounds.k3_high, distance.exp() - 1 - distance),
        (bounds.error_high, distance.abs().exp()),
    ):
        if highest is not None:
            inside &= mismatch.spread(values, level) <= highest
    return inside | ~mismatch.counted


def _between(values: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    inside = torch.ones(len(values), dtype=torch.bool)
    if low is not None:
        inside &= values >= low
    if high is not None:
        inside &= values <= high
    return inside


def with_correction(
    batch: SampleBatch, settings: TrainInferCorrection, layout: ParallelLayout, mask: str = "response_mask"
) -> tuple[SampleBatch, dict[str, float]]:
    """`batch` with the field `train_infer_is_weight` and the filtered `mask`; metrics over all ranks. Collective.

    Policy-gradient losses multiply their surrogate by the field, next_token fp32. Without weights and filters of the
    effect "zero" there is no field.

    Args:
        batch: this rank's whole samples, equal on all ranks of a replica, with `old_log_probs`, `rollout_log_probs` and
            `mask`.
        settings: weights and filters.
        layout: the parallel layout of the samples.
        mask: the token or next_token field that says which tokens count.

    Raises:
        RankError: on all ranks (`DataError` or `LossError` on one) for contradictory settings, and for log-probs that
            are missing or not finite on any rank.
    """
    mismatches: list[Mismatch] = []

    def local() -> tuple[float, ...]:
        for path, problem in settings.problems():
            raise LossError(f"{'.'.join(map(str, ('train_infer_correction', *path)))} {problem}")
        mismatches.append(Mismatch.of(batch, mask))
        return _sums(mismatches[0], settings) if layout.is_replica_leader else (0.0,) * len(_SUMS)

    parts = exchange(layout.host_group, "train_infer_correction", local)
    total = {name: sum(column) for name, column in zip(_SUMS, zip(*parts, strict=True), strict=True)}
    total["ratio_max"] = max(part[-1] for part in parts)
    metrics, mismatch = _metrics(total), mismatches[0]
    kept, weighted = _outcome(mismatch, settings)
    fields: dict[str, torch.Tensor] = {}
    schema: dict[str, FieldSpec] = {}
    if settings.is_weight is not None or any(filter_.effect == "zero" for filter_ in settings.filters):
        weights = torch.ones_like(mismatch.log_ratio)
        if settings.is_weight is not None:
            weights = weights_of(mismatch, settings.is_weight)
            metrics["train_infer_weight"] = mean = total["weights"] / max(total["weighted"], 1)
            if settings.is_weight.batch_normalize and mean > 0:
                weights = weights / mean
        fields[IS_WEIGHT] = torch.where(mismatch.counted & weighted, weights, 0.0).float()
        schema[IS_WEIGHT] = FieldSpec("next_token")
    if any(filter_.effect == "mask" for filter_ in settings.filters):
        # `kept` is by prediction, one place before the token that a field of tokens marks.
        keeps = kept.roll(1) if batch.schema[mask].kind == "token" else kept
        values = batch[mask]
        fields[mask] = torch.where(keeps.to(values.device), values, torch.zeros_like(values))
        schema[mask] = batch.schema[mask]
    return batch.with_fields(fields, schema), metrics


_SUMS = ("tokens", "k1", "k3", "ratio", "weights", "weighted", "clipped", "masked", "zeroed", "ratio_max")
"""Sums over the counted tokens of a rank (`ratio_max`: the maximum). The mean weight is `weights` / `weighted`."""


def _outcome(mismatch: Mismatch, settings: TrainInferCorrection) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens] bool: whether each token stays in the mask, and whether it keeps its weight."""
    outcome = {"mask": torch.ones_like(mismatch.counted), "zero": torch.ones_like(mismatch.counted)}
    for filter_ in settings.filters:
        outcome[filter_.effect] &= passes(mismatch, filter_)
    return outcome["mask"], outcome["zero"]


def _sums(mismatch: Mismatch, settings: TrainInferCorrection) -> tuple[float, ...]:
    """This rank's values of `_SUMS`, in that order."""
    counted = mismatch.counted
    distance = bounded(mismatch.log_ratio)

    def total(values: torch.Tensor) -> float:
        return float(torch.where(counted, values.double(), 0.0).sum())

    ratio = mismatch.ratio("token")
    stays, weighted = _outcome(mismatch, settings)
    weights, count, clipped = 0.0, 0.0, 0.0
    if settings.is_weight is not None:
        sample_weights = weights_of(mismatch, settings.is_weight)
        clipped = total(sample_weights != mismatch.ratio(settings.is_weight.weight_type))
        # Weights of a whole response count once for it, as in verl.
        share = torch.ones_like(sample_weights)
        if settings.is_weight.weight_type in ("geometric", "sequence"):
            share = 1 / mismatch.spread(counted.double(), "sequence").clamp(min=1)
        weights, count = total(torch.where(weighted, sample_weights, 0.0) * share), total(share)
    return (
        total(counted),
        total(-mismatch.log_ratio),
        total(distance.exp() - 1 - distance),
        total(ratio),
        weights,
        count,
        clipped,
        total(~stays),
        total(~weighted),
        float(torch.where(counted, ratio, 0.0).max()) if len(ratio) else 0.0,
    )


def _metrics(total: dict[str, float]) -> dict[str, float]:
    tokens = max(total["tokens"], 1)
    return {
        "train_infer_kl": total["k3"] / tokens,
        "train_infer_k1": total["k1"] / tokens,
        "train_infer_ratio": total["ratio"] / tokens,
        "train_infer_ratio_max": total["ratio_max"],
        "train_infer_clipped": total["clipped"] / tokens,
        "train_infer_masked": total["masked"] / tokens,
        "train_infer_zeroed": total["zeroed"] / tokens,
    }
