"""Denominators of a step: counts over the whole mini-batch and all ranks, taken before the step."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real

import numpy as np
import torch

from roll_batching.errors import DataError, LossError
from roll_batching.losses.contract import LossSpec, head_count
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints
from roll_batching.samples import SampleBatch
from roll_batching.samples.fields import ROLLOUT_IDS
from roll_batching.samples.flatten import row_indices
from roll_batching.samples.token_fields import by_prediction, counted_positions, require_field


@dataclass(frozen=True, eq=False)
class RolloutCounts:
    """Counts of each rollout that has a counted position, however many samples it has, and wherever they lie."""

    ids: Ints
    """int64 [rollouts], ascending."""
    tokens: Ints
    """int64 [rollouts]: counted positions of all samples of the rollout."""
    sequences: Ints
    """int64 [rollouts]: samples of the rollout with a counted position."""

    @classmethod
    def of(cls, ids: Ints, tokens: Ints, sequences: Ints) -> RolloutCounts:
        """Adds up the entries of each id."""
        counted = tokens > 0
        names, places = np.unique(ids[counted], return_inverse=True)
        totals = np.zeros((2, len(names)), dtype=np.int64)
        for total, values in zip(totals, (tokens, sequences), strict=True):
            np.add.at(total, places, values[counted])
        return cls(names, *totals)

    @classmethod
    def join(cls, parts: Sequence[RolloutCounts]) -> RolloutCounts:
        """The counts over several ranks, on which a rollout may have samples."""
        return cls.of(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__match_args__))

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        """Equal where the counts are: ranks compare it."""
        content = hashlib.blake2b(np.stack([self.ids, self.tokens, self.sequences]).tobytes(), digest_size=8)
        return f"RolloutCounts({len(self)} rollouts, {int(self.tokens.sum())} tokens, {content.hexdigest()})"

    def of_samples(self, rollout_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, sequences) of the rollouts of `rollout_ids`, alike in shape and device; 1 where none is counted."""
        ids, tokens, sequences = (values.to(rollout_ids.device) for values in self._tensors)
        if not len(ids):
            return torch.ones_like(rollout_ids), torch.ones_like(rollout_ids)
        places = torch.searchsorted(ids, rollout_ids).clamp(max=len(ids) - 1)
        found = ids[places] == rollout_ids
        return torch.where(found, tokens[places], 1), torch.where(found, sequences[places], 1)

    @cached_property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.from_numpy(values) for values in (self.ids, self.tokens, self.sequences))


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Global counts that losses divide by; equal on every rank and for every partition."""

    tokens: Mapping[str, int]
    """Per mask: number of counted positions."""
    sequences: Mapping[str, int]
    """Per mask: number of sequences with a counted position."""
    sums: Mapping[str, float]
    """Per field in the loss's `sums`: its total over the counted positions (token fields) or sequences (sample fields)
    of the first mask."""
    rollouts: Mapping[str, RolloutCounts] = field(default_factory=dict)
    """Per mask, for losses that average over rollouts."""

    @property
    def has_tokens(self) -> bool:
        """Whether any mask counts a token."""
        return any(self.tokens.values())

    def vector(self) -> torch.Tensor:
        """All counts as one fp64 vector (exact up to 2^53), for one all-reduce."""
        return torch.tensor([*self.tokens.values(), *self.sequences.values(), *self.sums.values()], dtype=torch.float64)

    def with_vector(self, vector: torch.Tensor) -> StepCounts:
        """These counts with the values of a reduced `vector`."""
        values = vector.tolist()
        masks = list(self.tokens)
        n = len(masks)
        return StepCounts(
            tokens={name: int(values[i]) for i, name in enumerate(masks)},
            sequences={name: int(values[n + i]) for i, name in enumerate(masks)},
            sums={name: values[2 * n + i] for i, name in enumerate(self.sums)},
            rollouts=self.rollouts,
        )

    def denominator(self, kind: str, mask: str) -> int:
        """The count of `mask` ("tokens" or "sequences"), at least 1, so that an empty mask gives loss 0, not NaN.

        Raises `LossError` for a mask that the loss does not declare.
        """
        counts = self.tokens if kind == "tokens" else self.sequences
        if mask not in counts:
            raise LossError(
                f"the loss reduces over {mask!r}, but declares masks {tuple(counts)}: add it to the loss's `masks`"
            )
        return max(counts[mask], 1)

    def rollouts_of(self, mask: str) -> RolloutCounts:
        """The counts of rollouts of `mask`. Raises `LossError` for a loss that does not declare that it reads them."""
        if mask not in self.rollouts:
            raise LossError("the loss averages over rollouts, which it does not declare: set its `rollouts` to True")
        return self.rollouts[mask]


def require_counts(counts: StepCounts, spec: LossSpec) -> None:
    """Raises `LossError` unless `counts` has valid numbers for all masks and sums of a loss."""
    if not isinstance(counts, StepCounts):
        raise LossError(f"counts is {type(counts).__name__}: pass what strategy.count(batch, loss) returns")
    heads = [head_count(head) for head in range(1, spec.heads + 1)]
    missing = [
        *(name for name in [*spec.masks, *heads] if name not in counts.tokens or name not in counts.sequences),
        *(name for name in spec.sums if name not in counts.sums),
        *(f"rollouts of {name}" for name in spec.masks if spec.rollouts and name not in counts.rollouts),
    ]
    if missing:
        raise LossError(
            f"counts lacks {', '.join(missing)}, which {spec.name} divides by: pass what strategy.count(batch, loss) "
            "returns for the same loss"
        )

    wrong = [
        f"{name}={count!r}"
        for part, lowest in ((counts.tokens, 0), (counts.sequences, 0), (counts.sums, -math.inf))
        for name, count in part.items()
        if not (isinstance(count, Real) and math.isfinite(count) and count >= lowest)
    ]
    if wrong:
        raise LossError(f"counts holds {', '.join(wrong)}: pass what strategy.count(batch, loss) returns")


def local_counts(
    local: SampleBatch,
    masks: Sequence[str],
    sums: Sequence[str] = (),
    used_lengths: Mapping[int, int] | None = None,
    rows: torch.Tensor | None = None,
    heads: int = 0,
    rollouts: bool = False,
) -> StepCounts:
    """Counts positions and sequences of `local`, this data-parallel rank's part of the mini-batch.

    `rows` selects samples (default: all); `used_lengths` maps ids of truncated samples to their remaining tokens.
    `counted_positions` defines which positions count. Head k has the labels of the first mask except the first k of
    each sample. `rollouts` counts by rollout, too, on this rank alone: `RolloutCounts.join` has those of all ranks.
    Raises `DataError` for fields that are missing or not numeric.
    """
    used = local.lengths.clone()
    for identity, length in (used_lengths or {}).items():
        used[local.rows_of([identity])] = length
    rows = torch.arange(len(local)) if rows is None else rows
    # The last token of a sample is predicted and predicts nothing.
    begins, predicted = local.offsets[:-1][rows], (used[rows] - 1).clamp(min=0)
    tokens, sequences, totals, by_rollout = {}, {}, {}, {}
    ids = _rollout_ids(local)[rows.numpy()] if rollouts else np.zeros(0, np.int64)
    first: torch.Tensor | None = None
    first_counted: torch.Tensor | None = None
    for name in masks:
        require_field(local, name, "the loss's `masks`", "token", "next_token")
        counted = counted_positions(local, name)
        per_sample = _counted(counted, begins, begins + predicted)
        if first is None:
            first, first_counted = per_sample, counted
        tokens[name], sequences[name] = int(per_sample.sum()), int((per_sample > 0).sum())
        if rollouts:
            counts = per_sample.numpy().astype(np.int64)
            by_rollout[name] = RolloutCounts.of(ids, counts, (counts > 0).astype(np.int64))
    for head in range(1, heads + 1):
        assert first_counted is not None  # a loss has a mask
        per_sample = _counted(first_counted, begins + predicted.clamp(max=head), begins + predicted)
        tokens[head_count(head)] = int(per_sample.sum())
        sequences[head_count(head)] = int((per_sample > 0).sum())
    for name in sums:
        require_field(local, name, "the loss's `sums`", "token", "next_token", "sample")
        if local.schema[name].per_token:
            values = by_prediction(local, name).double()
            values = values if first_counted is None else torch.where(first_counted, values, 0.0)
            totals[name] = float(values[row_indices(begins, predicted)].sum())
        else:
            values = local.fields[name].cpu().double()[rows]
            totals[name] = float((values if first is None else values[first > 0]).sum())
    return StepCounts(tokens=tokens, sequences=sequences, sums=totals, rollouts=by_rollout)


def _rollout_ids(local: SampleBatch) -> Ints:
    """int64 [samples]. Raises `DataError` without them, and for numbers of another kind."""
    require_field(local, ROLLOUT_IDS, "a mean over rollouts", "sample")
    values = local[ROLLOUT_IDS].cpu()
    if values.dim() != 1 or values.dtype.is_floating_point or values.dtype is torch.bool:
        raise DataError(f"{ROLLOUT_IDS} has {values.dtype} of shape {tuple(values.shape)}: give one integer per sample")
    ids: Ints = values.to(torch.int64).numpy()
    return ids


def counted_per_sample(batch: SampleBatch, mask: str) -> torch.Tensor:
    """[samples] int32: counted positions of the token or next_token field `mask`."""
    return _counted(counted_positions(batch, mask), batch.offsets[:-1], batch.offsets[1:])


def _counted(mask: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Number of set entries of `mask` [n] in each range from `begins` to before `ends`."""
    # Differences of one running sum, instead of a sum per sample.
    before = torch.zeros(len(mask) + 1, dtype=torch.int32)
    torch.cumsum(mask, 0, dtype=torch.int32, out=before[1:])
    return before[ends] - before[begins]


def truncated_lengths(plan: Plan, dp_rank: int) -> dict[int, int]:
    """Remaining lengths of the samples that the plan truncates on `dp_rank`, by id."""
    truncated: dict[int, int] = {}
    for mb in plan.micro_batches[dp_rank]:
        for place in np.flatnonzero(mb.lengths < plan.lengths[mb.samples]):
            truncated[int(plan.ids[mb.samples[place]])] = int(mb.lengths[place])
    return truncated
