"""Samples and how they move: ragged batches, exchange between ranks, texts, tokenizers, membership."""

from __future__ import annotations

from roll_batching.data.batchers import FixedCountBatcher, StridedBatcher, TokenBudgetBatcher, rollout_batcher
from roll_batching.data.encode import encode_documents, encode_prompts
from roll_batching.data.epochs import DocumentStream, EpochStream, MixedStream, PromptStream, epoch_order
from roll_batching.data.fields import FieldKind, FieldSpec, Schema
from roll_batching.data.former import PoolFormer
from roll_batching.data.load_balanced import LoadBalancedDataset, ShardedIterableDataset, StepBatches
from roll_batching.data.membership import MiniBatches, mini_batches, rank_slice
from roll_batching.data.movement import collect, distribute
from roll_batching.data.rollout_packer import DataCollatorForRollout, rollout_step
from roll_batching.data.rollout_queue import RolloutQueueDataset, RolloutSample
from roll_batching.data.rows import balance_by_squared_length, serpentine
from roll_batching.data.samples import SampleBatch
from roll_batching.data.stream import FormedBatch, LengthAwareStream
from roll_batching.data.table import LengthTable, gather_bins, gather_lengths, number_globally
from roll_batching.data.texts import Document, DocumentDataset, Prompt, PromptDataset
from roll_batching.data.tokenizers import CharTokenizer, HFTokenizer, Tokenizer

__all__ = [
    "CharTokenizer",
    "DataCollatorForRollout",
    "Document",
    "DocumentDataset",
    "DocumentStream",
    "EpochStream",
    "FieldKind",
    "FieldSpec",
    "FixedCountBatcher",
    "FormedBatch",
    "HFTokenizer",
    "LengthAwareStream",
    "LengthTable",
    "LoadBalancedDataset",
    "MiniBatches",
    "PoolFormer",
    "Prompt",
    "PromptDataset",
    "MixedStream",
    "PromptStream",
    "RolloutQueueDataset",
    "RolloutSample",
    "SampleBatch",
    "Schema",
    "StridedBatcher",
    "ShardedIterableDataset",
    "StepBatches",
    "TokenBudgetBatcher",
    "Tokenizer",
    "balance_by_squared_length",
    "collect",
    "distribute",
    "encode_documents",
    "encode_prompts",
    "epoch_order",
    "gather_bins",
    "gather_lengths",
    "mini_batches",
    "number_globally",
    "rank_slice",
    "rollout_batcher",
    "rollout_step",
    "serpentine",
]
