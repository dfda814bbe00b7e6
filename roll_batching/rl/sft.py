"""The supervised phase: documents in mini-batches, planned, moved to their ranks, trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from roll_batching.data import SampleBatch, distribute, gather_lengths
from roll_batching.data.encode import encode_documents
from roll_batching.data.epochs import DocumentStream
from roll_batching.data.membership import rank_slice
from roll_batching.data.texts import Conversation, Document
from roll_batching.data.tokenizers import Tokenizer
from roll_batching.losses import SFTLoss
from roll_batching.rl.rows import merged, update_row
from roll_batching.rl.run import Run
from roll_batching.rl.update import Update
from roll_batching.strategy import MegatronTrainStrategy

PHASE = "warmup"
"""Its name in rows and checkpoints, and its key in a configuration."""


def train_supervised(run: Run) -> None:
    """The whole phase, as the section `warmup` says; nothing when a checkpoint lies beyond it. Collective."""
    warmup, strategy, corpus = run.config.warmup, run.strategy, run.inputs.corpus
    assert warmup is not None and corpus is not None
    if run.checkpoints.is_past(PHASE):
        return
    args = warmup.training_args
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * strategy.layout.dp_size
    args = warmup.scheduled(len(corpus), size)
    stream = DocumentStream(corpus, size, seed=run.config.seed)
    strategy.start_phase(args)
    behind = run.checkpoints.restore(PHASE, stream)
    run.begin(PHASE, args.max_steps, behind)
    for step in range(behind + 1, args.max_steps + 1):
        started = time.perf_counter()
        update = train_on_documents(
            strategy, next(stream), run.inputs.tokenizer, max_length=run.config.sequence_length or 1
        )
        row = merged(update_row([update]), {"reward": None, "skipped_steps": strategy.skipped_steps})
        row["seconds"] = time.perf_counter() - started
        run.recorder.step(step, row, shown={"loss": update.result.loss})
        run.checkpoints.save_if_due(PHASE, step, args.max_steps, stream)


def train_on_documents(
    strategy: MegatronTrainStrategy,
    documents: Sequence[Document | Conversation],
    tokenizer: Tokenizer,
    *,
    max_length: int,
) -> Update:
    """One optimizer step on `documents`, the same list on every rank. Collective.

    Each data-parallel rank encodes its share; the plan says who computes what.
    """
    home = encode_share(documents, tokenizer, strategy.layout.dp_rank, strategy.layout.dp_size, max_length)
    plan = strategy.plan(gather_lengths(home))
    return Update(plan=plan, result=strategy.train_step(distribute(home, plan), plan, SFTLoss()))


def encode_share(
    documents: Sequence[Document | Conversation], tokenizer: Tokenizer, dp_rank: int, dp_size: int, max_length: int
) -> SampleBatch:
    """This rank's contiguous share of `documents`, with ids by place in the list; may be empty."""
    mine = rank_slice(len(documents), dp_rank, dp_size)
    if mine.start == mine.stop:
        one = encode_documents(documents[:1], tokenizer, max_length=max_length)
        return one.select([])
    ids = torch.arange(mine.start, mine.stop)
    return encode_documents(documents[mine], tokenizer, max_length=max_length, ids=ids)
