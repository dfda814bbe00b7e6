"""Log-probs, entropies and logits from the output of the last pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from roll_batching.distributed.parallel_layout import ParallelLayout
from roll_batching.errors import LossError
from roll_batching.losses.contract import VALUES
from roll_batching.losses.vocab_parallel import token_log_probs
from roll_batching.modeling.head import gpt_of, head_input, head_weight, is_deferred
from roll_batching.packing.batch import PackedBatch
from roll_batching.packing.collectives import gather_results

if TYPE_CHECKING:
    from roll_batching.losses.vocabulary import Vocabulary


def check_temperature(value: Any) -> float:
    """`value` as a float. Raises `LossError` unless it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise LossError(f"temperature={value!r} must be a finite number above 0: logits are divided by it")
    return float(value)


def only_counted(values: torch.Tensor, pack: PackedBatch, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """Sets `values` [tokens, ...] to 0 where no mask counts them, if samples of the pack share positions.

    `tokens` are the indices of `values` in the unshared layout; None: all of them.
    """
    if pack.computed_tokens is None or not pack.masks:
        return values
    counted = torch.stack(list(pack.masks.values())).any(0)
    counted = counted if tokens is None else counted[tokens]
    return values.masked_fill(~counted.view(-1, *[1] * (values.dim() - 1)), 0)


@dataclass(frozen=True, kw_only=True)
class HeadContext:
    """Layout, real vocabulary and temperature for the head."""

    layout: ParallelLayout
    vocab_size: int | None
    """Real vocabulary; None counts every column of the head."""
    temperature: float = 1.0
    temperature_field: str | None = None
    """A sample field that divides each sample's logits in `log_probs`, in addition to `temperature`."""
    value_head: bool = False
    """Whether the model is a critic: its output is values [1, tokens / cp, 1], and it has no log-probs."""

    def require(self, needs: Collection[str], whose: str) -> None:
        """Raises `LossError` where the model does not compute `needs`; `whose` starts the message."""
        if self.value_head and set(needs) != {VALUES}:
            raise LossError(f"{whose} needs {sorted(needs)}, and this model has a value head: it computes values alone")
        if not self.value_head and VALUES in needs:
            raise LossError(f"{whose} needs values, and this model has no value head: set model_args.value_head")

    def results(self, output: torch.Tensor, pack: PackedBatch, chunk: Any, names: Sequence[str]) -> torch.Tensor:
        """[tokens, names]: the outputs `names`, which `require` allows, in pack order; 0 in a filler."""
        idle = not pack.samples
        if self.value_head:
            return self.values(output, pack, idle=idle)[:, None]
        log_probs, entropy = self.log_probs(output, pack, chunk, entropy="entropy" in names, idle=idle)
        values = {"log_probs": log_probs, "entropy": entropy}
        return torch.stack([x for name in names if (x := values[name]) is not None], -1)

    def idle_output(self, output: torch.Tensor, pack: PackedBatch, chunk: Any) -> torch.Tensor:
        """A sum of zeros that depends on all weights, for a filler."""
        if self.value_head:
            return self.values(output, pack, idle=True).sum()
        return self.log_probs(output, pack, chunk, entropy=False, idle=True)[0].sum()

    def values(self, output: torch.Tensor, pack: PackedBatch, *, idle: bool = False) -> torch.Tensor:
        """Values [tokens] in pack order, gathered once over context parallelism; 0 where no mask counts.

        The value at a position is that of the text up to it, before the token that its log-prob belongs to.
        """
        local = output.reshape(-1)
        rows = pack.head_tokens[:0] if idle else pack.head_tokens
        counted = torch.zeros_like(local).index_copy(0, rows, local[rows])
        if idle:
            return local.new_zeros(len(pack.segment_ids)) + counted.sum()
        return only_counted(self.gather(counted, pack), pack)

    def log_probs(
        self, output: torch.Tensor, pack: PackedBatch, chunk: Any, *, entropy: bool, idle: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs and entropies [tokens] in pack order, gathered once over context parallelism.

        `output` is the model's: [1, tokens / cp (/ tp), hidden] with a deferred head, else
        [1, tokens / cp, vocabulary / tp]. With `idle` no position counts, but the head still runs, so that its weight
        gets a gradient of 0.
        """
        source, weight = self._source(output, chunk)
        if self.temperature_field is not None and pack.computed_tokens is not None:
            raise LossError(
                f"the field {self.temperature_field!r} gives each sample its temperature, and samples of this pack "
                "share positions: plan without prefixes (share_prefixes: false)"
            )
        # Logits, or hidden states before the head: it is linear and has no bias.
        if self.temperature_field is not None and pack.samples:
            source = source / self._token_temperatures(self.temperature_field, pack).to(source.dtype)[:, None]
        rows = pack.head_tokens[:0] if idle else pack.head_tokens
        values, entropies = self._token_log_probs(source, pack.labels, weight, rows, entropy)
        if idle:  # every position is 0: nothing to gather
            zeros = values.new_zeros(len(pack.segment_ids)) + values.sum()
            return zeros, zeros if entropy else None
        if entropies is None:
            return only_counted(self.gather(values, pack), pack), None
        # One collective for both.
        both = only_counted(self.gather(torch.stack([values, entropies], -1), pack), pack)
        return both[:, 0], both[:, 1]

    def label_log_probs(
        self, hidden: torch.Tensor, labels: torch.Tensor, rows: torch.Tensor, chunk: Any, *, detach: bool
    ) -> torch.Tensor:
        """Log-probs [tokens / cp] of `labels` at local `rows`, 0 elsewhere, without temperature.

        `hidden` [1, tokens / cp (/ tp), hidden] are the states that a prediction head hands to the deferred head. With
        `detach` the deferred head's weight gets no gradient.
        """
        gpt = gpt_of(chunk)
        weight = head_weight(gpt).detach() if detach else head_weight(gpt)
        source = head_input(hidden, weight, gpt)
        return self._token_log_probs(source, labels, weight, rows, False, temperature=1.0)[0]

    def candidate_log_probs(
        self, output: torch.Tensor, pack: PackedBatch, chunk: Any, field: str, *, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log-probs [tokens, 1 + k] of the label and of the tokens in `field`, entropies [tokens]), as `log_probs`."""
        from roll_batching.losses.vocabulary import labels_with_candidates

        if self.temperature_field is not None:
            raise LossError("temperatures per sample do not divide candidates, which the loss reads: set one for all")
        source, weight = self._source(output, chunk)
        labels = labels_with_candidates(pack, field)
        values, entropies = self._token_log_probs(source, labels, weight, pack.head_tokens, entropy)
        if entropies is None:
            return self.gather(values, pack), None
        both = self.gather(torch.cat([values, entropies[:, None]], 1), pack)
        return both[:, :-1], both[:, -1]

    def top_log_probs(self, output: torch.Tensor, pack: PackedBatch, chunk: Any, k: int) -> torch.Tensor:
        """[tokens, 2 k] in pack order: log-probs of the `k` most likely tokens, and their ids, exact below 2^24."""
        from roll_batching.losses.vocabulary import top_log_probs

        source, weight = self._source(output, chunk)
        shard = source.shape[-1] if weight is None else weight.shape[0]
        log_probs, ids = top_log_probs(
            source,
            k,
            weight=weight,
            rows=pack.head_tokens if pack.samples else pack.head_tokens[:0],
            vocab_size=self.vocab_size or self.layout.tp_size * shard,
            temperature=self.temperature,
            tp_group=self.layout.tp_group,
        )
        both = torch.cat([log_probs, ids.to(log_probs.dtype)], 1)
        if not pack.samples:  # a filler
            return both.new_zeros(len(pack.segment_ids), 2 * k)
        return only_counted(self.gather(both, pack), pack)

    def logits(self, output: torch.Tensor, chunk: Any) -> torch.Tensor:
        """Logits of this rank's positions after temperature, [tokens / cp, vocabulary / tp], with gradient.

        Padded columns of the vocabulary are set so low that their probability is 0.
        """
        if self.temperature_field is not None:
            raise LossError("temperatures per sample do not divide logits, which the loss reads: set one for all")
        source, weight = self._source(output, chunk)
        logits = source if weight is None else F.linear(source, weight)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        shard = logits.shape[-1]
        real = shard if self.vocab_size is None else self.vocab_size - shard * self.layout.tp_rank
        if real >= shard:
            return logits
        padded = torch.arange(shard, device=logits.device) >= real
        # Half of the smallest number, so that differences stay finite.
        return logits.masked_fill(padded, torch.finfo(logits.dtype).min / 2)

    def vocabulary_of(self, logits: torch.Tensor) -> Vocabulary:
        """The `Vocabulary` that reduces over the columns of `logits`, a result of the method `logits`."""
        from roll_batching.losses.vocabulary import Vocabulary  # few losses read logits

        shard = logits.shape[-1]
        return Vocabulary(size=self.vocab_size or shard * self.layout.tp_size, shard=shard, group=self.layout.tp_group)

    def statistics_of(
        self, logits: torch.Tensor, pack: PackedBatch, *, gather_cp: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs, entropies) at this rank's positions, or with `gather_cp` at all [tokens].

        `logits` is a result of the method `logits`, already divided by the temperature. Local positions are those of
        the pack, in which a position that samples share appears once.
        """
        values, entropies = self._token_log_probs(logits, pack.labels, None, pack.head_tokens, True, temperature=1.0)
        assert entropies is not None  # requested above
        if not gather_cp:
            return values, entropies
        both = only_counted(self.gather(torch.stack([values, entropies], -1), pack), pack)
        return both[:, 0], both[:, 1]

    def gather(self, local: torch.Tensor, pack: PackedBatch) -> torch.Tensor:
        """[tokens / cp, ...] -> [tokens, ...] in pack order; the backward takes this rank's positions.

        Shared positions are repeated for each sample; the backward sums their gradients.
        """
        gathered = gather_results(local, pack.params, pack.params.context_group(self.layout.cp_group))
        return gathered if pack.computed_tokens is None else gathered.index_select(0, pack.computed_tokens)

    def _token_log_probs(
        self,
        source: torch.Tensor,
        labels: torch.Tensor,
        weight: torch.Tensor | None,
        rows: torch.Tensor,
        entropy: bool,
        temperature: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return token_log_probs(
            source,
            labels,
            weight=weight,
            rows=rows,
            vocab_size=self.vocab_size,
            temperature=self.temperature if temperature is None else temperature,
            entropy=entropy,
            tp_group=self.layout.tp_group,
        )

    def _token_temperatures(self, field: str, pack: PackedBatch) -> torch.Tensor:
        """[tokens / cp]: the temperature of each local position's sample; 1 for filler."""
        filler = torch.ones(len(pack.layout.segments) - pack.samples)
        values = pack.fields[field].to(torch.float32)
        per_token = torch.cat([values, filler.to(values.device)])[pack.segment_ids]
        return per_token if pack.params.local_tokens is None else per_token[pack.params.local_tokens]

    def _source(self, output: torch.Tensor, chunk: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        gpt = gpt_of(chunk)
        if not is_deferred(gpt):
            return output.reshape(-1, output.shape[-1]), None
        weight = head_weight(gpt)
        return head_input(output, weight, gpt), weight
