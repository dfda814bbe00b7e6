"""The input of a per-sequence loss: `SequenceView`, one unpacked sequence with its logits.

The logits of a pack are cut by one `torch.split`, whose backward is one concatenation; a slice per sequence would
allocate a gradient of the whole pack for each. By default a view is local: its tensors are `[positions]` with the
positions of this context-parallel rank (ascending; a short sequence may have none), and its logits have the vocabulary
shard of this tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from roll_batching.errors import LossError
from roll_batching.losses.contract import LossOutput, Max, Mean, Metric, Min, Sum
from roll_batching.losses.denominators import StepCounts
from roll_batching.losses.head import HeadContext, only_counted
from roll_batching.losses.views import View, counted
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.pack_layout import PackLayout


def row_counts(layout: PackLayout, cp_rank: int, cp_size: int) -> list[int]:
    """Split sizes of a pack's positions on one context-parallel rank.

    Two per sample (its real positions on this rank, then the padding of its slot), then one for the tail filler, if
    any. `cp_size` is the layout's, or 1 for gathered positions.
    """
    slots = layout.segments[: layout.samples]
    real = layout.lengths if cp_size == 1 else layout.real_token_counts(cp_rank)
    sizes = np.stack([real, slots // cp_size - real], axis=1).reshape(-1)
    tail = int(layout.segments[layout.samples :].sum()) // cp_size
    return [*sizes.tolist(), *([tail] if tail else [])]


def _local_positions(
    layout: PackLayout, cp_rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Finds the positions of samples that share prefixes on one context-parallel rank.

    Returns their indices in the unshared layout, their indices among this rank's tokens, and split sizes like those of
    `row_counts`.
    """
    local_index = np.full(layout.tokens, -1, np.int64)
    local_tokens = layout.local_tokens(cp_rank)
    local_index[local_tokens] = np.arange(len(local_tokens))
    computed = local_index[layout.computed_tokens]
    unshared_index = np.flatnonzero(computed >= 0)
    counts = np.bincount(layout.unshared.segment_ids[unshared_index], minlength=layout.samples)
    sizes = np.stack([counts, np.zeros_like(counts)], axis=1).reshape(-1).tolist()
    return torch.from_numpy(unshared_index).to(device), torch.from_numpy(computed[unshared_index]).to(device), sizes


class SequenceParts:
    """A pack's logits, log-probs and fields, split by sequence; fields are split on first use.

    With `statistics` log-probs and entropies are computed here and not on first use: that is collective over the ranks
    that share the vocabulary or a sequence, and a loss may ask for them on some ranks only.
    """

    def __init__(
        self,
        output: torch.Tensor,
        pack: PackedBatch,
        chunk: Any,
        head: HeadContext,
        *,
        gather_cp: bool,
        statistics: bool,
    ) -> None:
        self.pack, self.tp_group = pack, head.layout.tp_group
        self.cp_group = pack.params.context_group(head.layout.cp_group)
        cp_size, cp_rank = (1, 0) if gather_cp else (pack.layout.cp_size, pack.params.cp_rank)
        self._rows = None if cp_size == 1 else pack.params.local_tokens
        self._computed: torch.Tensor | None = None
        shares = pack.computed_tokens is not None
        if shares and cp_size > 1:
            unshared_index, self._computed, self._sizes = _local_positions(pack.layout, cp_rank, output.device)
            self._rows = unshared_index
        else:
            self._sizes = row_counts(pack.layout.unshared, cp_rank, cp_size)
        # Without context parallelism a gather only repeats shared positions.
        gather = gather_cp or (shares and cp_size == 1)
        local = head.logits(output, chunk)
        self.vocabulary = head.vocabulary_of(local)
        self.logits = self._cut(self._repeat(head.gather(local, pack) if gather else local))
        self._cached: dict[str, Sequence[torch.Tensor]] = {}  # computed values have a colon in front of their names
        if statistics:
            log_probs, entropy = head.statistics_of(local, pack, gather_cp=gather)
            if self._computed is not None:
                log_probs, entropy = (only_counted(self._repeat(x), pack, self._rows) for x in (log_probs, entropy))
            self._cached |= {"log_probs": self._cut(log_probs), "entropy": self._cut(entropy)}

    def field(self, name: str, make: Callable[[], torch.Tensor]) -> Sequence[torch.Tensor]:
        """Splits a [tokens, ...] tensor in pack order by sequence. `make` is called on the first call only."""
        if name not in self._cached:
            values = make()
            self._cached[name] = self._cut(values if self._rows is None else values[self._rows])
        return self._cached[name]

    def statistics(self, name: str) -> Sequence[torch.Tensor]:
        """The tensor "log_probs" or "entropy", split by sequence."""
        if name not in self._cached:
            raise LossError(f"the loss calls {name}(), which it does not declare: add {name!r} to the loss's `needs`")
        return self._cached[name]

    def per_sample(self, name: str, make: Callable[[], torch.Tensor]) -> Sequence[torch.Tensor]:
        """The rows of a [samples, ...] tensor, one per sequence. `make` is called on the first call only."""
        if name not in self._cached:
            self._cached[name] = make().unbind(0)
        return self._cached[name]

    def _repeat(self, local: torch.Tensor) -> torch.Tensor:
        """Repeats each local position for every sample that shares it; returns `local` itself if none is shared."""
        return local if self._computed is None else local.index_select(0, self._computed)

    def _cut(self, local: torch.Tensor) -> Sequence[torch.Tensor]:
        # Every second part is the padding of a slot; the tail filler comes last.
        return local.split(self._sizes)[0 : 2 * self.pack.samples : 2]


class SequenceView(View):
    """One unpacked sequence with its vocabulary-parallel logits and its fields.

    Indexing returns a field: token and next_token fields are [positions, ...] in the convention of `TokenView`
    (position i describes the token after it), sample fields [...]. Without `gather_cp` the positions are those of this
    context-parallel rank, and reductions return this rank's part; with it every rank has all `length` positions and
    computes the same loss.
    """

    def __init__(self, counts: StepCounts, parts: SequenceParts, place: int) -> None:
        super().__init__(parts.pack, counts, parts.vocabulary)
        self._parts, self._place = parts, place
        self.id = int(parts.pack.ids[place])
        """The sample's global id."""
        self.length = int(parts.pack.layout.unshared.lengths[place])
        """Tokens of the whole sequence."""
        self.logits = parts.logits[place]
        """[positions, vocabulary / tp] after temperature; padded columns have probability 0. `vocabulary` reduces
        them, `full_logits` gathers whole rows."""
        self.tp_group, self.cp_group = parts.tp_group, parts.cp_group

    def __getitem__(self, name: str) -> Any:
        values = self._field(name)
        kind = self._pack.kinds[name]
        if kind == "static":
            return values
        if kind == "sample":
            return self._parts.per_sample(name, lambda: values)[self._place]
        return self._parts.field(name, lambda: values)[self._place]

    @property
    def input_ids(self) -> torch.Tensor:
        """[positions] int64: the token at each position; the only field that is not shifted."""
        return self["input_ids"]

    @property
    def labels(self) -> torch.Tensor:
        """[positions] int64: the token after each position; 0 at the last one."""
        pack = self._pack
        # The roll crosses the ends of samples, where nothing is predicted.
        make = lambda: pack.fields["input_ids"].roll(-1, 0).masked_fill(~pack.predicts, 0)  # noqa: E731
        return self._parts.field(":labels", make)[self._place]

    @property
    def positions(self) -> torch.Tensor:
        """[positions] int64: index of each position in the sequence."""
        make = lambda: torch.from_numpy(self._pack.layout.unshared.position_ids).to(self.logits.device)  # noqa: E731
        return self._parts.field(":positions", make)[self._place]

    def full_logits(self) -> torch.Tensor:
        """[positions, vocabulary] after temperature, without padded columns; memory as of `Vocabulary.rows`."""
        return self.vocabulary.rows(self.logits)

    def log_probs(self) -> torch.Tensor:
        """[positions] fp32 log-probability of each position's label; 0 without gradient where no mask counts.

        For losses with log_probs or entropy in `needs`, which is the default.
        """
        return self._parts.statistics("log_probs")[self._place]

    def entropy(self) -> torch.Tensor:
        """[positions] fp32 entropy of each position's distribution; 0 without gradient where no mask counts."""
        return self._parts.statistics("entropy")[self._place]

    def mask(self, name: str | None = None) -> torch.Tensor:
        """[positions] bool of a declared mask; the first one by default."""
        mask = self._mask_name(name)
        return self._parts.field(f":mask {mask}", lambda: self._pack.masks[mask])[self._place]

    def count(self, mask: str | None = None) -> torch.Tensor:
        """Counted tokens of this sequence on all context-parallel ranks: an int64 scalar on the device."""
        mask_name = self._mask_name(mask)

        def make() -> torch.Tensor:
            counted = self._pack.masks[mask_name].long()
            empty = counted.new_zeros(len(self._pack.layout.unshared.segments))
            return empty.index_add(0, self._pack.segment_ids, counted)

        return self._parts.per_sample(f":count {mask_name}", make)[self._place]

    def sum(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Sum of [positions] values over the counted positions of this view, not divided."""
        return counted(x, self.mask(mask)).sum()

    def mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """This sequence's share of the mean over all counted tokens of the step (token-mean)."""
        return self.sum(x, mask) / self.num_tokens(mask)

    def sequence_mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean over sequences of each one's mean over tokens (seq-mean-token-mean)."""
        return self.sum(x, mask) / self.count(mask).clamp(min=1) / self.num_sequences(mask)

    def sequence_sum(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean over sequences of each one's sum over tokens (seq-mean-token-sum)."""
        return self.sum(x, mask) / self.num_sequences(mask)

    def rollout_mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean over rollouts of each one's mean over its samples' means over tokens."""
        parts = self.count(mask).clamp(min=1) * self.of_rollouts(mask)[1]
        return self.sum(x, mask) / parts / self.num_rollouts(mask)

    def rollout_token_mean(self, x: torch.Tensor, mask: str | None = None) -> torch.Tensor:
        """Share of the mean over rollouts of each one's mean over the tokens of all its samples."""
        return self.sum(x, mask) / self.of_rollouts(mask)[0] / self.num_rollouts(mask)

    def mean_metric(self, x: torch.Tensor, mask: str | None = None) -> Mean:
        """The mean of [positions] values over all counted tokens, as a metric."""
        return Mean(self.sum(x.detach(), mask), self.mask(mask).sum())


def join_metrics(parts: Sequence[LossOutput]) -> dict[str, Metric]:
    """Metrics of several sequences joined by name, on the device.

    Raises `LossError` if a metric has different kinds in different sequences.
    """
    names = dict.fromkeys(name for part in parts for name in part.metrics)
    device = parts[0].loss.device
    return {name: _join(name, [p.metrics[name] for p in parts if name in p.metrics], device) for name in names}


def _join(name: str, metrics: Sequence[Metric], device: torch.device) -> Metric:
    """One metric over several sequences. Raises `LossError` for different kinds."""
    kinds = {type(metric) for metric in metrics}
    if len(kinds) > 1:
        raise LossError(f"the metric {name!r} is a {' and a '.join(sorted(k.__name__ for k in kinds))}: choose one")

    def stacked(part: str) -> torch.Tensor:
        # fp64, in which metrics of micro-batches are joined as well.
        values = [torch.as_tensor(getattr(metric, part)).detach().reshape(()) for metric in metrics]
        return torch.stack([value.to(device, torch.float64) for value in values])

    if kinds == {Mean}:
        return Mean(stacked("numerator").sum(), stacked("denominator").sum())
    values = stacked("value")
    if kinds == {Sum}:
        return Sum(values.sum())
    return Max(values.max()) if kinds == {Max} else Min(values.min())
