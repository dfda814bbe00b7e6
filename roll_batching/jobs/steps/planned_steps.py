"""Optimizer steps of supervised phases: mini-batches of texts, each planned over all ranks."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from roll_batching.distributed import consensus
from roll_batching.jobs.objectives.stateful import Stateful
from roll_batching.jobs.texts.encode import encode_documents, encode_judged, encode_pairs
from roll_batching.jobs.texts.epochs import EpochStream
from roll_batching.jobs.texts.fit import token_counts
from roll_batching.jobs.texts.texts import TextDataset
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.packing.prefetch import prefetch_items
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints
from roll_batching.samples import SampleBatch
from roll_batching.samples.length_table import LengthTable
from roll_batching.samples.mini_batching import rank_slice
from roll_batching.strategy import MegatronInferStrategy
from roll_batching.strategy.roles import agree_on_plan


class StepSource(Stateful, Protocol):
    """Iterator over the samples and the plan of each optimizer step."""

    ended: bool
    """Whether the last step returned was the last of the data; the same on all ranks."""

    def __next__(self) -> tuple[SampleBatch, Plan]:
        """Returns this rank's samples, not yet distributed, and the plan over all ranks' samples. Collective."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Encodes texts, pairs of answers or judged answers as samples."""

    tokenizer: Tokenizer
    max_length: int
    """Most tokens of a sample."""
    pairs: bool = False
    """Whether the texts are pairs (DPO), two samples each."""
    judged: bool = False
    """Whether the texts are judged answers (KTO)."""

    @property
    def samples_per_text(self) -> int:
        """Samples of one text or pair."""
        return 2 if self.pairs else 1

    def encode(self, texts: Sequence[Any], ids: Any = None) -> SampleBatch:
        """Encodes `texts`, at least one, as samples with the ids `ids` (of pairs: see `encode_pairs`)."""
        encode: Any = encode_pairs if self.pairs else encode_judged if self.judged else encode_documents
        return encode(texts, self.tokenizer, max_length=self.max_length, ids=ids)

    def count_tokens(self, texts: Sequence[Any]) -> Ints:
        """Counts the tokens of the samples that `encode` would make: int64[n], of pairs int64[n, 2]."""
        try:
            return token_counts(texts, self.tokenizer)
        except Exception:
            for text in texts:  # `token_counts` does not name the text, `encode` does
                self.encode([text])
            raise

    def encode_share(self, texts: Sequence[Any], dp_rank: int, dp_size: int) -> SampleBatch:
        """Encodes this rank's contiguous share of `texts`, empty on surplus ranks. Ids are indices in `texts`."""
        share = rank_slice(len(texts), dp_rank, dp_size)
        if share.start == share.stop:
            return self.encode(texts[:1]).select([])  # an empty batch with the right fields
        return self.encode(texts[share], torch.arange(share.start, share.stop))

    def encode_mismatched(self, texts: Sequence[Any], dp_rank: int, dp_size: int) -> SampleBatch | None:
        """Encodes each prompt of this rank's share with the answer of the text before it, for KTO's reference point.

        Samples are cut to `max_length`, with ids as in `encode_share`. None for texts that are not judged.
        """
        if not self.judged:
            return None
        from roll_batching.losses.fine_tuning import mismatch_local  # other jobs need none

        share = rank_slice(len(texts), dp_rank, dp_size)
        # Also the text before the share: its answer goes to the share's first prompt. Before the first comes the last.
        indices = [(share.start - 1) % len(texts), *range(share.start, share.stop)]
        # The text before gets an id that no other has; it is dropped at the end.
        encoded = self.encode([texts[index] for index in indices], torch.tensor([len(texts), *indices[1:]]))
        if len(indices) == 1:  # more ranks than texts
            return encoded.only(("input_ids", "response_mask")).select([])
        return _cut(mismatch_local(encoded).select(range(1, len(indices))), self.max_length)

    def renumber_pairs(self, local_batch: SampleBatch) -> SampleBatch:
        """Sets the field `pair` anew from the samples' ids, which were renumbered over all ranks."""
        if not self.pairs:
            return local_batch
        return local_batch.with_fields({"pair": local_batch.ids // 2}, {"pair": local_batch.schema["pair"]})

    def group_ids(self, table: LengthTable) -> Ints | None:
        """Returns the pair of each sample, int64[n], as its group, which shares a micro-batch; None for texts."""
        return table.ids // self.samples_per_text if self.pairs else None


def _cut(batch: SampleBatch, max_length: int) -> SampleBatch:
    """`batch`, of per-token fields, with at most `max_length` tokens of each sample."""
    if not len(batch) or batch.max_length <= max_length:
        return batch
    schema = {name: batch.schema[name] for name in ("input_ids", "response_mask")}
    rows = {name: [row[:max_length] for row in batch.to_lists(name)] for name in schema}
    return SampleBatch.from_lists(rows, schema, batch.ids)


class PlannedSteps:
    """Mini-batches of one size, drawn epoch after epoch, each planned over all ranks.

    Args:
        texts: the whole dataset, the same on every rank.
        encoder: encodes texts as samples.
        strategy: makes the plans.
        size: texts or pairs of an optimizer step, over all ranks.
        seed: of the texts' order.
    """

    ended = False

    def __init__(
        self, texts: TextDataset[Any], encoder: Encoder, strategy: MegatronInferStrategy, *, size: int, seed: int
    ) -> None:
        self.encoder, self.strategy = encoder, strategy
        self._stream: EpochStream[Any] = EpochStream(texts, size, seed=seed)
        self._position = self._stream.state_dict()
        """Position after the last step returned; the stream itself is one step further."""
        self._shares = self._prefetch_shares()
        self.mismatched: SampleBatch | None = None
        """Mismatched samples of the last step returned; see `Encoder.encode_mismatched`."""

    def __next__(self) -> tuple[SampleBatch, Plan]:
        try:
            with consensus(self.strategy.layout.host_group, "encoding texts"):
                local_batch, mismatched, position = next(self._shares)
        except Exception:  # the same on all ranks: the next call tries this step again
            self.load_state_dict(self._position)
            raise
        self._position, self.mismatched = position, mismatched
        return local_batch, plan_texts(local_batch, self.encoder, self.strategy)

    def _prefetch_shares(self) -> Generator[tuple[SampleBatch, SampleBatch | None, dict[str, Any]]]:
        """Yields this rank's share of every step, read and encoded while the step before it trains."""
        layout, stream, encoder = self.strategy.layout, self._stream, self.encoder
        rank = layout.dp_rank, layout.dp_size
        return prefetch_items(
            (encoder.encode_share(texts, *rank), encoder.encode_mismatched(texts, *rank), stream.state_dict())
            for texts in stream
        )

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return self._position

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises DataError for other texts or another seed."""
        self._shares.close()
        self._stream.load_state_dict(state)
        self._position, self._shares = self._stream.state_dict(), self._prefetch_shares()


def plan_texts(
    local_batch: SampleBatch, encoder: Encoder, strategy: MegatronInferStrategy, *, forward: bool = False
) -> Plan:
    """Plans the samples of all ranks; `forward`: for a pass without gradient. Collective."""
    table = strategy.gather_table(local_batch)
    group_ids = encoder.group_ids(table)
    return agree_on_plan(strategy, lambda: strategy.plan(table, forward=forward, group_ids=group_ids))
