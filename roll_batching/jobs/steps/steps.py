"""Where a supervised phase takes its optimizer steps from: planned mini-batches of a text's samples."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from roll_batching.distributed import consensus
from roll_batching.jobs.objectives.running import Resumable
from roll_batching.jobs.steps.agreed_plans import agreed
from roll_batching.jobs.texts.encode import encode_documents, encode_pairs
from roll_batching.jobs.texts.epochs import EpochStream
from roll_batching.jobs.texts.fit import token_counts
from roll_batching.jobs.texts.texts import Conversation, Document, Pair, TextDataset
from roll_batching.jobs.texts.tokenizers import Tokenizer
from roll_batching.packing.prefetch import one_ahead
from roll_batching.planning import Plan
from roll_batching.planning.arrays import Ints
from roll_batching.samples import SampleBatch, gather_lengths
from roll_batching.samples.membership import rank_slice
from roll_batching.samples.table import LengthTable
from roll_batching.strategy import MegatronInferStrategy

Learnt = Document | Conversation | Pair
"""What is learnt from: a text, or a pair, which is two samples."""


class StepSource(Resumable, Protocol):
    """Gives the samples of one optimizer step after the other, with their plan."""

    ended: bool
    """Whether the step that was given last was the last of all; the same on all ranks."""

    def __next__(self) -> tuple[SampleBatch, Plan]:
        """This rank's samples, as they lie here now, and the plan of all ranks'. Collective."""


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Texts or pairs to samples."""

    tokenizer: Tokenizer
    max_length: int
    """Most tokens of a sample."""
    pairs: bool = False
    """Whether pairs are learnt from."""

    @property
    def samples_of_each(self) -> int:
        """Samples that one text or pair makes."""
        return 2 if self.pairs else 1

    def encode(self, texts: Sequence[Any], ids: Any = None) -> SampleBatch:
        """`texts`, at least one, with ids by `ids` (of pairs: see `encode_pairs`)."""
        encode = encode_pairs if self.pairs else encode_documents
        return encode(texts, self.tokenizer, max_length=self.max_length, ids=ids)

    def count(self, texts: Sequence[Any]) -> Ints:
        """The tokens of the samples that `encode` makes: int64[n], of pairs int64[n, 2]."""
        try:
            return token_counts(texts, self.tokenizer)
        except Exception:  # which text it was is said by who encodes it alone
            for text in texts:
                self.encode([text])
            raise

    def share(self, texts: Sequence[Any], dp_rank: int, dp_size: int) -> SampleBatch:
        """This rank's contiguous share of `texts`, at least one, with ids by place in the list; may be empty."""
        mine = rank_slice(len(texts), dp_rank, dp_size)
        if mine.start == mine.stop:
            return self.encode(texts[:1]).select([])
        return self.encode(texts[mine], torch.arange(mine.start, mine.stop))

    def numbered(self, home: SampleBatch) -> SampleBatch:
        """`home`, sample after sample as they were encoded, with ids of its own: pairs are numbered by them."""
        if not self.pairs:
            return home
        return home.with_fields({"pair": home.ids // 2}, {"pair": home.schema["pair"]})

    def groups_of(self, table: LengthTable) -> Any:
        """What must share a micro-batch: int64[n], or None for texts."""
        return table.ids // self.samples_of_each if self.pairs else None


class PlannedSteps:
    """Mini-batches of one size, drawn epoch after epoch, each planned over all ranks.

    Args:
        texts: all of them, the same on every rank.
        encoder: turns them into samples.
        strategy: plans.
        size: texts or pairs of an optimizer step, over all ranks.
        seed: of their order.
    """

    ended = False

    def __init__(
        self, texts: TextDataset[Any], encoder: Encoder, strategy: MegatronInferStrategy, *, size: int, seed: int
    ) -> None:
        self.encoder, self.strategy = encoder, strategy
        self._stream: EpochStream[Any] = EpochStream(texts, size, seed=seed)
        self._behind = self._stream.state_dict()
        """The position behind the step that was given last; the stream itself is ahead."""
        self._shares = self._encoded_ahead()

    def __next__(self) -> tuple[SampleBatch, Plan]:
        try:
            with consensus(self.strategy.layout.host_group, "encoding texts"):
                home, behind = next(self._shares)
        except Exception:  # the same on all ranks, which try this step again when they are asked again
            self.load_state_dict(self._behind)
            raise
        self._behind = behind
        return home, planned(home, self.encoder, self.strategy)

    def _encoded_ahead(self) -> Generator[tuple[SampleBatch, dict[str, Any]]]:
        """This rank's share of every step, read and encoded while the step before it trains."""
        layout, stream = self.strategy.layout, self._stream
        return one_ahead(
            (self.encoder.share(texts, layout.dp_rank, layout.dp_size), stream.state_dict()) for texts in stream
        )

    def state_dict(self) -> dict[str, Any]:
        """The position in the data."""
        return self._behind

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. Raises DataError for other texts or another seed."""
        self._shares.close()
        self._stream.load_state_dict(state)
        self._behind, self._shares = self._stream.state_dict(), self._encoded_ahead()


def planned(home: SampleBatch, encoder: Encoder, strategy: MegatronInferStrategy, *, forward: bool = False) -> Plan:
    """The plan of all ranks' samples, `home` being this rank's. Collective. `forward`: of a pass without gradient."""
    table = gather_lengths(home)
    groups = encoder.groups_of(table)
    return agreed(strategy, lambda: strategy.plan(table, forward=forward, group_ids=groups))
