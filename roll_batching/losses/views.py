"""The input of a per-token loss: `TokenView`, the whole pack of a micro-batch, flat.

Position i is a prediction: its log-prob, entropy, mask, advantage and old log-prob belong to the token after token i.
The last position of a sample predicts nothing, and no mask counts it. Reductions divide by counts over the whole
optimizer step and all ranks: a micro-batch contributes its share, and the sum is the same for every partition. For
single sequences with logits see `losses.sequences`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll_batching.errors import LossError
from roll_batching.losses.contract import Mean
from roll_batching.losses.denominators import StepCounts
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.pack_layout import BoolArray, IntArray
from roll_batching.samples.fields import ROLLOUT_IDS

if TYPE_CHECKING:
    from roll_batching.losses.vocabulary import Vocabulary


class MissingField(LossError):
    """A loss reads a field that the batch lacks."""


class View:
    """Common base of the views: masks, fields, vocabulary and counts of the step."""

    def __init__(self, pack: PackedBatch, counts: StepCounts, vocabulary: Vocabulary | None) -> None:
        self._pack, self._counts, self._vocabulary = pack, counts, vocabulary

    def __contains__(self, name: str) -> bool:
        return name in self._pack.fields

    def num_tokens(self, mask: str | None = None) -> int:
        """Counted tokens of the whole step on all ranks, at least 1."""
        return self._counts.denominator("tokens", self._mask_name(mask))

    def num_sequences(self, mask: str | None = None) -> int:
        """Sequences of the whole step on all ranks that have a counted token, at least 1."""
        return self._counts.denominator("sequences", self._mask_name(mask))

    def num_rollouts(self, mask: str | None = None) -> int:
        """Rollouts of the whole step on all ranks that have a counted token, at least 1."""
        return max(len(self._counts.rollouts_of(self._mask_name(mask))), 1)

    def of_rollouts(self, mask: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, sequences) that a sample's rollout has in the step on all ranks, each like the field rollout_ids."""
        return self._counts.rollouts_of(self._mask_name(mask)).of_samples(self[ROLLOUT_IDS])

    def total(self, name: str) -> float:
        """Total of a field in the loss's `sums` over the step and all ranks.

        It covers the positions (token fields) or sequences (sample fields) that the first mask counts.
        """
        if name not in self._counts.sums:
            raise LossError(f"the loss reads the total of {name!r}: add it to the loss's `sums`")
        return self._counts.sums[name]

    @property
    def vocabulary(self) -> Vocabulary:
        """Sums, maxima and gathers over the columns of `logits` on all tensor-parallel ranks."""
        if self._vocabulary is None:
            raise LossError("the loss reads vocabulary, which it does not declare: add 'logits' to the loss's `needs`")
        return self._vocabulary

    def _mask_name(self, name: str | None) -> str:
        mask = next(iter(self._pack.masks)) if name is None else name
        if mask not in self._pack.masks:
            raise LossError(
                f"the loss reduces over {mask!r}, but declares masks {tuple(self._pack.masks)}: add it to `masks`"
            )
        return mask

    def __getitem__(self, name: str) -> Any:
        raise NotImplementedError

    def _field(self, name: str) -> Any:
        try:
            return self._pack.fields[name]
        except KeyError:
            have = ", ".join(sorted(self._pack.fields))
            raise MissingField(f"the loss reads the field {name!r}; the batch has {have}") from None


def counted(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`x` where `mask`, else 0, in at least fp32: in bf16 a sum of ones stops growing after a few hundred."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return torch.where(mask, wide, 0.0)


class TokenView(View):
    """A pack in pack order, identical on all tensor- and context-parallel ranks.

    Indexing returns a field of the batch in its own dtype: `view["advantages"]`. Token and next_token fields are
    [tokens, ...] by the position convention above, sample fields [samples, ...]. Reductions are fp32, or fp64 for fp64
    values.
    """

    def __init__(
        self,
        pack: PackedBatch,
        counts: StepCounts,
        *,
        log_probs: torch.Tensor | None = None,
        entropy: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        candidate_log_probs: torch.Tensor | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        super().__init__(pack, counts, vocabulary)
        self._candidate_log_probs = candidate_log_probs
        self._mask_sums: dict[str, torch.Tensor] = {}
        self._log_probs, self._entropy, self._logits, self._values = log_probs, entropy, logits, values
        self.segment_ids = pack.segment_ids
        """[tokens] int64: index of each position's sample; `samples` and above are filler."""
        self.samples = pack.samples
        """Number of samples in the pack."""

    @property
    def log_probs(self) -> torch.Tensor:
        """[tokens] fp32 log-probability of each position's label; 0 without gradient where no mask counts."""
        return self._needed("log_probs", self._log_probs)

    @property
    def entropy(self) -> torch.Tensor:
        """[tokens] fp32 entropy of each position's distribution; 0 without gradient where no mask counts."""
        return self._needed("entropy", self._entropy)

    @property
    def logits(self) -> torch.Tensor:
        """[tokens, vocabulary / tp] after temperature, gathered over context parallelism.

        As a `sequence_loss`, with this rank's positions only, such a loss takes cp times less memory.
        """
        return self._needed("logits", self._logits)

    def full_logits(self) -> torch.Tensor:
        """[tokens, vocabulary] after temperature, without padded columns; memory as of `Vocabulary.rows`."""
        return self.vocabulary.rows(self.logits)

    @property
    def values(self) -> torch.Tensor:
        """[tokens] fp32 value that a critic gives the text up to each position; 0 where no mask counts."""
        return self._needed("values", self._values)

    @property
    def candidate_log_probs(self) -> torch.Tensor:
        """[tokens, k] fp32 log-probs of the tokens in the loss's field `candidates`; 0 where no mask counts."""
        return self._needed("candidate_log_probs", self._candidate_log_probs)

    @property
    def input_ids(self) -> torch.Tensor:
        """[tokens] int64: the token at each position; the only field that is not shifted."""
        return self._pack.fields["input_ids"]

    @property
    def ids(self) -> IntArray:
        """[samples] int64, on the host: the id of each sample, in the order of all per-sample values."""
        return self._pack.ids

    @property
    def lengths(self) -> IntArray:
        """[samples] int64, on the host: tokens of each sample."""
        return self._pack.layout.unshared.lengths

    def __getitem__(self, name: str) -> Any:
        return self._field(name)

    def rows(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """[tokens, ...] -> [samples, width, ...]: one row per sample, padded with 0 on the right. Differentiable.

        `width` is the longest sample's length by default; one less leaves out the last positions, which predict
        nothing. Raises `LossError` for a smaller width.
        """
        longest = int(self.lengths.max())
        width = longest if width is None else width
        if width < longest - 1:
            raise LossError(f"rows(width={width}) would cut a sample of {longest} tokens: pass at least {longest - 1}")
        layout = self._pack.layout.unshared
        selected = layout.real & (layout.position_ids < width)
        targets = layout.segment_ids[selected] * width + layout.position_ids[selected]
        flat = x.new_zeros(self.samples * width, *x.shape[1:])
        flat = flat.index_copy(0, torch.from_numpy(targets).to(x.device), self._select(x, selected))
        return flat.view(self.samples, width, *x.shape[1:])

    def jagged(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, ...] -> nested tensor of the jagged layout, [samples, its length, ...]. Differentiable."""
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths)])).to(x.device)
        values = self._select(x, self._pack.layout.unshared.real)
        # With both lengths given, torch does not read the offsets on the device.
        longest, shortest = int(self.lengths.max()), int(self.lengths.min())
        return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=shortest, max_seqlen=longest)

    def _select(self, x: torch.Tensor, selected: BoolArray) -> torch.Tensor:
        return x.index_select(0, torch.from_numpy(np.flatnonzero(selected)).to(x.device))

    def per_token(self, name: str) -> torch.Tensor:
        """A field as [tokens, ...], sample fields expanded to their positions."""
        values = self[name]
        return self.expand(values) if self._pack.kinds[name] == "sample" else values

    def mask(self, name: str | None = None) -> torch.Tensor:
        """[tokens] bool of a declared mask; the first one by default."""
        return self._pack.masks[self._mask_name(name)]

    def expand(self, per_sample: torch.Tensor) -> torch.Tensor:
        """[samples, ...] -> [tokens, ...]; filler positions are 0."""
        self._require_samples(per_sample, "expand")
        filler = per_sample.new_zeros(len(self._pack.layout.unshared.segments) - self.samples, *per_sample.shape[1:])
        return torch.cat([per_sample, filler])[self.segment_ids]

    def segment_sum(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """[tokens] -> [samples]: sum over each sample's counted positions."""
        masked = counted(x, self.mask(mask))
        # Filler has segments behind those of samples: summed as well, so that no position is selected, and cut off.
        total = masked.new_zeros(len(self._pack.layout.unshared.segments))
        return total.index_add(0, self.segment_ids, masked)[: self.samples]

    def segment_count(self, mask: str | None = None) -> torch.Tensor:
        """[samples] fp32: counted positions of each sample."""
        return self.segment_sum(torch.ones(len(self.segment_ids), device=self.segment_ids.device), mask)

    def segment_mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """[tokens] -> [samples]: mean over each sample's counted positions, 0 without any."""
        return self.segment_sum(x, mask) / self.segment_count(mask).clamp(min=1)

    def sum(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Sum over counted positions of this pack, not divided."""
        return counted(x, self.mask(mask)).sum()

    def mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """This pack's share of the mean over all counted tokens of the step (token-mean)."""
        return self.sum(x, mask) / self.num_tokens(mask)

    def sequence_mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean over sequences of each one's mean over tokens (seq-mean-token-mean)."""
        return self.segment_mean(x, mask).sum() / self.num_sequences(mask)

    def sequence_sum(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean over sequences of each one's sum over tokens (seq-mean-token-sum)."""
        return self.sum(x, mask) / self.num_sequences(mask)

    def rollout_mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean over rollouts of each one's mean over its samples' means over tokens."""
        return (self.segment_mean(x, mask) / self.of_rollouts(mask)[1]).sum() / self.num_rollouts(mask)

    def rollout_token_mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean over rollouts of each one's mean over the tokens of all its samples."""
        return (self.segment_sum(x, mask) / self.of_rollouts(mask)[0]).sum() / self.num_rollouts(mask)

    def sample_mean(self, per_sample: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean of [samples] values over all sequences that have a counted position."""
        self._require_samples(per_sample, "sample_mean")
        present = self.segment_count(mask) > 0  # the denominator counts these sequences only
        return counted(per_sample, present).sum() / self.num_sequences(mask)

    def mean_metric(self, x: torch.Tensor, mask: str | None = None) -> Mean:
        """The mean of x over all counted tokens, as a metric."""
        name = self._mask_name(mask)
        if name not in self._mask_sums:  # a loss has half a dozen such metrics
            self._mask_sums[name] = self.mask(name).sum()
        return Mean(self.sum(x.detach(), name), self._mask_sums[name])

    def _require_samples(self, per_sample: torch.Tensor, name: str) -> None:
        if per_sample.dim() and len(per_sample) != self.samples:
            raise LossError(
                f"{name} takes one value per sample ({self.samples}) and got {tuple(per_sample.shape)}: reduce values "
                "of tokens by segment_mean, segment_sum, mean or sequence_mean"
            )

    def _needed(self, name: str, value: torch.Tensor | None) -> torch.Tensor:
        if value is None:
            raise LossError(f"the loss reads {name}, which it does not declare: add it to the loss's `needs`")
        return value
