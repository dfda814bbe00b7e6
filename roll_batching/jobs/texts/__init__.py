"""Texts to learn from, and their tokens: prompts, documents, conversations, pairs; tokenizers; epochs."""

from __future__ import annotations

from roll_batching.jobs.texts.encode import encode_documents, encode_prompts
from roll_batching.jobs.texts.epochs import EpochStream, MixedStream, PromptStream, epoch_order
from roll_batching.jobs.texts.texts import Document, DocumentDataset, Prompt, PromptDataset
from roll_batching.jobs.texts.tokenizers import CharTokenizer, HFTokenizer, Tokenizer

__all__ = [
    "CharTokenizer",
    "Document",
    "DocumentDataset",
    "EpochStream",
    "HFTokenizer",
    "MixedStream",
    "Prompt",
    "PromptDataset",
    "PromptStream",
    "Tokenizer",
    "encode_documents",
    "encode_prompts",
    "epoch_order",
]
