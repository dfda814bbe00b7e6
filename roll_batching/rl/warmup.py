"""The supervised phase: documents in mini-batches, planned, moved to their ranks, trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from roll_batching.data import SampleBatch, distribute, gather_lengths
from roll_batching.data.encode import encode_documents
from roll_batching.data.membership import rank_slice
from roll_batching.data.texts import Document
from roll_batching.data.tokenizers import Tokenizer
from roll_batching.losses import SFTLoss
from roll_batching.planning import Plan
from roll_batching.strategy import MegatronTrainStrategy, StepResult


def train_on_documents(
    strategy: MegatronTrainStrategy,
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    *,
    max_length: int,
) -> tuple[Plan, StepResult]:
    """One optimizer step on `documents`, the same list on every rank. Collective.

    Each data-parallel rank encodes its share; the plan says who computes what.
    """
    home = encode_share(documents, tokenizer, strategy.layout.dp_rank, strategy.layout.dp_size, max_length)
    plan = strategy.plan(gather_lengths(home))
    return plan, strategy.train_step(distribute(home, plan), plan, SFTLoss())


def encode_share(
    documents: Sequence[Document], tokenizer: Tokenizer, dp_rank: int, dp_size: int, max_length: int
) -> SampleBatch:
    """This rank's contiguous share of `documents`, with ids by place in the list; may be empty."""
    mine = rank_slice(len(documents), dp_rank, dp_size)
    if mine.start == mine.stop:
        one = encode_documents(documents[:1], tokenizer, max_length=max_length)
        return one.select([])
    ids = torch.arange(mine.start, mine.stop)
    return encode_documents(documents[mine], tokenizer, max_length=max_length, ids=ids)
